"""Prompts with pictures give the same bits in every window and in every cut of the prompt, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kestrel_cuda.config import Grid, Quant
from kestrel_cuda.engine import Engine
from kestrel_cuda.model.prompt_positions import Visual
from tests.engines import assert_bytes_moved, generate
from tests.goldens import ORACLE
from tests.pixel_codes import random_pixels

MODEL = ORACLE / "checkpoints/tiny-dense-tied"
PICTURES: tuple[Grid, ...] = ((1, 4, 6), (1, 8, 2), (1, 6, 10))
CTX = 96

Load = Callable[..., Engine]

pytestmark = pytest.mark.cuda


def digest(engine: Engine, grids: tuple[Grid, ...]) -> str:
    """Of every prompt logit and every step's, over a prompt with text before, between and after its pictures."""
    config = engine.checkpoint.config
    assert config.vision is not None
    assert config.image_token_id is not None
    ids = [5, 6, 7]
    for number, grid in enumerate(grids):
        ids += [*[config.image_token_id] * config.vision.num_tokens(grid), 8 + number, 9]
    pixels = [random_pixels(config.vision, grid, seed) for seed, grid in enumerate(grids)]
    encoded = engine.encode_visuals([Visual("image", grid) for grid in grids], pixels)
    run = generate(engine, ids, 8, encoded=encoded)
    assert_bytes_moved(engine, run)
    without_logits = engine.generate(ids, 8, ignore_eos=True, encoded=encoded)
    assert [token.token_id for token in without_logits] == run.ids
    return run.digest


@pytest.mark.parametrize("num_pictures", [1, 3])
@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0, Quant.NONE])
def test_windows_and_chunks_change_no_bit(load_on_gpu: Load, quant: Quant, num_pictures: int) -> None:
    """Chunks of 1 and 7 rows cut through the pictures."""
    grids = PICTURES[:num_pictures]
    ways = (
        {"keep": 0},
        {"keep": 0, "prefill_chunk": 1},
        {"keep": 0, "prefill_chunk": 7},
        {"keep": 1},
        {"keep": 1, "prefill_chunk": 7},
        {"keep": 2, "prefill_chunk": 1},
        {"keep": 0, "whole_token": False},
    )
    digests = {str(way): digest(load_on_gpu(MODEL, quant=quant, ctx=CTX, **way), grids) for way in ways}
    assert len(set(digests.values())) == 1, digests


def test_pictures_are_looked_at(load_on_gpu: Load) -> None:
    """The digest is another one with one picture more."""
    engine = load_on_gpu(MODEL, ctx=CTX)
    assert len({digest(engine, PICTURES[:number]) for number in (1, 2, 3)}) == 3
