"""Pixels of patches in 8 bits for tests: those of a golden's floats, and random ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.vision import PixelCodes
from kestrel_cuda.config import Grid, VisionConfig

VALUES = np.tile(np.linspace(-1, 1, 256, dtype=np.float32), (3, 1))


def codes_of(pixels_mk: NDArray[np.float32], grids: Sequence[Grid]) -> list[PixelCodes]:
    """Each grid's rows of float pixels, which have at most 256 values in all."""
    values, codes = np.unique(pixels_mk, return_inverse=True)
    values_cv = np.tile(np.resize(values, 256), (3, 1))
    codes_mk = codes.reshape(pixels_mk.shape).astype(np.uint8)
    assert np.array_equal(values_cv[0][codes_mk], pixels_mk)
    ends = [0, *np.cumsum([math.prod(grid) for grid in grids]).tolist()]
    return [PixelCodes(codes_mk[begin:end], values_cv, pixels_mk.shape[1]) for begin, end in pairwise(ends)]


def random_pixels(config: VisionConfig, grid: Grid, seed: int = 0) -> PixelCodes:
    """Other ones in each frame."""
    codes_mk = np.random.default_rng(seed).integers(0, 256, (math.prod(grid), config.patch_inputs), np.uint8)
    return PixelCodes(codes_mk, VALUES, config.patch_inputs)
