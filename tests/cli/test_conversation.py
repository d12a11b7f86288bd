"""The file of --messages: what is taken, what is refused, and what goes unused is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrel_cli.conversation import read_conversation
from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.visual_source import VisualSource
from tests.cli.conftest import CommandLine

CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Two?"},
]


def read(document: Any) -> tuple[list[dict[str, object]], list[str]]:
    """The messages, and what was said of them."""
    heard: list[str] = []
    messages, visuals = read_conversation(json.dumps(document), "m.json", Path("there"), heard.append)
    assert visuals == ()
    return messages, heard


@pytest.mark.parametrize("document", [CONVERSATION, {"messages": CONVERSATION}])
def test_a_list_or_an_object_with_one(document: object) -> None:
    assert read(document) == (CONVERSATION, [])


@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf"])
def test_the_file_reaches_the_engine(kestrel: CommandLine, prefix: bytes, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_bytes(prefix + json.dumps({"messages": CONVERSATION, "model": "x"}).encode())
    ran = kestrel("run", "--json", "--messages", str(file))
    assert ran.engine is not None
    assert ran.engine.calls["chat"] == CONVERSATION
    assert f"{file}: only messages is used, not model" in ran.json["warnings"]
    assert f"warning: {file}: only messages is used, not model\n" in ran.err


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}]
    assert read([{"role": "user", "content": parts}]) == ([{"role": "user", "content": "ab"}], [])


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"messages": CONVERSATION, "tools": [], "model": "x"}, "m.json: only messages is used, not model, tools"),
        (
            [{"role": "user", "content": "a", "name": "b"}],
            "m.json: message 1: name counts only where the checkpoint's chat template reads it",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}],
            "m.json: message 1, part 1: only type and text are used, not cache_control",
        ),
    ],
)
def test_what_goes_unused_is_said(document: object, said: str) -> None:
    assert read(document)[1] == [said]


def test_pictures_are_taken_from_beside_the_file(kestrel: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    parts = [
        {"type": "text", "text": "a", "cache_control": {}},
        {"type": "image", "image": "b/c.png", "max_pixels": 4096, "detail": "high"},
        {"type": "video", "video": ["f0.png", "/f1.png"], "fps": 3, "max_pixels": 4096},
    ]
    messages = [{"role": "user", "content": parts}, *CONVERSATION[2:], {"role": "user", "content": parts[:1]}]
    file.write_text(json.dumps(messages))
    ran = kestrel("run", "--json", "--messages", str(file))
    assert ran.engine is not None
    text = {"type": "text", "text": "a", "cache_control": {}}
    bare = [text, {"type": "image", "image": ""}, {"type": "video", "video": ""}]
    assert ran.engine.calls["chat"] == [
        {"role": "user", "content": bare},
        *CONVERSATION[2:],
        {"role": "user", "content": "a"},
    ]
    assert ran.engine.calls["visuals"] == (
        VisualSource("image", str(tmp_path / "b/c.png"), max_pixels=4096),
        VisualSource("video", (str(tmp_path / "f0.png"), "/f1.png"), fps=3),
    )
    assert ran.json["warnings"][:3] == [
        f"{file}: message 1, part 1: only type and text are used, not cache_control",
        f"{file}: message 1, part 2: only type, image, min_pixels and max_pixels are used, not detail",
        f"{file}: message 1, part 3: only type, video and fps are used, not max_pixels",
    ]


def test_pictures_of_a_conversation_on_standard_input_are_taken_from_here(
    kestrel: CommandLine, stdin: Callable[[bytes], None]
) -> None:
    stdin(b'[{"role": "user", "content": [{"image": "a.png"}]}]')
    ran = kestrel("run", "--messages", "-")
    assert ran.engine is not None
    assert ran.engine.calls["visuals"] == (VisualSource("image", "a.png"),)


def test_other_keys_are_the_templates_to_read() -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    assert read([message])[0] == [message]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"not JSON: Expecting value: .*; a list of messages is needed, or an object with messages$"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("1" * 5000, "not JSON"),
        ("[]", "m.json holds no messages"),
        ("{}", "m.json is an object without messages; a list is needed, or an object with messages$"),
        ('{"role": "user", "content": "hi"}', "m.json is one message; put it into a list$"),
        ('"hi"', "m.json has a string for messages"),
        ('{"messages": "hi"}', "m.json has a string for messages"),
        ('{"messages": [], "tools": [{}]}', "m.json gives tools; tools are not supported yet"),
        ('["hi"]', "message 1 is a string"),
        ('[{"role": "user"}]', "message 1 .*; text or a list of parts is needed"),
        ('[{"role": "user", "content": "a"}, {"role": "bot", "content": "a"}]', 'message 2 has role "bot"; roles are'),
        ('[{"role": ["user"], "content": "a"}]', "message 1 has role"),
        ('[{"role": "user", "content": null}]', "null; text or a list of parts is needed"),
        (
            '[{"role": "user", "content": "a", "images": ["a.png"]}]',
            "message 1 holds images beside its content; pictures",
        ),
        (
            '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
            "holds image_url, which is",
        ),
        ('[{"role": "user", "content": "a", "content": "b"}]', 'the key "content" stands twice in one object'),
        ('{"messages": [], "messages": []}', 'the key "messages" stands twice in one object'),
        ('[{"role": "user", "content": "\\ud800"}]', r"\\ud800 is half of a surrogate pair"),
        ('[{"role": "user", "content": "a", "x": {"\\udc00": 1}}]', r"\\udc00 is half of a surrogate pair"),
    ],
)
def test_a_damaged_conversation_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        read_conversation(text, "m.json", Path(), lambda _: None)
    assert str(raised.value).startswith("m.json")
