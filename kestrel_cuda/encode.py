"""Pictures to features on a backend: what that costs, whether there is room; the vision tower comes and goes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.vision import BFLOAT16, PixelCodes
from kestrel_cuda.checkpoint.reader import Checkpoint
from kestrel_cuda.config import Grid, VisionConfig
from kestrel_cuda.errors import DeviceError
from kestrel_cuda.model.prompt_positions import Visual
from kestrel_cuda.model.vision import encode_all, feature_bytes, tower_work_bytes
from kestrel_cuda.model.vision_weights import TowerWeights, read_tower, tower_weight_bytes
from kestrel_cuda.model.visual_rows import EncodedVisuals
from kestrel_cuda.sizes import enough_size, format_size

H200_FIXED_MS, H200_MS_PER_TFLOP = 5.5, 2.25
"""Within 17 % of what encoding one picture was measured to take on an H200 in bfloat16, pixels in host memory, at
1,200, 8,160 and 65,536 patches: 7.3, 33.5 and 958 ms in the 2B shape, 10.1, 46.4 and 1,404 in the 8B shape."""


@dataclass(frozen=True)
class EncodeCost:
    """What a GPU does for one picture or video beside a quantized decoder, bfloat16 assumed: sizes in bytes."""

    flops: int
    tower_bytes: int
    buffer_bytes: int
    feature_bytes: int

    @property
    def device_bytes(self) -> int:
        return self.tower_bytes + self.buffer_bytes + self.feature_bytes

    @property
    def h200_ms(self) -> float:
        """An estimate from measurements of other sizes."""
        return H200_FIXED_MS + H200_MS_PER_TFLOP * self.flops / 1e12


def encode_cost(vision: VisionConfig, grid: Grid) -> EncodeCost:
    """Products and sums of the tower's matrices and of its attention, each counted as two operations."""
    n, frame_rows, num_tokens = vision.hidden_size, grid[1] * grid[2], vision.num_tokens(grid)
    num_rows = grid[0] * frame_rows
    a_row = n * vision.patch_inputs + vision.depth * (4 * n * n + 2 * n * vision.intermediate_size)
    a_token = vision.merged_size * (vision.merged_size + vision.out_hidden_size) * (1 + len(vision.deepstack_blocks))
    attention = vision.depth * 2 * num_rows * frame_rows * n
    return EncodeCost(
        flops=2 * (num_rows * a_row + num_tokens * a_token + attention),
        tower_bytes=tower_weight_bytes(vision, BFLOAT16),
        buffer_bytes=tower_work_bytes(vision, [grid], BFLOAT16),
        feature_bytes=feature_bytes(vision, [grid]),
    )


class VisualEncoder:
    """Encodes for one checkpoint. With `keeps_tower` the weights stay on the device for the next pictures.

    `exact` asks for float32 where a backend would take bfloat16.
    """

    def __init__(self, checkpoint: Checkpoint, *, exact: bool, keeps_tower: bool) -> None:
        self._checkpoint, self._vision = checkpoint, checkpoint.tower()
        self._exact, self._keeps_tower = exact, keeps_tower
        self._weights: TowerWeights | None = None
        self._encoded: list[EncodedVisuals] = []
        self.peak_bytes = 0

    def encode(
        self,
        backend: Backend,
        visuals: Sequence[Visual],
        pixels: Sequence[PixelCodes],
        most_bytes: int | None,
        least_tokens: int | None = 1,
    ) -> EncodedVisuals:
        """Features of `visuals`, with the pixels of each.

        `least_tokens` is the smallest --image-tokens that these pictures take, None where it bounds none of them.
        Raises DeviceError when that would take more than `most_bytes` of the device, CheckpointError for a weight that
        is not finite.
        """
        grids = [visual.grid for visual in visuals]
        dtype = np.dtype(np.float32) if self._exact else np.dtype(backend.patch_dtype(self._vision))
        memory = backend.memory()
        parts = {
            "the vision tower": 0 if self._weights else tower_weight_bytes(self._vision, dtype),
            "work buffers": tower_work_bytes(self._vision, grids, dtype),
            "features": feature_bytes(self._vision, grids),
        }
        held_bytes = memory.context_bytes + memory.allocated_bytes
        needed_bytes = held_bytes + sum(parts.values())
        if most_bytes is not None and needed_bytes > most_bytes:
            num_tokens = sum(self._vision.num_tokens(grid) for grid in grids)
            room_bytes = most_bytes - held_bytes - parts["the vision tower"]
            advice = self._advice(visuals, num_tokens, room_bytes, dtype, least_tokens)
            sizes = ", ".join(f"{what} {format_size(num_bytes)}" for what, num_bytes in parts.items() if num_bytes)
            raise DeviceError(
                f"encoding {_kinds(visuals)} of {num_tokens} tokens needs {enough_size(needed_bytes)} ({sizes}, "
                f"{format_size(held_bytes)} in use), more than {format_size(most_bytes)}; {advice}"
            )
        self.peak_bytes = max(self.peak_bytes, needed_bytes)
        weights = self._weights or read_tower(self._checkpoint, self._vision, backend, dtype)
        features = encode_all(backend, self._vision, weights, pixels, grids)
        if self._keeps_tower:
            self._weights = weights
        else:
            for array in weights.arrays():
                backend.free(array)
        encoded = EncodedVisuals(backend, visuals, features, self._checkpoint.path)
        self._encoded.append(encoded)
        return encoded

    def _advice(
        self,
        visuals: Sequence[Visual],
        num_tokens: int,
        room_bytes: int,
        dtype: DTypeLike,
        least_tokens: int | None,
    ) -> str:
        """What would make pictures and videos fit, where anything does."""
        if room_bytes < 0:
            return "the tower alone does not fit: give more memory, or leave pictures and videos out"
        if any(visual.kind == "video" for visual in visuals):
            pairs: list[Grid] = [(1, *visual.grid[1:]) for visual in visuals if visual.kind == "video"]
            if tower_work_bytes(self._vision, pairs, dtype) + feature_bytes(self._vision, pairs) > room_bytes:
                return "not even two frames fit: give smaller ones, or more memory"
            fewer = "take fewer videos or frames of them (of a file, by a lower --fps)"
            return fewer if all(visual.kind == "video" for visual in visuals) else f"{fewer}, or smaller pictures"
        fitting = self._most_tokens(num_tokens, room_bytes, dtype)
        if not fitting:
            return "not even the smallest picture would fit: give more memory, or leave pictures out"
        if least_tokens is None:
            return f"a single one of at most {fitting} tokens would fit (max_pixels in the conversation)"
        if fitting < least_tokens:
            return (
                f"a single one of at most {fitting} would fit, and pictures have at least {least_tokens} (--min-pixels)"
            )
        return f"--image-tokens {fitting} would fit a single one"

    def _most_tokens(self, below: int, room_bytes: int, dtype: DTypeLike) -> int:
        """Of a single picture of fewer than `below` tokens, whatever its shape."""

        def needed_bytes(num_tokens: int) -> int:
            side = self._vision.merge_size
            grids: list[Grid] = [(1, side, side * num_tokens)]
            return tower_work_bytes(self._vision, grids, dtype) + feature_bytes(self._vision, grids)

        return bisect_right(range(1, below), room_bytes, key=needed_bytes)

    def held(self) -> list[tuple[str, int]]:
        """What stays on the device beside the decoder: (what, bytes)."""
        rows = [("features of pictures", sum(encoded.num_bytes for encoded in self._encoded))]
        if self._weights is not None:
            rows.append(("vision tower", tower_weight_bytes(self._vision, self._weights.dtype)))
        return rows


def _kinds(visuals: Sequence[Visual]) -> str:
    kinds = {visual.kind for visual in visuals}
    return " and ".join(name for kind, name in (("image", "pictures"), ("video", "videos")) if kind in kinds)
