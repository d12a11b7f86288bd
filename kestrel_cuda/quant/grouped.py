"""Grouped symmetric quantization of weights and activations, in NumPy. Knows nothing of layers, files or devices.

The order of operations is part of the definition: bfloat16 weights have few mantissa bits, so ties are common and
every place that computes codes must round in the same steps. Q8_0 and Q4_0 follow the block formats of the same
names in ggml, with the scale chosen in float32 and stored as float16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.config import Quant

ACTIVATION_GROUP = 32
"""Activations are always quantized in groups of 32; wider groups ruin the model."""

SMALLEST_SCALE = np.float32(2.0**-126)
"""A scale below the smallest normal float32 counts as zero: devices flush it."""

LARGEST_SCALE = np.float32(65504.0)


class NonFiniteWeightError(ValueError):
    """A weight is an infinity or not a number."""


class OversizedScaleError(ValueError):
    """A group needs a scale over 65504, the largest a float16 holds."""


@dataclass(frozen=True)
class GroupScheme:
    """`bits` a code, `group_size` inputs a scale."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class GroupedWeight:
    """One quantized matrix as strips: a row is an output channel.

    `codes_nk` int8 [N, K rounded up to the group size], `scales_ng` float32 [N, groups] holding float16 values.
    `num_lost_groups` counts groups with a weight that is not zero whose stored scale became zero.
    """

    codes_nk: NDArray[np.int8]
    scales_ng: NDArray[np.float32]
    scheme: GroupScheme
    num_inputs: int
    num_lost_groups: int


def scheme_for(quant: Quant, num_inputs: int) -> GroupScheme | None:
    """How a matrix with `num_inputs` columns is quantized; None for `none`.

    g256 holds only where the inputs divide by 256; elsewhere the tensor stays at 32.
    """
    match quant:
        case Quant.NONE:
            return None
        case Quant.Q4_0:
            return GroupScheme(4, 32)
        case Quant.G256 if num_inputs % 256 == 0:
            return GroupScheme(8, 256)
        case _:
            return GroupScheme(8, 32)


def round_half_away(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Nearest integer, halves away from zero; exact, unlike adding one half."""
    whole = np.trunc(x)
    away = np.copysign((np.abs(x - whole) >= 0.5).astype(np.float32), x)
    return (whole + away).astype(np.float32, copy=False)


def quantize(weight_nk: NDArray[np.float32], scheme: GroupScheme) -> GroupedWeight:
    """Quantize float32 [N, K]; a short last group is filled with zeros.

    Raises NonFiniteWeightError and OversizedScaleError.
    """
    n, k = weight_nk.shape
    group_size = scheme.group_size
    num_groups = -(-k // group_size)
    if k != num_groups * group_size:
        weight_nk = np.pad(weight_nk, ((0, 0), (0, num_groups * group_size - k)))
    w = weight_nk.reshape(n, num_groups, group_size)
    magnitude = np.abs(w)
    amax = magnitude.max(axis=-1, initial=0)
    if not np.isfinite(amax).all():
        raise NonFiniteWeightError("holds a weight that is not finite")
    with np.errstate(under="ignore"):
        if scheme.bits == 8:
            d = amax / np.float32(127)
        else:
            first = magnitude.argmax(axis=-1)
            d = np.take_along_axis(w, first[..., None], axis=-1)[..., 0] / np.float32(-8)
    d = np.where(np.abs(d) < SMALLEST_SCALE, np.float32(0), d).astype(np.float32, copy=False)
    largest = np.abs(d).max(initial=0)
    if largest > LARGEST_SCALE:
        raise OversizedScaleError(f"needs a scale of {largest:.6g}, over 65504, the largest a float16 holds")
    divisor = np.where(d == 0, np.float32(1), d)[..., None]
    with np.errstate(under="ignore"):
        if scheme.bits == 8:
            scaled = (w * (np.float32(1) / divisor)).astype(np.float32, copy=False)
            exact_codes = np.clip(round_half_away(scaled), -127, 127)
        else:
            exact_codes = np.clip(np.floor(w / divisor + np.float32(8.5)), 0, 15) - np.float32(8)
    codes = np.where(d[..., None] == 0, np.float32(0), exact_codes).astype(np.int8)
    stored = d.astype(np.float16)
    return GroupedWeight(
        codes.reshape(n, num_groups * group_size),
        stored.astype(np.float32),
        scheme,
        k,
        int(np.count_nonzero((stored == 0) & (amax != 0))),
    )


def dequantize(weight: GroupedWeight) -> NDArray[np.float32]:
    """float32 [N, K] of codes times scales, without the filled-up columns."""
    n = weight.codes_nk.shape[0]
    codes = weight.codes_nk.reshape(n, -1, weight.scheme.group_size).astype(np.float32)
    return (codes * weight.scales_ng[..., None]).reshape(n, -1)[:, : weight.num_inputs]


def quantize_activations(x_mk: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes int8 [M, K rounded up to 32] and scales float32 [M, groups] of float32 [M, K].

    `s = amax / 127; code = rint(x * (1 / s))`, nearest even; a scale below the smallest normal float32 gives zeros.
    """
    m, k = x_mk.shape
    num_groups = -(-k // ACTIVATION_GROUP)
    x = np.zeros((m, num_groups * ACTIVATION_GROUP), np.float32)
    x[:, :k] = x_mk
    x = x.reshape(m, num_groups, ACTIVATION_GROUP)
    scales = np.abs(x).max(axis=-1) / np.float32(127)
    scales = np.where(scales < SMALLEST_SCALE, np.float32(0), scales)
    with np.errstate(invalid="ignore", under="ignore"):
        inverse = np.float32(1) / np.where(scales == 0, np.float32(1), scales)
        codes = np.clip(np.rint(x * inverse[..., None]), -127, 127)
        codes = np.where(scales[..., None] == 0, np.float32(0), codes)
        return codes.astype(np.int8).reshape(m, -1), scales
