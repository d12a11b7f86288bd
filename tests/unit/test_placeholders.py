"""Tokens that stand for pictures and videos: how many, where, and the text between frame pairs."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from kestrel_cuda.checkpoint.config_json import read_config
from kestrel_cuda.config import ModelConfig
from kestrel_cuda.errors import CheckpointError, InputError
from kestrel_cuda.inputs.chat import chat_pieces, encode_pieces
from kestrel_cuda.inputs.placeholders import Piece, Placeholder, expand
from kestrel_cuda.inputs.template import ChatTemplate
from kestrel_cuda.inputs.tokenizer import Tokenizer
from tests.goldens import ORACLE

DATA = ORACLE.parent
TINY = ORACLE / "checkpoints/tiny-dense-tied"
START, END, IMAGE, VIDEO = 623, 624, 626, 627
CLIP = Placeholder("video", 2, (0.25, 1.25))


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return read_config(TINY / "config.json")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The released one, which joins more characters than the small one does."""
    directory = tmp_path_factory.mktemp("qwen3")
    content = (DATA / "tokenizer-qwen3/tokenizer.json.gz").read_bytes()
    (directory / "tokenizer.json").write_bytes(gzip.decompress(content))
    return Tokenizer.load(directory)


def expanded(pieces: list[Piece], visuals: list[Placeholder], config: ModelConfig) -> list[Piece]:
    return expand(pieces, visuals, config, "the prompt", "do otherwise", Path("/models/m/config.json"))


def test_an_image_token_is_repeated(config: ModelConfig) -> None:
    pieces: list[Piece] = ["a", START, IMAGE, END, "b", IMAGE, IMAGE]
    visuals = [Placeholder("image", 3), Placeholder("image", 1), Placeholder("image", 2)]
    assert expanded(pieces, visuals, config) == ["a", START, IMAGE, IMAGE, IMAGE, END, "b", IMAGE, IMAGE, IMAGE]


def test_a_video_token_gives_way_to_its_frame_pairs(config: ModelConfig) -> None:
    """With what stands around it; the text before and a timestamp are one text."""
    first, second = [START, VIDEO, VIDEO, END], ["<1.2 seconds>", START, VIDEO, VIDEO, END]
    assert expanded(["a ", START, VIDEO, END, "b"], [CLIP], config) == ["a <0.2 seconds>", *first, *second, "b"]
    assert expanded([START, VIDEO, END], [CLIP], config) == ["<0.2 seconds>", *first, *second]
    assert expanded(["a ", VIDEO, "b"], [CLIP], config) == ["a <0.2 seconds>", *first, *second, "b"]
    assert expanded([START, VIDEO, "b"], [CLIP], config) == [START, "<0.2 seconds>", *first, *second, "b"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "0.2"), (0.35, "0.3"), (0.75, "0.8"), (12.0, "12.0"), (1 / 60, "0.0")]
)
def test_times_are_printed_with_one_digit(config: ModelConfig, seconds: float, text: str) -> None:
    found = expanded([START, VIDEO, END], [Placeholder("video", 1, (seconds,))], config)
    assert found[0] == f"<{text} seconds>"


@pytest.mark.parametrize("before", ["", "Look:", "Look: ", "!!", "a <", "\n\n", " ", "'", "1"])
@pytest.mark.parametrize("after", ["", "What moves?", " ", "\n", "<"])
def test_ids_are_those_of_the_whole_text(config: ModelConfig, qwen3: Tokenizer, before: str, after: str) -> None:
    """As the reference gets them, which replaces text and encodes it afterwards."""
    template = ChatTemplate.load(DATA / "tokenizer-qwen3")
    assert template is not None
    ids = {text: token_id for token_id, text in qwen3.added_tokens.items()}
    config = replace(
        config,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    clip: dict[str, str] = {"type": "video", "video": ""}
    parts = [{"type": "text", "text": before}, clip, {"type": "text", "text": after}, {"type": "image", "image": ""}]
    messages = [{"role": "user", "content": parts}]
    pieces = expanded(chat_pieces(template, qwen3, messages), [CLIP, Placeholder("image", 3)], config)
    text = template.render(messages)
    start, end = "<|vision_start|>", "<|vision_end|>"
    frames = "".join(f"<{time} seconds>{start}<|video_pad|><|video_pad|>{end}" for time in ("0.2", "1.2"))
    text = text.replace(f"{start}<|video_pad|>{end}", frames).replace("<|image_pad|>", "<|image_pad|>" * 3)
    assert encode_pieces(qwen3, pieces) == qwen3.encode(text)


@pytest.mark.parametrize(
    ("pieces", "visuals", "message"),
    [
        (["a"], ["image"], "the prompt has places for none, and 1 picture came with the prompt; do otherwise"),
        ([IMAGE], [], "the prompt has places for 1 picture, and none came with the prompt"),
        ([IMAGE, IMAGE], ["image"], "places for 2 pictures, and 1 picture came"),
        ([IMAGE], ["video"], "places for 1 picture, and 1 video came"),
        (
            [IMAGE, VIDEO, VIDEO],
            ["image", "video"],
            "places for 1 picture and 2 videos, and 1 picture and 1 video came",
        ),
        (
            [VIDEO, IMAGE],
            ["image", "video"],
            r"in another order \(video, image\) than they were given \(image, video\)",
        ),
    ],
)
def test_places_and_pictures_have_to_agree(
    config: ModelConfig, pieces: list[Piece], visuals: list[str], message: str
) -> None:
    """Case D27."""
    given = [CLIP if kind == "video" else Placeholder("image", 2) for kind in visuals]
    with pytest.raises(InputError, match=message):
        expanded(pieces, given, config)


def test_frame_pairs_need_the_tokens_around_them(config: ModelConfig) -> None:
    without = replace(config, vision_end_token_id=None)
    assert expanded([START, IMAGE, END], [Placeholder("image", 1)], without) == [START, IMAGE, END]
    with pytest.raises(CheckpointError, match=r"^/models/m/config\.json lacks vision_start_token_id or"):
        expanded([START, VIDEO, END], [CLIP], without)


def test_a_text_only_model_has_no_place(config: ModelConfig, tmp_path: Path) -> None:
    without = replace(config, vision=None, image_token_id=None, video_token_id=None)
    with pytest.raises(InputError, match="places for none, and 1 picture came"):
        expanded([START, IMAGE, END], [Placeholder("image", 1)], without)
