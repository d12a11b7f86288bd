"""The vision tower's weights as float32 in host memory. Knows no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.checkpoint.names import (
    PATCH_EMBED,
    POSITION_TABLE,
    BlockPart,
    MergerPart,
    block_part_name,
    merger_part_name,
)
from kestrel_cuda.checkpoint.reader import NOT_FINITE, Checkpoint
from kestrel_cuda.checkpoint.tensor_file import widen
from kestrel_cuda.config import VisionConfig
from kestrel_cuda.errors import CheckpointError

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Affine:
    """A linear [n, k] or a norm [k], with its bias."""

    weight: Floats
    bias: Floats


@dataclass(frozen=True)
class MergerWeights:
    """From the patches of a token to its features."""

    norm: Affine
    fc1: Affine
    fc2: Affine


@dataclass(frozen=True)
class TowerWeights:
    """`positions_mn` has a row for each of position_side x position_side places; `deepstack[i]` follows block
    `deepstack_blocks[i]`."""

    patch_embed: Affine
    positions_mn: Floats
    blocks: tuple[dict[BlockPart, Affine], ...]
    merger: MergerWeights
    deepstack: tuple[MergerWeights, ...]


def read_tower(checkpoint: Checkpoint, config: VisionConfig) -> TowerWeights:
    """Every weight of the tower. Raises CheckpointError for one that is not finite."""

    def tensor(name: str) -> Floats:
        values = widen(checkpoint.tensor(name))
        if not np.isfinite(values).all():
            raise CheckpointError(NOT_FINITE.format(name))
        return values

    def affine(name: str) -> Affine:
        return Affine(tensor(f"{name}.weight"), tensor(f"{name}.bias"))

    def merger(index: int | None) -> MergerWeights:
        return MergerWeights(*(affine(merger_part_name(index, part)) for part in MergerPart))

    patches = affine(PATCH_EMBED)
    return TowerWeights(
        # A patch is one step of the convolution, so its kernel is a matrix in the order of the pixel rows.
        patch_embed=Affine(patches.weight.reshape(config.hidden_size, config.patch_inputs), patches.bias),
        positions_mn=tensor(POSITION_TABLE),
        blocks=tuple(
            {part: affine(block_part_name(block, part)) for part in BlockPart} for block in range(config.depth)
        ),
        merger=merger(None),
        deepstack=tuple(merger(index) for index in range(len(config.deepstack_blocks))),
    )
