"""The vision tower's weights on a backend. Knows no arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import Array
from kestrel_cuda.backends.vision import BFLOAT16, Affine
from kestrel_cuda.checkpoint.names import (
    PATCH_EMBED,
    POSITION_TABLE,
    BlockPart,
    MergerPart,
    block_part_name,
    merger_part_name,
)
from kestrel_cuda.checkpoint.reader import Checkpoint
from kestrel_cuda.checkpoint.tensor_file import first_nonfinite_row, narrow, widen
from kestrel_cuda.config import VisionConfig


@dataclass(frozen=True)
class MergerWeights:
    """From the patches of a token to its features."""

    norm: Affine
    fc1: Affine
    fc2: Affine


@dataclass(frozen=True)
class TowerWeights:
    """Matrices of `dtype`; norms, biases and the position table in float32.

    `positions_pn` has a row for each of position_side x position_side places; `deepstack[i]` follows block
    `deepstack_blocks[i]`.
    """

    dtype: DTypeLike
    patch_embed: Affine
    positions_pn: Array
    blocks: tuple[dict[BlockPart, Affine], ...]
    merger: MergerWeights
    deepstack: tuple[MergerWeights, ...]

    def arrays(self) -> Iterator[Array]:
        """Every array once."""
        yield self.positions_pn
        mergers = (self.merger, *self.deepstack)
        affines = [self.patch_embed, *(affine for block in self.blocks for affine in block.values())]
        for affine in (*affines, *(part for each in mergers for part in (each.norm, each.fc1, each.fc2))):
            yield affine.weight
            yield affine.bias


def read_tower(checkpoint: Checkpoint, config: VisionConfig, backend: Backend, dtype: DTypeLike) -> TowerWeights:
    """Every weight of the tower; matrices become `dtype`, float32 or BFLOAT16.

    Raises CheckpointError for a weight that is not finite.
    """

    def tensor(name: str, kind: DTypeLike, shape: tuple[int, ...] | None = None) -> Array:
        raw = checkpoint.tensor(name)
        if first_nonfinite_row(raw) is not None:
            raise checkpoint.not_finite(name)
        values = narrow(raw) if np.dtype(kind) == BFLOAT16 else widen(raw)
        return backend.to_device(values.reshape(shape or raw.shape))

    def linear(name: str, shape: tuple[int, int] | None = None) -> Affine:
        return Affine(tensor(f"{name}.weight", dtype, shape), tensor(f"{name}.bias", np.float32))

    def norm(name: str) -> Affine:
        return Affine(tensor(f"{name}.weight", np.float32), tensor(f"{name}.bias", np.float32))

    def block(number: int) -> dict[BlockPart, Affine]:
        norms = (BlockPart.NORM1, BlockPart.NORM2)
        return {part: (norm if part in norms else linear)(block_part_name(number, part)) for part in BlockPart}

    def merger(index: int | None) -> MergerWeights:
        return MergerWeights(
            norm(merger_part_name(index, MergerPart.NORM)),
            linear(merger_part_name(index, MergerPart.FC1)),
            linear(merger_part_name(index, MergerPart.FC2)),
        )

    return TowerWeights(
        dtype=np.dtype(dtype),
        # A patch is one step of the convolution, so its kernel is a matrix in the order of the pixel rows.
        patch_embed=linear(PATCH_EMBED, (config.hidden_size, config.patch_inputs)),
        positions_pn=tensor(POSITION_TABLE, np.float32),
        blocks=tuple(block(number) for number in range(config.depth)),
        merger=merger(None),
        deepstack=tuple(merger(index) for index in range(len(config.deepstack_blocks))),
    )


def tower_weight_bytes(config: VisionConfig, dtype: DTypeLike) -> int:
    """What `read_tower` takes on the device."""
    n, merged = config.hidden_size, config.merged_size
    matrices = n * config.patch_inputs + config.depth * (4 * n * n + 2 * n * config.intermediate_size)
    mergers = 1 + len(config.deepstack_blocks)
    matrices += mergers * (merged * merged + merged * config.out_hidden_size)
    biases = n + config.depth * (3 * n + n + config.intermediate_size + n) + mergers * (merged + config.out_hidden_size)
    norms = config.depth * 4 * n + 2 * n + (mergers - 1) * 2 * merged
    table = config.position_side**2 * n
    return matrices * np.dtype(dtype).itemsize + 4 * (biases + norms + table)
