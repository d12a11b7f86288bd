"""The steps of the vision tower that a backend has, and what they share. Knows no weights' names and no order.

Rows are patches, or tokens of several patches put side by side. Residual rows are float32; rows between the steps are
float32 too, or bfloat16 as uint16 where a backend takes the tower's sizes so.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.config import VisionConfig

Array: TypeAlias = Any
"""An array of the backend."""

BFLOAT16 = np.dtype(np.uint16)
"""How arrays hold it: its bits."""

LAYER_NORM_EPS = 1e-6
"""No checkpoint names it (transformers, modeling_qwen3_vl.py: nn.LayerNorm(..., eps=1e-6))."""


class After(IntEnum):
    """What follows a linear. The numbers are kernels/vision.cuh's."""

    NOTHING = 0
    GELU_TANH = 1
    GELU_ERF = 2
    ADD = 3
    """It is added to what is there."""


@dataclass(frozen=True)
class Affine:
    """A linear [n, k] or a norm [k], with its bias."""

    weight: Array
    bias: Array


@dataclass(frozen=True)
class PatchPlaces:
    """Where the patches of a frame lie, and what each place means: the frames of a video lie alike.

    `places_m2` (int32) are the row and the column of each patch, in the order of the pixel rows. A row lies between
    the entries `row_taps_p2` (int32) of the position table's side and takes the share `row_shares_p` (float32) of the
    second; columns alike. `cos_pd` and `sin_pd` (float32) are the head_dim / 4 angles of a place on either axis.
    """

    places_m2: Array
    row_taps_p2: Array
    row_shares_p: Array
    column_taps_p2: Array
    column_shares_p: Array
    cos_pd: Array
    sin_pd: Array

    def arrays(self) -> tuple[Array, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class PixelCodes:
    """Pixels of patches in 8 bits, and what each of the 256 values becomes in each channel.

    `codes_mk` (uint8) has a row for each patch: channels, frames, patch rows, patch columns, `num_inputs` in all; or
    one frame that stands for all of a patch, as in a picture. `values_cv` is float32 [channels, 256]. On the host.
    """

    codes_mk: NDArray[np.uint8]
    values_cv: NDArray[np.float32]
    num_inputs: int

    def __len__(self) -> int:
        return len(self.codes_mk)

    def rows(self, begin: int, end: int) -> PixelCodes:
        return replace(self, codes_mk=self.codes_mk[begin:end])

    def values_mk(self) -> NDArray[np.float32]:
        """What the tower takes, [patches, num_inputs]."""
        return expand(self.codes_mk, self.values_cv, self.num_inputs)


def expand(codes_mk: NDArray[np.uint8], values_cv: NDArray[np.float32], num_inputs: int) -> NDArray[np.float32]:
    """The values of codes, [patches, num_inputs], in every frame of a patch."""
    channels = len(values_cv)
    codes_mcf = codes_mk.reshape(len(codes_mk), channels, -1)
    repeats = num_inputs // codes_mk.shape[1]
    values = np.empty((len(codes_mk), channels, repeats, codes_mcf.shape[2]), np.float32)
    for channel in range(channels):
        values[:, channel] = values_cv[channel].take(codes_mcf[:, None, channel])
    return values.reshape(len(codes_mk), num_inputs)


class VisionSteps(Protocol):
    """Steps on rows of `x.shape[0]` patches or tokens, all arrays in one piece."""

    def patch_dtype(self, vision: VisionConfig) -> DTypeLike:
        """What rows between the steps, and matrices, are best held in."""

    def put_pixels(self, x_mk: Array, codes_mk: Array, values_cv: Array) -> None:
        """The values of a `PixelCodes` as rows of the steps' own kind."""

    def affine(self, x_mk: Array, weights: Affine, out_mn: Array, after: After = After.NOTHING) -> None:
        """x @ weight^T + bias, and what follows; `ADD` takes float32 rows."""

    def layer_norm(self, h_mk: Array, weights: Affine, out_mk: Array) -> None:
        """(h - mean) / sqrt(variance + eps) * weight + bias over the last axis of float32 rows."""

    def add_patch_positions(self, h_mn: Array, table_pn: Array, places: PatchPlaces) -> None:
        """h += the square position table at each patch's place, bilinear."""

    def attend_patches(self, qkv_mn: Array, num_heads: int, places: PatchPlaces, out_mn: Array) -> None:
        """Attention of every patch over its frame: rotated queries and keys, softmax(q k^T / sqrt(d)) v.

        A row of `qkv_mn` holds queries, keys and values of all heads, in this order; the rotation happens in place.
        """
