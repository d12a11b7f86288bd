"""Text to ids and back against the reference, and streams of any ids against decoding them at once."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kestrel_cuda.errors import CheckpointError, InputError
from kestrel_cuda.inputs import tokenizer as tokenizer_module
from kestrel_cuda.inputs.tokenizer import TextStream, Tokenizer
from tests import checkpoints
from tests.checkpoints import edit_json

DATA = Path(__file__).resolve().parents[1] / "data"
IM_START, IM_END, TOOL_CALL = 615, 616, 628  # of the small tokenizer


@pytest.fixture(scope="module")
def small(oracle: Path) -> Tokenizer:
    return Tokenizer.load(oracle / "checkpoints/tiny-dense-tied")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("qwen3")
    source = DATA / "tokenizer-qwen3"
    (directory / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
    shutil.copyfile(source / "tokenizer_config.json", directory / "tokenizer_config.json")
    return Tokenizer.load(directory)


@pytest.fixture(params=["small", "qwen3"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each of the two tokenizers in turn."""
    chosen: Tokenizer = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture
def directory(oracle: Path, tmp_path: Path) -> Path:
    """An editable copy of a checkpoint."""
    return checkpoints.copy(oracle / "checkpoints/tiny-dense-tied", tmp_path / "checkpoint")


def reference(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((DATA / "oracle/extras" / name).read_text())
    assert len(cases) > 30
    return cases


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = TextStream(tokenizer, skip_special)
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


@pytest.mark.parametrize("name", ["small", "qwen3"])
def test_every_reference_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    for case in reference(f"tokenizer_{name}.json"):
        ids = tokenizer.encode(case["text"])
        assert ids == case["ids"], case["text"]
        assert tokenizer.decode(ids, skip_special=False) == case["decoded"]
        assert tokenizer.decode(ids) == case["decoded_skip_special"]
        assert "".join(streamed(tokenizer, ids)) == case["decoded_skip_special"]
        assert "".join(streamed(tokenizer, ids, skip_special=False)) == case["decoded"]


def test_sizes_and_end_ids(small: Tokenizer, qwen3: Tokenizer) -> None:
    assert (small.size, small.eos_ids) == (640, (616,))
    assert (qwen3.size, qwen3.eos_ids) == (151669, (151645,))
    assert (len(small.added_tokens), small.added_tokens[IM_END]) == (26, "<|im_end|>")


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "a<think>b</think>c", "x <|image_pad|>\n", "<tool_call>", "<|im_<|im_end|>"]
)
def test_plain_text_makes_no_added_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_plain(text)
    assert not set(ids) & set(tokenizer.added_tokens)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert set(tokenizer.encode(text)) & set(tokenizer.added_tokens)


@pytest.mark.parametrize("name", ["small", "qwen3"])
def test_plain_text_without_added_tokens_is_encoded_the_same(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    for case in reference(f"tokenizer_{name}.json"):
        if not set(case["ids"]) & set(tokenizer.added_tokens):
            assert tokenizer.encode_plain(case["text"]) == case["ids"]


def test_split_then_plain_is_encode(tokenizer: Tokenizer) -> None:
    chooser = random.Random(0)
    words = [
        *tokenizer.added_tokens.values(),
        "a",
        " b",
        "e\u0301",
        "  ",
        "\n",
        "<",
        "|>",
        "你好",
        "👍",
        "'s",
        "\u0301",
        "3",
    ]
    for _ in range(300):
        text = "".join(chooser.choices(words, k=chooser.randrange(12)))
        ids: list[int] = []
        for piece in tokenizer.split(text):
            ids += [piece] if isinstance(piece, int) else tokenizer.encode_plain(piece)
        assert ids == tokenizer.encode(text), text


def test_text_that_is_not_unicode_is_refused(small: Tokenizer) -> None:
    for encode in (small.encode, small.encode_plain, small.split):
        with pytest.raises(InputError, match=r"U\+D83D at position 2 is half a character"):
            encode("ab\ud83d")


# Streaming


def test_a_stream_never_shows_part_of_a_character(small: Tokenizer) -> None:
    text = "you👍é"
    ids = [token_id for byte in text.encode() for token_id in byte_ids(small, byte)]
    assert len(ids) == len(text.encode()) == 9
    assert streamed(small, ids) == ["y", "o", "u", "", "", "", "👍", "", "é", ""]


def test_an_open_character_is_shown_at_the_end(small: Tokenizer) -> None:
    ids = [token_id for byte in "👍".encode()[:3] for token_id in byte_ids(small, byte)]
    assert streamed(small, ids) == ["", "", "", "\ufffd"]


def test_special_tokens_show_only_when_asked_for(small: Tokenizer) -> None:
    ids = [IM_START, *small.encode("hi"), TOOL_CALL, IM_END]
    assert "".join(streamed(small, ids)) == "hi<tool_call>"
    assert "".join(streamed(small, ids, skip_special=False)) == "<|im_start|>hi<tool_call><|im_end|>"


@pytest.mark.parametrize("skip_special", [True, False])
def test_streams_of_random_ids_equal_decoding_at_once(tokenizer: Tokenizer, skip_special: bool) -> None:
    chooser = random.Random(1)
    single_bytes = [token_id for byte in range(256) for token_id in byte_ids(tokenizer, byte)]
    added = list(tokenizer.added_tokens)
    for _ in range(1500):
        pools = chooser.sample([single_bytes, single_bytes[128:], added, range(tokenizer.size + 20)], k=2)
        ids = [chooser.choice(chooser.choice(pools)) for _ in range(chooser.randrange(12))]
        pieces = streamed(tokenizer, ids, skip_special)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special), ids


def test_an_added_token_outside_the_byte_alphabet(directory: Path) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    extra = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"].append({"id": 640, "content": "Ġ 世", **extra})
    path.write_text(json.dumps(content))
    tokenizer = Tokenizer.load(directory)
    ids = tokenizer.encode("aĠ 世b")
    assert 640 in ids
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "aĠ 世b"


def byte_ids(tokenizer: Tokenizer, byte: int) -> list[int]:
    """The id of the token that is this one byte."""
    return [token_id for token_id in range(256) if tokenizer.token_bytes(token_id) == bytes([byte])]


# Files


def test_limits_in_the_file_cut_nothing(directory: Path) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    edit_json(directory / "tokenizer.json", {"truncation": truncation})
    assert len(Tokenizer.load(directory).encode("one two three")) > 2


def test_without_tokenizer_json_the_same_ids(directory: Path, small: Tokenizer) -> None:
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    (directory / "tokenizer.json").unlink()
    built = Tokenizer.load(directory)
    for case in reference("tokenizer_small.json"):
        assert built.encode(case["text"]) == case["ids"], case["text"]
        assert built.decode(case["ids"]) == case["decoded_skip_special"]
    assert (built.size, built.eos_ids, built.added_tokens) == (small.size, small.eos_ids, small.added_tokens)
    (directory / "merges.txt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks tokenizer\.json, and merges\.txt to build it from"):
        Tokenizer.load(directory)


def test_missing_and_damaged_files_are_named(directory: Path) -> None:
    path = directory / "tokenizer.json"
    path.write_text("<html>")
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.json \(6 bytes\)"):
        Tokenizer.load(directory)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"lacks tokenizer\.json, and vocab\.json and merges\.txt"):
        Tokenizer.load(directory)


def test_only_byte_level_tokenizers_are_read(directory: Path) -> None:
    edit_json(directory / "tokenizer.json", {"decoder": {"type": "Fuse"}})
    with pytest.raises(CheckpointError, match="has a Fuse decoder"):
        Tokenizer.load(directory)


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_the_end_token_is_a_text_or_an_object(directory: Path, eos: object) -> None:
    edit_json(directory / "tokenizer_config.json", {"eos_token": eos})
    assert Tokenizer.load(directory).eos_ids == (IM_END,)


def test_an_end_token_that_is_no_token_is_named(directory: Path) -> None:
    edit_json(directory / "tokenizer_config.json", {"eos_token": "<end>"})
    with pytest.raises(CheckpointError, match="eos_token '<end>' is not in the tokenizer"):
        Tokenizer.load(directory)
    edit_json(directory / "tokenizer_config.json", {"eos_token": None})
    assert Tokenizer.load(directory).eos_ids == ()


def test_what_the_library_gives_up_on_is_refused() -> None:
    """It panics on runs of ten million blanks, by what is no Exception."""

    class PanicException(BaseException):
        pass

    class GivesUp:
        def encode(self, text: str, **_: bool) -> NoReturn:
            raise PanicException("retry-limit-in-match over")

    class Stopped(GivesUp):
        def encode(self, text: str, **_: bool) -> NoReturn:
            raise KeyboardInterrupt

    with pytest.raises(InputError, match=r"^3 characters cannot be cut into tokens \(retry-limit.*; give less text$"):
        tokenizer_module._cut(GivesUp(), "   ")  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        tokenizer_module._cut(Stopped(), "   ")  # type: ignore[arg-type]
