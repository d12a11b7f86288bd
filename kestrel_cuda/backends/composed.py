"""Stretches of a layer as plain sequences of a backend's steps; a backend may make each a single kernel instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from kestrel_cuda.backends.base import WholeToken
from kestrel_cuda.backends.operands import Activation, Array, Decoder, DeviceWeight, HeadShape, KvLayer, SequenceState


class ComposedSteps:
    """The stretches of `Backend` for a class that has its steps."""

    to_host: Callable[[Array], NDArray[Any]]
    write: Callable[[Array, NDArray[Any]], None]
    norm: Callable[..., None]
    linear: Callable[..., None]
    silu_mul: Callable[..., None]
    rope_store: Callable[..., None]
    attend: Callable[..., None]

    def add(self, target_mk: Array, rows_mk: Array) -> None:
        """By way of the host: the same float32 sums as any other way."""
        self.write(target_mk, self.to_host(target_mk) + self.to_host(rows_mk))

    def norm_linear(
        self,
        h_mk: Array,
        weight_k: Array,
        eps: float,
        scratch: Activation,
        parts: Sequence[tuple[DeviceWeight, int]],
        out_mn: Array,
        num_rows: int,
    ) -> None:
        """out[:, column ...] = norm(h) @ weight for each part, by way of `scratch`."""
        self.norm(h_mk, weight_k, eps, scratch, num_rows)
        for weight, column in parts:
            self.linear(scratch, weight, out_mn, num_rows, column=column)

    def norm_gate_up(
        self,
        h_mk: Array,
        weight_k: Array,
        eps: float,
        scratch: Activation,
        parts: Sequence[tuple[DeviceWeight, int]],
        gate_up_mn: Array,
        up_column: int,
        out: Activation,
        num_rows: int,
    ) -> None:
        """out = silu(gate) * up of norm(h) @ weights, by way of `scratch` and `gate_up_mn`."""
        self.norm_linear(h_mk, weight_k, eps, scratch, parts, gate_up_mn, num_rows)
        self.silu_mul(gate_up_mn, up_column, out, num_rows)

    def rope_attend(
        self,
        qkv_mn: Array,
        q_norm_d: Array,
        k_norm_d: Array,
        heads: HeadShape,
        state: SequenceState,
        kv: KvLayer,
        q_mhd: Array,
        out: Activation,
        num_rows: int,
        num_slots: int,
    ) -> None:
        """`rope_store`, then `attend`, by way of `q_mhd`."""
        self.rope_store(qkv_mn, q_norm_d, k_norm_d, heads, state, kv, q_mhd, num_rows)
        self.attend(q_mhd, kv, heads, state, out, num_rows, num_slots)

    def whole_token(self, decoder: Decoder) -> WholeToken | None:
        """None: a token is its layers' stretches, one after the other."""
        return None
