"""Where pictures stand in a prompt and the positions of its tokens: every golden, the worked examples, and mistakes."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from kestrel_cuda.checkpoint.config_json import read_config
from kestrel_cuda.config import ModelConfig
from kestrel_cuda.errors import InputError, InternalError
from kestrel_cuda.model.prompt_positions import (
    Visual,
    VisualSpan,
    continued,
    find_spans,
    position_delta,
    prompt_positions,
)
from kestrel_cuda.model.rope import rotation_table, text_positions
from tests.goldens import ORACLE, checkpoint, golden, golden_names, pixels_and_grids

GOLDENS = golden_names("text", "raw", "img", "vid")
IMAGE, VIDEO, TEXT = 626, 627, 7


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return read_config(ORACLE / "checkpoints/tiny-dense-tied/config.json")


def visuals_of(name: str) -> list[Visual]:
    arrays, _ = golden(name)
    return [
        Visual(kind, grid)
        for kind in ("image", "video")
        if f"{kind}_grid_thw" in arrays
        for grid in pixels_and_grids(arrays, kind)[1]
    ]


def test_all_goldens_are_here() -> None:
    assert len(GOLDENS) == 30


@pytest.mark.parametrize("name", GOLDENS)
def test_positions_are_the_goldens(name: str) -> None:
    arrays, _ = golden(name)
    config = read_config(checkpoint(name) / "config.json")
    ids = arrays["input_ids"].tolist()
    spans = find_spans(ids, visuals_of(name), config)
    positions = prompt_positions(len(ids), spans)
    assert np.array_equal(positions, arrays["position_ids"][:, 0])
    assert position_delta(positions) == arrays["rope_deltas"][0, 0]
    visual = np.zeros(len(ids), bool)
    for span in spans:
        visual[span.start : span.stop] = True
    assert np.array_equal(visual, arrays["mm_token_type_ids"] > 0)


def test_no_picture_is_plain_text() -> None:
    positions = prompt_positions(5, ())
    assert np.array_equal(positions, text_positions(5))
    assert position_delta(positions) == 0
    assert np.array_equal(continued(positions, 9), text_positions(9))


def test_case_d29_position_after_an_image(model: ModelConfig) -> None:
    """By the larger side, not by the number of tokens; decoding goes on at cache length plus delta."""
    ids = [TEXT] * 4 + [IMAGE] * 64 + [TEXT] * 7
    positions = prompt_positions(75, find_spans(ids, [Visual("image", (1, 16, 16))], model))
    assert positions[:, :4].tolist() == [[0, 1, 2, 3]] * 3
    assert set(positions[0, 4:68]) == {4}
    assert positions[1, 4:68].tolist() == [4 + row for row in range(8) for _ in range(8)]
    assert positions[2, 4:68].tolist() == [4 + column for _ in range(8) for column in range(8)]
    assert positions[:, 68:].tolist() == [list(range(12, 19))] * 3
    assert position_delta(positions) == -56
    assert continued(positions, 77)[:, 75:].tolist() == [[19, 20]] * 3


@pytest.mark.parametrize(("grid", "step"), [((1, 16, 44), 22), ((1, 44, 16), 22), ((1, 2, 228), 114)])
def test_an_oblong_image_moves_on_by_its_larger_side(model: ModelConfig, grid: tuple[int, int, int], step: int) -> None:
    num_tokens = grid[1] * grid[2] // 4
    ids = [TEXT] * 3 + [IMAGE] * num_tokens + [TEXT]
    positions = prompt_positions(len(ids), find_spans(ids, [Visual("image", grid)], model))
    assert positions[:, -1].tolist() == [3 + step] * 3
    assert positions[1].max() == max(3 + grid[1] // 2 - 1, 3 + step)


def test_frame_pairs_of_a_video_are_separate_pictures(model: ModelConfig) -> None:
    pair = [TEXT, TEXT] + [VIDEO] * 4 + [TEXT]
    ids = pair * 3
    spans = find_spans(ids, [Visual("video", (3, 4, 4))], model)
    assert spans == (VisualSpan(2, 2, 2), VisualSpan(9, 2, 2), VisualSpan(16, 2, 2))
    positions = prompt_positions(len(ids), spans)
    assert positions[0].tolist() == [0, 1, 2, 2, 2, 2, 4, 5, 6, 7, 7, 7, 7, 9, 10, 11, 12, 12, 12, 12, 14]


def test_pictures_with_nothing_between_them(model: ModelConfig) -> None:
    ids = [IMAGE] * (4 + 6) + [VIDEO] * 2 + [TEXT]
    visuals = [Visual("image", (1, 4, 4)), Visual("image", (1, 4, 6)), Visual("video", (2, 2, 2))]
    spans = find_spans(ids, visuals, model)
    assert [(span.start, span.stop) for span in spans] == [(0, 4), (4, 10), (10, 11), (11, 12)]
    assert prompt_positions(13, spans)[0].tolist() == [*[0] * 4, *[2] * 6, 5, 6, 7]


def test_case_d27_a_prompt_without_its_picture_is_refused(model: ModelConfig) -> None:
    one = Visual("image", (1, 4, 4))
    with pytest.raises(InputError) as caught:
        find_spans([TEXT] * 9, [one], model)
    assert str(caught.value) == (
        "1 image came with the prompt, and image 1 has no tokens in it; it takes 4 image tokens (626) in a row: put "
        "them where it belongs between 623 and 624"
    )
    with pytest.raises(InputError, match=r"^2 images came with the prompt, and image 2 has no tokens in it"):
        find_spans([TEXT] + [IMAGE] * 4 + [TEXT], [one, one], model)
    clip = Visual("video", (2, 2, 2))
    with pytest.raises(InputError, match=r"^1 image and 1 video came .* frame pair 2 of video 1 .* 1 video token \("):
        find_spans([IMAGE] * 4 + [VIDEO, TEXT], [one, clip], model)
    without = replace(model, vision_start_token_id=None)
    with pytest.raises(InputError, match=r"put them where it belongs$"):
        find_spans([TEXT], [one], without)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([TEXT] + [IMAGE] * 3 + [TEXT], "image 1 takes 4 image tokens (626) in a row; from token 1 on the prompt"),
        ([TEXT] + [IMAGE] * 3, "from token 1 on the prompt has 3: put 4 there"),
        ([TEXT] + [VIDEO] * 4, "image 1 takes 4 image tokens (626) in a row; from token 1 on the prompt has 0"),
        ([TEXT] + [IMAGE] * 5, "token 5 of the prompt is an image token (626) too many: 1 image came with the prompt"),
        ([*[IMAGE] * 4, VIDEO], "token 4 of the prompt is a video token ("),
    ],
)
def test_tokens_that_are_not_those_of_the_pictures_are_refused(
    model: ModelConfig, ids: list[int], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        find_spans(ids, [Visual("image", (1, 4, 4))], model)
    assert message in str(caught.value)


def test_a_text_only_checkpoint_has_no_pictures(model: ModelConfig) -> None:
    text_only = replace(model, vision=None, image_token_id=None, video_token_id=None)
    assert find_spans([TEXT, IMAGE], [], text_only) == ()
    with pytest.raises(InternalError):
        find_spans([IMAGE], [Visual("image", (1, 2, 2))], text_only)


@pytest.mark.parametrize("name", golden_names("img", "vid"))
def test_case_d30_rotation_of_pictures_is_interleaved(name: str) -> None:
    """Frequency by frequency from the golden's positions, in float64: axes in turn, not in sections."""
    arrays, _ = golden(name)
    text = read_config(checkpoint(name) / "config.json").text
    cos, sin = rotation_table(text, arrays["position_ids"][:, 0])
    half = text.head_dim // 2
    height, width = (list(range(axis, 3 * text.mrope_section[axis], 3)) for axis in (1, 2))
    assert len(set(chain(height, width))) == text.mrope_section[1] + text.mrope_section[2]
    for i in range(half):
        axis = 1 if i in height else 2 if i in width else 0
        angles = arrays["position_ids"][axis, 0] * text.rope_theta ** (-2 * i / text.head_dim)
        assert np.abs(cos[:, i] - np.cos(angles)).max() < 3e-5
        assert np.abs(sin[:, i] - np.sin(angles)).max() < 3e-5
