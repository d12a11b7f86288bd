"""The vision tower: pixels of patches to the features that stand for a picture in the prompt. Knows no files, no text.

Each picture, and each frame pair of a video, is encoded alone: it sees no other, and its features do not depend on
what is encoded beside it. Features of a video's frame pairs follow one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.cpu_vision import attend, gelu_erf, gelu_tanh, layer_norm, linear
from kestrel_cuda.checkpoint.names import BlockPart
from kestrel_cuda.config import Grid, VisionConfig
from kestrel_cuda.errors import InternalError
from kestrel_cuda.model.patch_positions import learned_positions, patch_rotation
from kestrel_cuda.model.vision_weights import Affine, MergerWeights, TowerWeights

Rows = NDArray[np.float32]
TowerObserver = Callable[[str, Rows], None]


@dataclass(frozen=True)
class VisionFeatures:
    """What replaces the embeddings of a picture's tokens, [tokens, out_hidden], and deepstack features of that shape,
    of which number i is added after decoder layer i."""

    tokens_mn: Rows
    deepstack_mn: tuple[Rows, ...]


class VisionTower(Protocol):
    """Encodes one picture or one video."""

    def encode(self, pixels_mk: Rows, grid: Grid) -> VisionFeatures:
        """`pixels_mk` has a row for each patch of `grid`: channels, frames, patch rows, patch columns."""


def encode_all(tower: VisionTower, pixels_mk: Rows, grids: Sequence[Grid]) -> VisionFeatures:
    """Features of at least one picture or video, one after the other; their pixel rows follow one another too."""
    ends = np.cumsum([math.prod(grid) for grid in grids])
    if ends[-1] != len(pixels_mk):
        raise InternalError(f"{len(pixels_mk)} rows of pixels are not those of grids {[list(grid) for grid in grids]}")
    parts = np.split(pixels_mk, ends[:-1])
    return _join([tower.encode(part_mk, grid) for part_mk, grid in zip(parts, grids, strict=True)])


def _join(features: list[VisionFeatures]) -> VisionFeatures:
    return VisionFeatures(
        np.concatenate([each.tokens_mn for each in features]),
        tuple(np.concatenate(level) for level in zip(*(each.deepstack_mn for each in features), strict=True)),
    )


class HostTower:
    """The tower's definition, in float32 on the host."""

    def __init__(self, config: VisionConfig, weights: TowerWeights, observe: TowerObserver | None = None) -> None:
        """`observe` is given each frame's rows as they go into block 0 and as each block leaves them."""
        self._config, self._weights = config, weights
        self._observe = observe

    # What overflows reaches the logits and is refused there, as for the decoder.
    @np.errstate(all="ignore")
    def encode(self, pixels_mk: Rows, grid: Grid) -> VisionFeatures:
        """`VisionTower.encode`."""
        num_frames, num_rows, num_columns = grid
        config = self._config
        sides_fit = num_rows % config.merge_size == 0 == num_columns % config.merge_size
        if min(grid) < 1 or not sides_fit or pixels_mk.shape != (math.prod(grid), config.patch_inputs):
            raise InternalError(f"pixels {list(pixels_mk.shape)} are not those of grid {list(grid)}")
        return _join([self._frame(frame, num_rows, num_columns) for frame in np.split(pixels_mk, num_frames)])

    def _frame(self, pixels_mk: Rows, num_rows: int, num_columns: int) -> VisionFeatures:
        config, weights = self._config, self._weights
        h_mk = _linear(pixels_mk, weights.patch_embed)
        h_mk += learned_positions(config, weights.positions_mn, num_rows, num_columns)
        self._see("block in", h_mk)
        cos_md, sin_md = patch_rotation(config, num_rows, num_columns)
        deepstack: list[Rows] = []
        for number, block in enumerate(weights.blocks):
            qkv_mn = _linear(_norm(h_mk, block[BlockPart.NORM1]), block[BlockPart.QKV])
            h_mk += _linear(attend(qkv_mn, config.num_heads, cos_md, sin_md), block[BlockPart.PROJ])
            inner_mk = gelu_tanh(_linear(_norm(h_mk, block[BlockPart.NORM2]), block[BlockPart.FC1]))
            h_mk += _linear(inner_mk, block[BlockPart.FC2])
            self._see(f"block {number}", h_mk)
            if number in config.deepstack_blocks:
                # In the order of the blocks, whatever the order of the mergers (modeling_qwen3_vl.py does the same).
                merger = weights.deepstack[config.deepstack_blocks.index(number)]
                merged = _norm(h_mk.reshape(-1, config.merged_size), merger.norm)
                deepstack.append(_features(merged, merger))
        merged = _norm(h_mk, weights.merger.norm).reshape(-1, config.merged_size)
        return VisionFeatures(_features(merged, weights.merger), tuple(deepstack))

    def _see(self, what: str, h_mk: Rows) -> None:
        if self._observe:
            self._observe(what, h_mk.copy())


def _linear(x_mk: Rows, affine: Affine) -> Rows:
    return linear(x_mk, affine.weight, affine.bias)


def _norm(x_mk: Rows, affine: Affine) -> Rows:
    return layer_norm(x_mk, affine.weight, affine.bias)


def _features(merged_mk: Rows, merger: MergerWeights) -> Rows:
    return _linear(gelu_erf(_linear(merged_mk, merger.fc1)), merger.fc2)
