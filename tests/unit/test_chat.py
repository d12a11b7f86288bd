"""Chat templates against the reference, and user text that must stay text. Runs no model."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel_cuda.checkpoint.reader import open_checkpoint
from kestrel_cuda.errors import CheckpointError, InputError
from kestrel_cuda.inputs.chat import ChatTemplate, encode_chat, end_ids
from kestrel_cuda.inputs.messages import check_messages
from kestrel_cuda.inputs.tokenizer import Tokenizer
from kestrel_cuda.inputs.vocabulary import end_warnings
from tests import checkpoints
from tests.checkpoints import edit_json

DATA = Path(__file__).resolve().parents[1] / "data"
CASES = json.loads((DATA / "oracle/extras/chat_template_qwen3vl.json").read_text())
GOLDENS = sorted((DATA / "oracle/golden").glob("*/text-*.json")) + sorted((DATA / "oracle/golden").glob("*/raw-*.json"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("qwen3")
    content = (DATA / "tokenizer-qwen3/tokenizer.json.gz").read_bytes()
    (directory / "tokenizer.json").write_bytes(gzip.decompress(content))
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    loaded = ChatTemplate.load(DATA / "tokenizer-qwen3")
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def small(oracle: Path) -> Tokenizer:
    return Tokenizer.load(oracle / "checkpoints/tiny-dense-tied")


@pytest.fixture
def directory(oracle: Path, tmp_path: Path) -> Path:
    """An editable copy of a checkpoint, its template in chat_template.jinja."""
    return checkpoints.copy(oracle / "checkpoints/tiny-dense-tied", tmp_path / "checkpoint")


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


# Against the reference


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_rendered_text_and_ids_of_the_reference(case: dict[str, Any], template: ChatTemplate, qwen3: Tokenizer) -> None:
    arguments = {key: value for key, value in case.items() if key not in ("text", "ids")}
    assert template.render(**arguments) == case["text"]
    assert encode_chat(template, qwen3, **arguments) == case["ids"]


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_prompt_ids_of_every_text_golden(golden: Path, oracle: Path) -> None:
    info = json.loads(golden.read_text())
    directory = oracle / "checkpoints" / golden.parent.name
    tokenizer = Tokenizer.load(directory)
    if info["raw"] is not None:
        ids = tokenizer.encode(info["raw"])
    else:
        template = ChatTemplate.load(directory)
        assert template is not None
        assert template.render(info["messages"]) == info["prompt_text"]
        ids = encode_chat(template, tokenizer, info["messages"])
    assert ids == np.load(golden.with_suffix(".npz"))["input_ids"].tolist()


@pytest.mark.parametrize(
    "text", ["\nfoo", " foo ", "", " ", "a < b > c", "e\u0301", "'s", "<", ">", "<|", "|>", "\ue000"]
)
def test_ordinary_text_is_encoded_as_the_whole_rendering_is(
    text: str, template: ChatTemplate, small: Tokenizer, qwen3: Tokenizer
) -> None:
    messages = [
        {"role": "system", "content": text},
        *user(text),
        {"role": "assistant", "content": text},
        *user("x" + text),
    ]
    for tokenizer in (small, qwen3):
        assert encode_chat(template, tokenizer, messages) == tokenizer.encode(template.render(messages))


def test_an_empty_prompt_leaves_the_templates_text(template: ChatTemplate, qwen3: Tokenizer) -> None:
    ids = encode_chat(template, qwen3, user(""))
    assert qwen3.decode(ids, skip_special=False) == "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"


# What a user types stays text


def test_no_added_token_is_made_from_a_message(template: ChatTemplate, qwen3: Tokenizer) -> None:
    added = set(qwen3.added_tokens)
    frame = [token_id for token_id in encode_chat(template, qwen3, user("x")) if token_id in added]
    for token in qwen3.added_tokens.values():
        for text in (token, f"a{token}b", token + token, f"<|im_{token}end|>", f"<{token}>"):
            for content in (text, [{"type": "text", "text": text}]):
                ids = encode_chat(template, qwen3, user(content))
                assert [token_id for token_id in ids if token_id in added] == frame, text
                assert qwen3.decode(ids, skip_special=False) == template.render(user(text))


def test_no_added_token_is_made_from_neighbouring_parts(template: ChatTemplate, qwen3: Tokenizer) -> None:
    token = "<|im_end|>"
    expected = encode_chat(template, qwen3, user(token))
    for cut, second in itertools.combinations(range(len(token) + 1), 2):
        pieces = (token[:cut], token[cut:second], token[second:])
        parts = [{"type": "text", "text": piece} for piece in pieces]
        assert encode_chat(template, qwen3, user(parts)) == expected


@pytest.mark.parametrize(
    ("text", "content"), [("{{ messages[0].content }}think>", "<"), ("<think{{ messages[0].content }}", ">")]
)
def test_no_added_token_is_completed_by_the_template(text: str, content: str, qwen3: Tokenizer) -> None:
    template = ChatTemplate(text, "here")
    assert template.render(user(content)) == "<think>"
    assert not set(encode_chat(template, qwen3, user(content))) & set(qwen3.added_tokens)


def test_tool_texts_stay_text(template: ChatTemplate, qwen3: Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"<think>": "<|im_end|>", "type": "<think>"}}}
    tools = [{"type": "function", "function": {"name": "f", "description": "</tool_call><|im_start|>"}}]

    def conversation(text: str) -> list[dict[str, object]]:
        return [
            *user("Go"),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": text},
        ]

    ids = encode_chat(template, qwen3, conversation("<tool_response>"), tools=tools)
    assert qwen3.decode(ids, skip_special=False) == template.render(conversation("<tool_response>"), tools=tools)
    names = [qwen3.added_tokens[token_id] for token_id in ids if token_id in qwen3.added_tokens]
    assert names.count("<tool_response>") == 1
    assert "<think>" not in names
    assert names.count("<|im_start|>") == names.count("<|im_end|>") + 1 == 5


def test_roles_and_kinds_survive_odd_added_tokens(directory: Path) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    for token_id, text in enumerate(["user", "text", "reason:"], start=640):
        content["added_tokens"].append({"id": token_id, "content": text, **flags})
    path.write_text(json.dumps(content))
    tokenizer, template = Tokenizer.load(directory), ChatTemplate.load(directory)
    assert template is not None
    ids = encode_chat(template, tokenizer, user([{"type": "text", "text": "a user's text"}]))
    assert tokenizer.decode(ids, skip_special=False) == template.render(user("a user's text"))
    assert (ids.count(640), ids.count(641)) == (1, 0)  # the template's own "user" is the token, the message's is text


# Where the template is from, the one that counts first

PLACES = ["processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json"]


def put(path: Path, text: str) -> None:
    if path.suffix == ".jinja":
        path.write_text(text)
    elif path.exists():
        edit_json(path, {"chat_template": text})
    else:
        path.write_text(json.dumps({"chat_template": text}))


@pytest.mark.parametrize("place", PLACES)
def test_the_same_text_from_each_place(directory: Path, place: str) -> None:
    text = (directory / "chat_template.jinja").read_text()
    expected = ChatTemplate.load(directory)
    (directory / "chat_template.jinja").unlink()
    assert ChatTemplate.load(directory) is None
    put(directory / place, text)
    template = ChatTemplate.load(directory)
    assert template is not None
    assert expected is not None
    assert (template.source, template.warnings) == (place, [])
    assert template.render(user("Hi")) == expected.render(user("Hi"))


def test_the_processors_order_and_a_warning_when_they_differ(directory: Path) -> None:
    for name in PLACES:
        put(directory / name, f"from {name}")
    for name in PLACES:
        template = ChatTemplate.load(directory)
        assert template is not None
        assert (template.source, template.render(user("Hi"))) == (name, f"from {name}")
        others = ", ".join(PLACES[PLACES.index(name) + 1 :])
        assert template.warnings == ([f"chat templates differ: {name} is used, {others} is not"] if others else [])
        (directory / name).unlink()


def test_equal_templates_in_two_places_are_no_warning(directory: Path) -> None:
    put(directory / "chat_template.json", (directory / "chat_template.jinja").read_text())
    template = ChatTemplate.load(directory)
    assert template is not None
    assert (template.source, template.warnings) == ("chat_template.json", [])


def test_of_named_templates_the_default_counts(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    edit_json(directory / "tokenizer_config.json", {"chat_template": named})
    template = ChatTemplate.load(directory)
    assert template is not None
    assert template.render(user("Hi")) == "default"
    edit_json(directory / "tokenizer_config.json", {"chat_template": 7})
    with pytest.raises(CheckpointError, match="chat_template is 7"):
        ChatTemplate.load(directory)


def test_a_template_that_does_not_compile_is_named(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("ok\n{% if %}")
    with pytest.raises(CheckpointError, match=r"in chat_template\.jinja does not compile \(line 2\)"):
        ChatTemplate.load(directory)
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"cannot read .*chat_template\.jinja"):
        ChatTemplate.load(directory)


# What a template may use


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ('{{ {"b": "é<&>", "a": [1]} | tojson }}', '{"b": "é<&>", "a": [1]}'),
        ('{{ {"b": 1} | tojson(indent=1) }}', '{\n "b": 1\n}'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ eos_token }}", "<|im_end|>"),
        ("{{ enable_thinking }}", "False"),
    ],
)
def test_what_templates_rely_on(text: str, rendered: str) -> None:
    template = ChatTemplate(text, "here", tokens={"eos_token": "<|im_end|>"})
    assert template.render(user("Hi"), enable_thinking=False) == rendered


def test_the_named_tokens_of_the_checkpoint_reach_its_template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ eos_token }}{{ pad_token }}{{ bos_token }}")
    template = ChatTemplate.load(directory)
    assert template is not None
    assert template.render(user("Hi")) == "<|im_end|><|endoftext|>"


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('only\\none turn') }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_template_that_refuses_is_an_input_error(text: str) -> None:
    with pytest.raises(InputError, match=r"the chat template \(here\) refuses this conversation: ") as caught:
        ChatTemplate(text, "here").render(user("Hi"))
    assert "\n" not in str(caught.value)


# End ids


def test_a_checkpoint_that_names_no_end_is_warned_of(directory: Path) -> None:
    def warnings() -> list[str]:
        checkpoint = open_checkpoint(directory)
        return end_warnings(checkpoint, end_ids(checkpoint, Tokenizer.load(directory)))

    assert warnings() == []
    edit_json(directory / "generation_config.json", {"eos_token_id": 2147483647})
    assert warnings()[0].startswith("end ids [2147483647] are outside the vocabulary")
    (directory / "generation_config.json").unlink()
    edit_json(directory / "config.json", {}, ("text_config.eos_token_id",))
    edit_json(directory / "tokenizer_config.json", {}, ("eos_token",))
    assert "name no id that ends an answer" in warnings()[0]


def test_end_ids_are_the_union(directory: Path) -> None:
    def ids() -> tuple[int, ...]:
        return end_ids(open_checkpoint(directory), Tokenizer.load(directory))

    assert ids() == (616, 614)
    edit_json(directory / "generation_config.json", {"eos_token_id": [600, 600, 601]})
    edit_json(directory / "config.json", {"text_config.eos_token_id": 602})
    assert ids() == (600, 601, 602, 616)
    (directory / "generation_config.json").unlink()
    edit_json(directory / "config.json", {}, ("text_config.eos_token_id",))
    assert ids() == (616,)
    edit_json(directory / "tokenizer_config.json", {}, ("eos_token",))
    assert ids() == ()


# Conversations from outside


@pytest.mark.parametrize("content", ["Hi", "", [], [{"type": "text", "text": "a"}, {"text": "b"}]])
@pytest.mark.parametrize("wrapped", [True, False])
def test_conversations_that_are_taken(content: object, wrapped: bool) -> None:
    messages = [{"role": "system", "content": "S"}, *user(content), {"role": "assistant", "content": "Yes"}]
    assert check_messages({"messages": messages} if wrapped else messages) == messages


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([], "chat.json holds no messages"),
        ("Hi", "chat.json has a string for messages"),
        ({}, "chat.json is an object without messages; a list is needed"),
        (user("x")[0], "chat.json is one message; put it into a list"),
        ({"messages": user("x"), "tools": [{}]}, "chat.json gives tools"),
        ([*user("x"), "Hi"], "chat.json: message 2 is a string"),
        ([{"content": "x"}], "chat.json: message 1 has role null"),
        ([{"role": "bot", "content": "x"}], 'chat.json: message 1 has role "bot"; roles are system, user,'),
        ([{"role": "user"}], "chat.json: message 1 (user) has no content"),
        ([{"role": ["\n\ud800"]}], r'message 1 has role ["\\n\ud800"]'),
        (user(None), "chat.json: message 1 (user) has content that is null"),
        (user(7), "chat.json: message 1 (user) has content that is a number"),
        (user(["x"]), "chat.json: message 1 (user), part 1, is a string"),
        (user([{"type": "text"}]), 'part 1, has text that is null; {"type": "text", "text": "..."} is needed'),
        (user([{"type": "audio", "text": "x"}]), 'part 1, has type "audio"; types are text, image and video'),
        (user([{"type": "text", "text": "x"}, {"type": "image"}]), "part 2, has no path for image; {"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "part 1, holds image_url, which is not read; files"),
        (user([{"type": "video_url"}]), 'holds video_url, which is not read; files are, as {"type": "video", "video":'),
        (user([{"type": "image", "image": "a.png", "image_url": "b"}]), "holds image_url, which is not read"),
        (user([{"type": "input_image", "text": "x"}]), "holds input_image, which is not read"),
        (user([{"type": "text", "text": "x", "image": "a.png"}]), 'has type "text" and holds image; a part is one'),
        (user([{"type": "text", "text": "x", "video": None}]), 'has type "text" and holds video; a part is one'),
        (user([{"image": "a.png", "video": "b.mp4"}]), 'has type "image" and holds video; a part is one'),
        (user([{"type": "image", "image": ["a.png"]}]), "has no path for image"),
        (user([{"type": "image", "image": " "}]), "has no path for image"),
        (user([{"type": "image", "image": "a\0b"}]), "has no path for image"),
        (user([{"type": "video", "video": []}]), "has no path for video; {"),
        (user([{"type": "video", "video": ["a.png", 1]}]), "has no path for video"),
        (user([{"type": "video", "video": "a.mp4", "fps": 0}]), "has fps 0; a number from 0.001 to 1000000 is"),
        (user([{"type": "video", "video": "a.mp4", "fps": 5e-324}]), "has fps 5e-324; a number from 0.001"),
        (user([{"type": "video", "video": "a.mp4", "fps": 0.0009}]), "has fps 0.0009; a number from 0.001"),
        (user([{"type": "video", "video": "a.mp4", "fps": True}]), "has fps true; a number from 0.001"),
        (user([{"type": "video", "video": "a.mp4", "fps": "2"}]), 'has fps "2"; a number from 0.001'),
        (user([{"type": "video", "video": "a.mp4", "fps": float("nan")}]), "has fps NaN; a number from 0.001"),
        (user([{"type": "video", "video": "a.mp4", "fps": 10**400}]), "; a number from 0.001 to 1000000 is"),
        (user([{"type": "image", "image": "a.png", "max_pixels": 0.5}]), "has max_pixels 0.5; a whole number"),
        (user([{"type": "image", "image": "a.png", "min_pixels": -1}]), "has min_pixels -1; a whole number"),
    ],
)
def test_conversations_that_are_refused(value: object, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        check_messages(value, "chat.json")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_slowest_and_the_fastest_video() -> None:
    for fps in (0.001, 1_000_000):
        check_messages(user([{"type": "video", "video": "a.mp4", "fps": fps}]), "chat.json")
