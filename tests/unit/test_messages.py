"""Pictures and videos taken out of checked messages, in order; what is refused, test_chat has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.messages import Message, check_messages, check_turns, take_visuals
from kestrel_cuda.inputs.visual_source import VisualSource


def taken(*contents: Any) -> tuple[list[object], tuple[VisualSource, ...]]:
    messages: list[Message] = check_messages([{"role": "user", "content": content} for content in contents])
    bare, visuals = take_visuals(messages, Path("/there"))
    return [message["content"] for message in bare], visuals


def test_parts_are_left_bare_and_sources_are_in_order() -> None:
    clip = {"type": "video", "video": ["f0.png", "/else/f1.png"], "fps": 3}
    contents, visuals = taken(
        [{"type": "text", "text": "a"}, {"type": "image", "image": "b.png", "min_pixels": 7}, clip],
        "plain",
        [{"image": "../c.png", "max_pixels": 9000}, {"type": "video", "video": "d.mp4"}],
    )
    assert contents == [
        [{"type": "text", "text": "a"}, {"type": "image", "image": ""}, {"type": "video", "video": ""}],
        "plain",
        [{"type": "image", "image": ""}, {"type": "video", "video": ""}],
    ]
    assert visuals == (
        VisualSource("image", "/there/b.png", min_pixels=7),
        VisualSource("video", ("/there/f0.png", "/else/f1.png"), fps=3),
        VisualSource("image", "/there/../c.png", max_pixels=9000),
        VisualSource("video", "/there/d.mp4"),
    )


def test_a_url_stays_one() -> None:
    assert taken([{"type": "image", "image": "https://a.b/c.png"}])[1] == (VisualSource("image", "https://a.b/c.png"),)


def test_what_was_checked_is_not_changed() -> None:
    messages: list[Message] = [{"role": "user", "content": [{"type": "image", "image": "a.png"}], "name": "n"}]
    bare, _ = take_visuals(messages, Path())
    assert messages == [{"role": "user", "content": [{"type": "image", "image": "a.png"}], "name": "n"}]
    assert bare[0]["name"] == "n"


def test_a_file_that_is_named_like_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data:x.png").touch()
    with pytest.raises(InputError, match=r"data:x\.png reads as a URL, .*; write \./data:x\.png for it"):
        take_visuals([{"role": "user", "content": [{"type": "image", "image": "data:x.png"}]}], tmp_path)
    monkeypatch.chdir(tmp_path)
    _, (source,) = take_visuals([{"role": "user", "content": [{"type": "image", "image": "./data:x.png"}]}], Path())
    assert source.path == "./data:x.png"


@pytest.mark.parametrize(
    "messages",
    [[], {}, "hi", None, ["hi"], [{"role": "user"}], [{"role": "user", "content": ("a",)}], [{"content": "a"}]],
)
def test_a_conversation_that_would_lose_something(messages: Any) -> None:
    with pytest.raises(InputError, match=r"^the conversation( is|: message 1) .*(is needed|roles are)"):
        check_turns(messages)


def test_turns_that_a_template_takes() -> None:
    check_turns(
        [{"role": "user", "content": "a"}, {"role": "tool", "content": [{"type": "image", "image": ""}], "x": 1}]
    )
