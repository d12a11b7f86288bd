"""Templates that fail, never end or give no text, and conversations that no template should see."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kestrel_cuda.checkpoint.reader import open_checkpoint
from kestrel_cuda.errors import CheckpointError, InputError
from kestrel_cuda.inputs.chat import ChatTemplate, check_encoded, check_vocabulary, encode_chat
from kestrel_cuda.inputs.tokenizer import Tokenizer
from tests import checkpoints
from tests.checkpoints import edit_json

USER: list[dict[str, object]] = [{"role": "user", "content": "Hi"}]
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@pytest.fixture
def directory(oracle: Path, tmp_path: Path) -> Path:
    """An editable copy of a checkpoint, its template in chat_template.jinja."""
    return checkpoints.copy(oracle / "checkpoints/tiny-dense-tied", tmp_path / "checkpoint")


@pytest.fixture(scope="module")
def small(oracle: Path) -> Tokenizer:
    return Tokenizer.load(oracle / "checkpoints/tiny-dense-tied")


# Templates


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ (" * 5000, "it nests or calls itself too deeply"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "it nests or calls itself too deeply"),
        (
            "{% if 1 %}" * 40 + "{% for i in [1] %}" * 40 + "{% endfor %}" * 40 + "{% endif %}" * 40,
            "too many statically",
        ),
        ("{{ f(a=1, a=2) }}", "keyword argument repeated"),
        ("{% macro m(a, a) %}{% endmacro %}", "duplicate argument"),
        ("{{ " + "9" * 5000 + " }}", "Exceeds the limit"),
        ("{% block a %}{% endblock %}{% block a %}{% endblock %}", "(line 1): block 'a' defined twice"),
    ],
)
def test_what_does_not_compile_is_named(text: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=r"the chat template in here does not compile") as caught:
        ChatTemplate(text, "here")
    assert reason in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ lipsum(n=10) }}", "'lipsum' is undefined"),
        ("{{ 10 ** (10 ** 10) }}", "its ** gives too large a number"),
        ("{{ 'a' * 10 ** 12 }}", "its * gives too large a result"),
        ("{{ 10 ** 12 * [1] }}", "its * gives too large a result"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "more than 200000 steps"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
            "more than 200000",
        ),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "it nests or calls itself too deeply"),
        ("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", "it nests or calls itself too deeply"),
        ("{{ cycler() }}", "at least one item has to be provided"),
        ("{{ 'a'.encode('no such') }}", "unknown encoding"),
        ("{{ '%d' | format('x') }}", "%d format"),
        ("{% include 'x' %}", "no loader"),
        ("{{ raise_exception('a\\x1b[2J\\ud800') }}", r"a\x1b[2J\ud800"),
    ],
)
def test_what_fails_or_never_ends_is_refused(text: str, reason: str) -> None:
    template = ChatTemplate(text, "here")
    started = time.perf_counter()
    with pytest.raises(InputError, match=r"the chat template \(here\) refuses this conversation: ") as caught:
        template.render(USER)
    assert reason in str(caught.value)
    assert str(caught.value).isprintable()
    assert time.perf_counter() - started < 15


def test_each_rendering_has_its_own_steps() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}{{ 2 ** 10 * 3 }}{{ '-' * 3 }}", "here")
    for _ in range(4):
        assert template.render(USER) == "3072---"


@pytest.mark.parametrize("name", [["x"], {"a": 1}, None, 7])
def test_named_templates_of_odd_names(directory: Path, name: object) -> None:
    (directory / "chat_template.jinja").unlink()
    named = [{"name": name, "template": "odd"}, "x", {"name": "default", "template": "default"}]
    edit_json(directory / "tokenizer_config.json", {"chat_template": named})
    template = ChatTemplate.load(directory)
    assert template is not None
    assert template.render(USER) == "default"


def test_half_a_character_is_whose_it_is(small: Tokenizer) -> None:
    plain = ChatTemplate("{{ messages[0].content }}", "here")
    with pytest.raises(InputError, match=r"^the conversation is not valid Unicode \(U\+D83D at position"):
        encode_chat(plain, small, [{"role": "user", "content": "a\ud83d"}])
    for text in (r"{{ '\ud800' }}", "x\ud800"):
        with pytest.raises(
            InputError, match=r"^the chat template \(here\) gives text that is not valid Unicode \(U\+D800"
        ):
            encode_chat(ChatTemplate(text, "here"), small, USER)


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_template_is_named(directory: Path, text: str) -> None:
    (directory / "chat_template.jinja").write_text(text)
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja has an empty chat template \(\d bytes\); fetch"):
        ChatTemplate.load(directory)


# Conversations


@pytest.mark.parametrize(
    ("conversation", "left_out"),
    [
        (
            [{"role": "user", "content": "hi"}, {"role": "system", "content": "In French."}],
            r"message 2 \(system\); it may",
        ),
        (
            [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, *USER],
            r"message 2 \(system\); it may",
        ),
        ([{"role": "critic", "content": "hi"}, *USER], r"message 1 \(critic\); change"),
    ],
)
def test_a_text_that_the_template_leaves_out_is_refused(
    directory: Path, small: Tokenizer, conversation: list[dict[str, object]], left_out: str
) -> None:
    template = ChatTemplate.load(directory)
    assert template is not None
    with pytest.raises(InputError, match=rf"\(chat_template\.jinja\) leaves out the text of {left_out}"):
        encode_chat(template, small, conversation)


def test_blanks_and_earlier_thoughts_may_be_left_out(small: Tokenizer) -> None:
    text = "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim }}{% endfor %}"
    conversation = [
        *USER,
        {"role": "assistant", "content": "<think>No.</think>Yes."},
        {"role": "user", "content": " And? "},
    ]
    assert small.decode(encode_chat(ChatTemplate(text, "here"), small, conversation)).startswith("Hi")


def test_a_conversation_of_every_private_character(small: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0].content }}", "here")
    two_ranges = "".join(map(chr, [*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE)]))
    ids = encode_chat(template, small, [{"role": "user", "content": two_ranges + "<|im_end|>"}])
    assert not set(ids) & set(small.added_tokens)
    assert small.decode(ids, skip_special=False) == two_ranges + "<|im_end|>"
    every = two_ranges + "".join(map(chr, range(0x100000, 0x10FFFE)))
    with pytest.raises(InputError, match="uses up Unicode's private-use characters"):
        encode_chat(template, small, [{"role": "user", "content": every + "<|im_end|>"}])


def test_a_conversation_nested_deeply(small: Tokenizer) -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    for messages, tools in (([{"role": "user", "content": deep}], None), (USER, deep)):
        with pytest.raises(InputError, match="the conversation nests too deeply"):
            encode_chat(ChatTemplate("x", "here"), small, messages, tools=tools)


# Ids beyond the model's


def test_a_tokenizer_with_more_tokens_than_the_model(directory: Path) -> None:
    checkpoint, tokenizer = open_checkpoint(directory), Tokenizer.load(directory)
    check_vocabulary(checkpoint, tokenizer)
    vocab_size = checkpoint.config.text.vocab_size
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"]["vocab"]["ĠĠĠĠĠĠĠĠĠ"] = vocab_size
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as caught:
        check_vocabulary(checkpoint, Tokenizer.load(directory))
    assert f"the tokenizer has ids up to {vocab_size}, the model up to {vocab_size - 1}" in str(caught.value)


def test_an_added_token_that_the_model_lacks_is_named_where_it_is_used(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    vocab_size = checkpoint.config.text.vocab_size
    content = json.loads((directory / "tokenizer.json").read_text())
    added = [{"id": token_id, "content": f"<|extra_{token_id}|>", **FLAGS} for token_id in range(640, vocab_size + 1)]
    content["added_tokens"] += added
    (directory / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(directory)
    check_vocabulary(checkpoint, tokenizer)
    last = tokenizer.encode(f"<|extra_{vocab_size - 1}|>")
    assert check_encoded(checkpoint, tokenizer, last) == last == [vocab_size - 1]
    with pytest.raises(InputError, match=rf"holds <\|extra_{vocab_size}\|>, whose id {vocab_size} the model does not"):
        check_encoded(checkpoint, tokenizer, tokenizer.encode(f"a<|extra_{vocab_size}|>"))
