"""Tokenizer files that no released checkpoint has: refused by name when they are read, not when text comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrel_cuda.errors import CheckpointError
from kestrel_cuda.inputs.template import ChatTemplate
from kestrel_cuda.inputs.tokenizer import Tokenizer
from tests import checkpoints
from tests.checkpoints import edit_json


@pytest.fixture
def directory(oracle: Path, tmp_path: Path) -> Path:
    """An editable copy of a checkpoint."""
    return checkpoints.copy(oracle / "checkpoints/tiny-dense-tied", tmp_path / "checkpoint")


@pytest.fixture
def older(directory: Path) -> Path:
    """The same without tokenizer.json: vocab.json and merges.txt in its place."""
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (directory / "tokenizer.json").unlink()
    return directory


def error_of(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(directory)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize(
    "model",
    [
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"},
        {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "<unk>", "continuing_subword_prefix": "##",
         "max_input_chars_per_word": 100},
        {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None},
    ],
)  # fmt: skip
def test_other_models_are_refused(directory: Path, model: dict[str, Any]) -> None:
    edit_json(directory / "tokenizer.json", {"model": model})
    assert f"has a {model['type']} model; a byte-level BPE tokenizer" in error_of(directory)


def lose_a_byte(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["!!!"] = content["model"]["vocab"].pop("~")


def empty(content: dict[str, Any]) -> None:
    content["model"] |= {"vocab": {}, "merges": []}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lose_a_byte, "has no token for byte 126 (1 of 256 lack)"),
        (empty, "has no token for byte 33 (256 of 256 lack)"),
        (lambda content: content.update(pre_tokenizer=None), "does not take text apart into bytes"),
        (lambda content: content.update(pre_tokenizer={"type": "Whitespace"}), "does not take text apart into bytes"),
        (lambda content: content.update(decoder=None), "has no decoder"),
    ],
)
def test_what_would_lose_text_is_refused(
    directory: Path, change: Callable[[dict[str, Any]], None], complaint: str
) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "~" not in "".join(pair)]
    change(content)
    path.write_text(json.dumps(content))
    assert complaint in error_of(directory)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000, b"{}", b'{"version": "' + b"9" * 5000])
def test_what_is_no_tokenizer_is_named(directory: Path, content: bytes) -> None:
    (directory / "tokenizer.json").write_bytes(content)
    assert f"tokenizer.json ({len(content)} bytes): " in error_of(directory)


@pytest.mark.parametrize("eos", ["\ud800", 7, ["<|im_end|>"], {"content": "\ud800"}, {"content": None}, {}])
def test_an_end_token_that_is_no_text_is_named(directory: Path, eos: object) -> None:
    edit_json(directory / "tokenizer_config.json", {"eos_token": eos})
    assert "it has to be a token's text" in error_of(directory)
    with pytest.raises(CheckpointError, match="it has to be a token's text"):
        ChatTemplate.load(directory)


@pytest.mark.parametrize("token_id", ["abc", "9" * 5000, "-1", " 640", "6_40", "٣", "", "\ud800\n"])
def test_added_tokens_under_no_id_are_named(older: Path, token_id: str) -> None:
    path = older / "tokenizer_config.json"
    listed = json.loads(path.read_text())["added_tokens_decoder"]
    edit_json(path, {"added_tokens_decoder": listed | {token_id: {"content": "x"}}})
    assert "it has to be listed under a token id" in error_of(older)


@pytest.mark.parametrize("content", ["\ud800", "", None, 7])
def test_added_tokens_of_no_text_are_named(older: Path, content: object) -> None:
    Tokenizer.load(older)
    edit_json(older / "tokenizer_config.json", {"added_tokens_decoder.614.content": content})
    assert "added_tokens_decoder.614 is {" in error_of(older)


def change_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["model"].update(continuing_subword_prefix="##"),
        lambda content: content.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        lambda content: content.update(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        ),
    ],
)
def test_what_the_library_panics_at_is_named(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A panic is no Exception of Python's."""
    change_json(directory / "tokenizer.json", change)
    assert "tokenizer.json" in error_of(directory)


@pytest.mark.parametrize(
    ("longest", "stride"), [(4, 4), (1, 5)], ids=["a stride as long as the limit", "a stride longer than the limit"]
)
def test_saved_limits_never_cut_a_prompt(directory: Path, longest: int, stride: int) -> None:
    expected = Tokenizer.load(directory).encode("hello there world")
    saved = {"direction": "Right", "max_length": longest, "strategy": "LongestFirst", "stride": stride}
    change_json(directory / "tokenizer.json", lambda content: content.update(truncation=saved))
    assert Tokenizer.load(directory).encode("hello there world") == expected


@pytest.mark.parametrize("share", [0, 0.5, 0.9])
def test_missing_merges_are_noticed(older: Path, share: float) -> None:
    """Without them every text is cut into other tokens than the model was trained on."""
    merges = (older / "merges.txt").read_text().splitlines(keepends=True)
    (older / "merges.txt").write_text("#version: 0.2\n" + "".join(merges[: int(share * len(merges))]))
    message = error_of(older)
    assert "tokens looked at are made by none of its merges" in message
    assert "vocab.json" in message


def test_a_text_is_cut_in_one_way(directory: Path) -> None:
    """`dropout` leaves merges out by chance, which is a means of training."""
    expected = Tokenizer.load(directory).encode_plain("hello there world")
    change_json(directory / "tokenizer.json", lambda content: content["model"].update(dropout=0.9))
    tokenizer = Tokenizer.load(directory)
    for _ in range(8):
        assert tokenizer.encode("hello there world") == tokenizer.encode_plain("hello there world") == expected
