"""The vision tower: pixels of patches to the features that stand for a picture in the prompt. Knows no files, no text.

Each picture, and each frame pair of a video, is encoded alone: it sees no other, and its features do not depend on
what is encoded beside it. Features of a video's frame pairs follow one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import Array
from kestrel_cuda.backends.vision import After, PatchPlaces, PixelCodes
from kestrel_cuda.checkpoint.names import BlockPart
from kestrel_cuda.config import Grid, VisionConfig
from kestrel_cuda.errors import InternalError
from kestrel_cuda.model.patch_positions import frame_places
from kestrel_cuda.model.vision_weights import MergerWeights, TowerWeights

Rows = NDArray[np.float32]
TowerObserver = Callable[[str, Rows], None]

PASS_ROWS = 8192
"""Patches that go through a step at a time where they do not see one another, and frames of a video up to as many."""


@dataclass(frozen=True)
class VisionFeatures:
    """What replaces the embeddings of pictures' tokens, [tokens, out_hidden] on the backend, and deepstack features of
    that shape, of which number i is added after decoder layer i."""

    tokens_mn: Array
    deepstack_mn: tuple[Array, ...]

    def rows(self, begin: int, end: int) -> VisionFeatures:
        """Those of tokens begin .. end."""
        return VisionFeatures(self.tokens_mn[begin:end], tuple(level[begin:end] for level in self.deepstack_mn))

    def arrays(self) -> tuple[Array, ...]:
        return (self.tokens_mn, *self.deepstack_mn)


def feature_bytes(config: VisionConfig, grids: Sequence[Grid]) -> int:
    """What the features of pictures take."""
    num_tokens = sum(config.num_tokens(grid) for grid in grids)
    return 4 * num_tokens * config.out_hidden_size * (1 + len(config.deepstack_blocks))


def tower_work_bytes(config: VisionConfig, grids: Sequence[Grid], dtype: DTypeLike) -> int:
    """What a `Tower` for these pictures takes beside its weights and their features."""
    shapes = _buffers(config, rows_at_once(grids), dtype)
    held = sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in shapes.values())
    rows, columns = max(grid[1] * grid[2] for grid in grids), max(max(grid[1:]) for grid in grids)
    return held + 8 * rows + columns * (4 * 6 + 2 * config.head_dim)


def rows_at_once(grids: Sequence[Grid]) -> int:
    """Patches that the tower takes together: a picture, or as many frames of a video as PASS_ROWS hold."""
    return max(_frames_at_once(grid) * grid[1] * grid[2] for grid in grids)


def _frames_at_once(grid: Grid) -> int:
    return min(grid[0], max(1, PASS_ROWS // (grid[1] * grid[2])))


def _buffers(config: VisionConfig, max_rows: int, dtype: DTypeLike) -> dict[str, tuple[tuple[int, int], DTypeLike]]:
    n, pass_rows = config.hidden_size, min(max_rows, PASS_ROWS)
    return {
        "h": ((max_rows, n), np.float32),
        "x": ((max_rows, n), dtype),
        "qkv": ((max_rows, 3 * n), dtype),
        "inner": ((pass_rows, config.intermediate_size), dtype),
        "codes": ((pass_rows, config.patch_inputs), np.uint8),
        "values": ((config.in_channels, 256), np.float32),
        "patches": ((pass_rows, config.patch_inputs), dtype),
    }


class Tower:
    """The tower over a backend's steps, with buffers for `max_rows` patches until it is freed."""

    def __init__(
        self,
        backend: Backend,
        config: VisionConfig,
        weights: TowerWeights,
        max_rows: int,
        observe: TowerObserver | None = None,
    ) -> None:
        """`observe` is given the rows of frames as they go into block 0 and as each block leaves them."""
        self._backend, self._config, self._weights = backend, config, weights
        self._observe = observe
        shapes = _buffers(config, max_rows, weights.dtype)
        self._buffers: dict[str, Array] = {name: backend.zeros(*shape) for name, shape in shapes.items()}

    def encode(self, pixels: PixelCodes, grid: Grid, out: VisionFeatures) -> None:
        """Write the features of one picture or video; `pixels` has a row for each patch of `grid`."""
        num_frames, num_rows, num_columns = grid
        config, backend = self._config, self._backend
        sides_fit = num_rows % config.merge_size == 0 == num_columns % config.merge_size
        shape = (len(pixels), pixels.num_inputs)
        if min(grid) < 1 or not sides_fit or shape != (math.prod(grid), config.patch_inputs):
            raise InternalError(f"pixels {list(shape)} are not those of grid {list(grid)}")
        frame_rows, at_once = num_rows * num_columns, _frames_at_once(grid)
        on_host = frame_places(config, num_rows, num_columns)
        backend.write(self._buffers["values"], pixels.values_cv)
        places = PatchPlaces(*(backend.to_device(array) for array in on_host.arrays()))
        for frame in range(0, num_frames, at_once):
            begin, end = frame * frame_rows, min(frame + at_once, num_frames) * frame_rows
            features = out.rows(begin // config.patches_per_token, end // config.patches_per_token)
            self._frames(pixels.rows(begin, end), places, features)
        for array in places.arrays():
            backend.free(array)

    def free(self) -> None:
        """Give the buffers back, not the weights."""
        for array in self._buffers.values():
            self._backend.free(array)
        self._buffers = {}

    def _frames(self, pixels: PixelCodes, places: PatchPlaces, out: VisionFeatures) -> None:
        backend, config, weights = self._backend, self._config, self._weights
        num_rows = len(pixels)
        h, x, qkv = (self._buffers[name][:num_rows] for name in ("h", "x", "qkv"))
        self._embed(pixels, h)
        backend.add_patch_positions(h, weights.positions_pn, places)
        self._see("block in", h)
        # In the order of the blocks, whatever the order of the mergers (modeling_qwen3_vl.py does the same).
        levels = iter(out.deepstack_mn)
        for number, block in enumerate(weights.blocks):
            backend.layer_norm(h, block[BlockPart.NORM1], x)
            backend.affine(x, block[BlockPart.QKV], qkv)
            backend.attend_patches(qkv, config.num_heads, places, x)
            backend.affine(x, block[BlockPart.PROJ], h, After.ADD)
            backend.layer_norm(h, block[BlockPart.NORM2], x)
            for begin, end in _passes(num_rows):
                inner = self._buffers["inner"][: end - begin]
                backend.affine(x[begin:end], block[BlockPart.FC1], inner, After.GELU_TANH)
                backend.affine(inner, block[BlockPart.FC2], h[begin:end], After.ADD)
            self._see(f"block {number}", h)
            if number in config.deepstack_blocks:
                merger = weights.deepstack[config.deepstack_blocks.index(number)]
                backend.layer_norm(_by_token(h, config), merger.norm, _by_token(x, config))
                self._merge(merger, x, next(levels))
        backend.layer_norm(h, weights.merger.norm, x)
        self._merge(weights.merger, x, out.tokens_mn)

    def _embed(self, pixels: PixelCodes, h: Array) -> None:
        backend = self._backend
        for begin, end in _passes(len(pixels)):
            codes_mk, patches = pixels.codes_mk[begin:end], self._buffers["patches"][: end - begin]
            codes = self._buffers["codes"].reshape(-1)[: codes_mk.size].reshape(codes_mk.shape)
            backend.write(codes, codes_mk)
            backend.put_pixels(patches, codes, self._buffers["values"])
            backend.affine(patches, self._weights.patch_embed, h[begin:end])

    def _merge(self, merger: MergerWeights, x: Array, out: Array) -> None:
        backend, merged = self._backend, _by_token(x, self._config)
        inner = self._buffers["qkv"].reshape(-1)[: math.prod(merged.shape)].reshape(merged.shape)
        backend.affine(merged, merger.fc1, inner, After.GELU_ERF)
        backend.affine(inner, merger.fc2, out)

    def _see(self, what: str, h: Array) -> None:
        if self._observe:
            self._observe(what, self._backend.to_host(h).copy())


def _passes(num_rows: int) -> Sequence[tuple[int, int]]:
    return list(pairwise([*range(0, num_rows, PASS_ROWS), num_rows]))


def _by_token(rows: Array, config: VisionConfig) -> Array:
    """The patches of a token side by side: its patches are neighbours."""
    return rows.reshape(-1, config.merged_size)


def encode_all(
    backend: Backend,
    config: VisionConfig,
    weights: TowerWeights,
    pixels: Sequence[PixelCodes],
    grids: Sequence[Grid],
    observe: TowerObserver | None = None,
) -> VisionFeatures:
    """Features of at least one picture or video, one after the other."""
    ends = [0, *np.cumsum([math.prod(grid) for grid in grids]).tolist()]
    tower = Tower(backend, config, weights, rows_at_once(grids), observe)
    shape = (sum(config.num_tokens(grid) for grid in grids), config.out_hidden_size)
    levels = range(len(config.deepstack_blocks))
    features = VisionFeatures(backend.zeros(shape, np.float32), tuple(backend.zeros(shape, np.float32) for _ in levels))
    for (begin, end), one, grid in zip(pairwise(ends), pixels, grids, strict=True):
        tokens = (begin // config.patches_per_token, end // config.patches_per_token)
        tower.encode(one, grid, features.rows(*tokens))
    tower.free()
    return features
