"""What the steps of a decoder take: weights on the device, rows, the cache and the state. Knows no step and no backend.

Axis letters, outermost first, the last one contiguous:
    t token   m row   n output   k input   g group   h head   d head channel   s cache slot   l layer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from kestrel_cuda.quant.grouped import ACTIVATION_GROUP
from kestrel_cuda.quant.packed import PackedGeometry

Array: TypeAlias = Any
"""An array of the backend: NumPy's or CuPy's."""


@dataclass(frozen=True)
class DeviceWeight:
    """One packed matrix on the device: codes and scales (None for floats), shaped as its geometry says."""

    geometry: PackedGeometry
    codes_kn: Array
    scales_gn: Array | None


@dataclass(frozen=True)
class TokenShape:
    """What decides which kernels take a whole token, known before there is a weight on the device.

    `layer` is the joint projection, o, gate and up, down.
    """

    layer: tuple[PackedGeometry, ...]
    lm_head: PackedGeometry
    num_layers: int
    head_dim: int
    queries_per_kv: int


@dataclass(frozen=True)
class Activation:
    """The input rows of a linear: float32 values [m, k], or int8 codes [m, k_padded] with scales [m, k_padded / 32]."""

    num_inputs: int
    values_mk: Array | None
    codes_mk: Array | None
    scales_mg: Array | None

    def rows_from(self, first: int) -> Activation:
        """The rows from `first` on, in the same memory."""
        parts = (None if rows is None else rows[first:] for rows in (self.values_mk, self.codes_mk, self.scales_mg))
        return Activation(self.num_inputs, *parts)


def new_activation(
    zeros: Callable[[tuple[int, ...], DTypeLike], Array], max_rows: int, num_inputs: int, quantized: bool
) -> Activation:
    """Buffers for up to `max_rows` input rows, made by a backend's `zeros`."""
    if not quantized:
        return Activation(num_inputs, zeros((max_rows, num_inputs), np.float32), None, None)
    num_groups = -(-num_inputs // ACTIVATION_GROUP)
    codes_mk = zeros((max_rows, num_groups * ACTIVATION_GROUP), np.int8)
    return Activation(num_inputs, None, codes_mk, zeros((max_rows, num_groups), np.float32))


@dataclass(frozen=True)
class KvLayer:
    """Keys and values of one layer: [kv_heads, ctx, head_dim] of float16 or float32, or of int8 codes with float16
    scales [kv_heads, ctx, head_dim / 32] (quant/kv_rows.py)."""

    k_hsd: Array
    v_hsd: Array
    k_scales_hsg: Array | None = None
    v_scales_hsg: Array | None = None


CHOSEN_SLOTS = 4
"""Ids that are kept for the host; one is read while the next is written."""


@dataclass(frozen=True)
class SequenceState:
    """What decoding keeps on the device: token ids by cache slot [ctx + 1], the number of slots filled [1], and the
    rotation table [ctx, head_dim / 2] by cache slot; and in memory shared with the host the ids chosen last
    [CHOSEN_SLOTS], the one for cache slot s at s % CHOSEN_SLOTS."""

    tokens: Array
    position: Array
    chosen: Array
    cos_sd: Array
    sin_sd: Array


@dataclass(frozen=True)
class HeadShape:
    """Heads of the attention, and where keys and values start in a row of the joint projection."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    k_column: int
    v_column: int
    norm_eps: float

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's weights, norms and cache. `qkv` and `gate_up` are fused."""

    qkv: DeviceWeight
    o: DeviceWeight
    gate_up: DeviceWeight
    down: DeviceWeight
    input_norm_k: Array
    post_norm_k: Array
    q_norm_d: Array
    k_norm_d: Array
    kv: KvLayer


@dataclass(frozen=True)
class Decoder:
    """Everything between an id and its logits, `logits_mv[0]`.

    `embedding` is the table [vocab, hidden] where the device has it; otherwise `h_mk[0]` is embedded before.
    """

    layers: tuple[DecoderLayer, ...]
    lm_head: DeviceWeight
    final_norm_k: Array
    heads: HeadShape
    embedding: Array | None
    h_mk: Array
    logits_mv: Array

    @property
    def shape(self) -> TokenShape:
        first, heads = self.layers[0], self.heads
        layer = tuple(weight.geometry for weight in (first.qkv, first.o, first.gate_up, first.down))
        return TokenShape(layer, self.lm_head.geometry, len(self.layers), heads.head_dim, heads.queries_per_kv)
