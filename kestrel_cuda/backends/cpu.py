"""The reference backend: every step in plain NumPy, written to be read. The kernels are compared with it.

Its "device" is host memory: slabs are copied from slabs, so windows, caches and pools run here as on a GPU.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.backends.base import MemoryInfo, PackedTensor, Preparation, Slab, SourceMatrix
from kestrel_cuda.backends.composed import ComposedSteps
from kestrel_cuda.backends.cpu_rope import rotate
from kestrel_cuda.backends.cpu_vision import CpuVisionSteps
from kestrel_cuda.backends.operands import (
    Activation,
    DeviceWeight,
    HeadShape,
    KvLayer,
    SequenceState,
    TokenShape,
    new_activation,
)
from kestrel_cuda.checkpoint.tensor_file import widen
from kestrel_cuda.config import KvDtype
from kestrel_cuda.quant.grouped import (
    ACTIVATION_GROUP,
    GroupScheme,
    NonFiniteWeightError,
    OversizedScaleError,
    quantize,
    quantize_activations,
)
from kestrel_cuda.quant.kv_rows import dequantize_kv, quantize_kv
from kestrel_cuda.quant.packed import (
    Element,
    PackedGeometry,
    SlabEntry,
    SlabLayout,
    entry_views,
    pack_grouped,
    unpack_codes,
)

LARGEST_F16 = np.float32(65504)

# What overflows reaches the logits as infinity or NaN, as on a GPU, and is refused there; no warning on the way.
_silent = np.errstate(all="ignore")


def rms_norm(x: NDArray[np.float32], weight: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, in float32."""
    rstd = np.float32(1) / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    y: NDArray[np.float32] = weight * (x * rstd)
    return y


class CpuPacker:
    """Quantizes with quant/grouped.py and packs with quant/packed.py."""

    def __init__(self) -> None:
        self._found: list[PackedTensor] = []

    def pack(self, slab: Slab, entry: SlabEntry, members: Sequence[SourceMatrix]) -> None:
        codes_kn, scales_gn = entry_views(slab.raw, entry)
        geometry = entry.geometry
        column = 0
        for member in members:
            num_outputs = member.data.shape[0]
            found = PackedTensor(member.name, 0, 0, 0)
            if geometry.element.is_grouped:
                scheme = GroupScheme(8 if geometry.element is Element.INT8 else 4, geometry.group_size)
                try:
                    weight = quantize(widen(member.data), scheme)
                except NonFiniteWeightError:
                    found = PackedTensor(member.name, 1, 0, 0)
                except OversizedScaleError:
                    found = PackedTensor(member.name, 0, 1, 0)
                else:
                    pack_grouped(weight, codes_kn, scales_gn, column)  # type: ignore[arg-type]
                    found = PackedTensor(member.name, 0, 0, weight.num_lost_groups)
            else:
                values = widen(member.data)
                found = PackedTensor(member.name, int(np.count_nonzero(~np.isfinite(values))), 0, 0)
                stored = values if geometry.element is Element.F32 else member.data.view(np.uint16)
                codes_kn[:, column : column + num_outputs] = stored.T
            self._found.append(found)
            column += num_outputs

    def finish(self) -> list[PackedTensor]:
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        pass


class CpuBackend(ComposedSteps, CpuVisionSteps):
    """Plain NumPy on the host."""

    name = "cpu"
    can_capture = False
    runs_ahead = False
    rows_are_independent = False

    def __init__(self) -> None:
        self.device_name = platform.processor() or platform.machine()
        self.num_load_threads = os.cpu_count() or 1
        self._allocated_bytes = 0
        self._peak_bytes = 0

    def prepare_steps(
        self, *, quantized: bool, kv: KvDtype, head_dim: int, element: Element | None, token: TokenShape | None
    ) -> Preparation:
        return Preparation(lambda: None, lambda: None)

    # memory

    def memory(self) -> MemoryInfo:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return MemoryInfo(free, pages, self._allocated_bytes, self._peak_bytes, 0)

    def reset_peak(self) -> None:
        self._peak_bytes = self._allocated_bytes

    def _count(self, num_bytes: int) -> None:
        self._allocated_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        array = np.zeros(shape, dtype)
        self._count(array.nbytes)
        return array

    def free(self, array: NDArray[Any]) -> None:
        self._allocated_bytes -= array.nbytes

    def to_device(self, array: NDArray[Any]) -> NDArray[Any]:
        self._count(array.nbytes)
        return np.array(array, order="C")

    def to_host(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.copy()

    def write(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        target[...] = source

    def copy(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        target[...] = source

    def map_host(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def shared_zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return np.zeros(shape, dtype)

    def peek(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def allocate_slab(self, layout: SlabLayout) -> Slab:
        self._count(layout.num_bytes)
        return self.slab_over(layout, np.zeros(layout.num_bytes, np.uint8))

    def slab_over(self, layout: SlabLayout, raw: NDArray[np.uint8]) -> Slab:
        weights = {}
        for entry in layout.entries:
            codes_kn, scales_gn = entry_views(raw, entry)
            grouped = entry.geometry.element.is_grouped
            weights[entry.key.projection] = DeviceWeight(entry.geometry, codes_kn, scales_gn if grouped else None)
        return Slab(layout, raw, weights)

    def free_slab(self, slab: Slab) -> None:
        self._allocated_bytes -= slab.layout.num_bytes

    def host_slab(self, layout: SlabLayout) -> NDArray[np.uint8]:
        return np.zeros(layout.num_bytes, np.uint8)

    def upload(self, slab: Slab, host: NDArray[np.uint8]) -> None:
        np.copyto(slab.raw, host)

    def wait_upload(self, slab: Slab) -> None:
        pass

    def uploads_done(self) -> Callable[[], None]:
        return lambda: None

    def release(self, slab: Slab) -> None:
        pass

    def download(self, host: NDArray[np.uint8], slab: Slab) -> None:
        np.copyto(host, slab.raw)

    def packer(self) -> CpuPacker:
        return CpuPacker()

    def host_pinned_bytes(self) -> int:
        return 0

    def host_unpinned_bytes(self) -> int:
        return 0

    # time

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self, mark: float) -> None:
        pass

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def synchronize(self) -> None:
        pass

    def capture(self, steps: Callable[[], None]) -> Callable[[], None]:
        return steps

    def read_rate_gb_per_s(self) -> None:
        return None

    def link_rate_gb_per_s(self) -> None:
        return None

    # steps

    def activation(self, max_rows: int, num_inputs: int, quantized: bool) -> Activation:
        return new_activation(self.zeros, max_rows, num_inputs, quantized)

    def _fill(self, out: Activation, x_mk: NDArray[np.float32]) -> None:
        num_rows = x_mk.shape[0]
        if out.values_mk is not None:
            out.values_mk[:num_rows] = x_mk
        elif out.codes_mk is not None and out.scales_mg is not None:
            out.codes_mk[:num_rows], out.scales_mg[:num_rows] = quantize_activations(x_mk)

    def embed(self, table: NDArray[Any], state: SequenceState, h_mk: NDArray[np.float32], num_rows: int) -> None:
        first = int(state.position[0])
        h_mk[:num_rows] = widen(table[state.tokens[first : first + num_rows]])

    @_silent
    def norm(
        self, h_mk: NDArray[np.float32], weight_k: NDArray[np.float32], eps: float, out: Activation, num_rows: int
    ) -> None:
        self._fill(out, rms_norm(h_mk[:num_rows], weight_k, eps))

    @_silent
    def linear(
        self,
        x: Activation,
        weight: DeviceWeight,
        out_mn: NDArray[np.float32],
        num_rows: int,
        *,
        column: int = 0,
        add: bool = False,
    ) -> None:
        geometry = weight.geometry
        if weight.scales_gn is None:
            assert x.values_mk is not None
            y = x.values_mk[:num_rows] @ _float_values(weight.codes_kn, geometry)
        else:
            assert x.codes_mk is not None and x.scales_mg is not None
            y = _grouped_product(x.codes_mk[:num_rows], x.scales_mg[:num_rows], weight)
        target = out_mn[:num_rows, column : column + geometry.num_outputs]
        if add:
            target += y[:, : geometry.num_outputs]
        else:
            target[...] = y[:, : geometry.num_outputs]

    @_silent
    def rope_store(
        self,
        qkv_mn: NDArray[np.float32],
        q_norm_d: NDArray[np.float32],
        k_norm_d: NDArray[np.float32],
        heads: HeadShape,
        state: SequenceState,
        kv: KvLayer,
        q_mhd: NDArray[np.float32],
        num_rows: int,
    ) -> None:
        first = int(state.position[0])
        slots = slice(first, first + num_rows)
        cos, sin = state.cos_sd[slots, None], state.sin_sd[slots, None]
        d, kv_size = heads.head_dim, heads.num_kv_heads * heads.head_dim
        q = qkv_mn[:num_rows, : heads.num_heads * d].reshape(num_rows, -1, d)
        k = qkv_mn[:num_rows, heads.k_column : heads.k_column + kv_size].reshape(num_rows, -1, d)
        v = qkv_mn[:num_rows, heads.v_column : heads.v_column + kv_size].reshape(num_rows, -1, d)
        q_mhd[:num_rows] = rotate(rms_norm(q, q_norm_d, heads.norm_eps), cos, sin)
        keys = rotate(rms_norm(k, k_norm_d, heads.norm_eps), cos, sin)
        for cache_hsd, scales_hsg, rows in ((kv.k_hsd, kv.k_scales_hsg, keys), (kv.v_hsd, kv.v_scales_hsg, v)):
            rows_hsd = rows.transpose(1, 0, 2)
            if scales_hsg is not None:
                cache_hsd[:, slots], scales_hsg[:, slots] = quantize_kv(rows_hsd)
            elif cache_hsd.dtype == np.float16:
                cache_hsd[:, slots] = np.clip(rows_hsd, -LARGEST_F16, LARGEST_F16)
            else:
                cache_hsd[:, slots] = rows_hsd

    @_silent
    def attend(
        self,
        q_mhd: NDArray[np.float32],
        kv: KvLayer,
        heads: HeadShape,
        state: SequenceState,
        out: Activation,
        num_rows: int,
        num_slots: int,
    ) -> None:
        d = heads.head_dim
        k_hsd = _entries(kv.k_hsd, kv.k_scales_hsg, num_slots)
        v_hsd = _entries(kv.v_hsd, kv.v_scales_hsg, num_slots)
        # Float16 entries are multiplied in float16 with float32 sums: queries and weights are rounded too.
        rounded = k_hsd.dtype
        q = q_mhd[:num_rows].astype(rounded).astype(np.float32)
        q = q.reshape(num_rows, heads.num_kv_heads, heads.queries_per_kv, d).transpose(1, 2, 0, 3)
        k, v = k_hsd[:, None].astype(np.float32), v_hsd[:, None].astype(np.float32)
        result = np.empty((num_rows, heads.num_kv_heads, heads.queries_per_kv, d), np.float32)
        # Blocks of queries keep the scores linear in the length of the context.
        for begin in range(0, num_rows, 64):
            rows = slice(begin, min(begin + 64, num_rows))
            scores = q[:, :, rows] @ k.swapaxes(-1, -2) * np.float32(d**-0.5)
            last_slot = num_slots - num_rows + np.arange(rows.start, rows.stop)
            scores = np.where(np.arange(num_slots) <= last_slot[:, None], scores, np.float32(-np.inf))
            p = np.exp(scores - scores.max(axis=-1, keepdims=True)).astype(rounded).astype(np.float32)
            result[rows] = (p @ v / p.sum(axis=-1, keepdims=True)).transpose(2, 0, 1, 3)
        self._fill(out, result.reshape(num_rows, -1))

    def check_heads(self, head_dim: int, queries_per_kv: int) -> None:
        pass

    def reserve_attention(self, heads: HeadShape, max_rows: int, ctx: int) -> None:
        pass

    @_silent
    def silu_mul(self, gate_up_mn: NDArray[np.float32], up_column: int, out: Activation, num_rows: int) -> None:
        gate = gate_up_mn[:num_rows, : out.num_inputs]
        up = gate_up_mn[:num_rows, up_column : up_column + out.num_inputs]
        self._fill(out, (gate / (np.float32(1) + np.exp(-gate)) * up).astype(np.float32, copy=False))

    def choose(self, logits_v: NDArray[np.float32], num_ids: int, state: SequenceState, num_rows: int) -> None:
        candidates = logits_v[:num_ids]
        numbers = ~np.isnan(candidates)
        best = int(np.argmax(np.where(numbers, candidates, -np.inf))) if numbers.any() else -1
        if best >= 0 and not numbers[best]:
            best = int(np.argmax(numbers))
        self.advance(state, num_rows)
        slot = state.position[0]
        state.tokens[slot] = max(best, 0)
        state.chosen[slot % len(state.chosen)] = best

    def advance(self, state: SequenceState, num_rows: int) -> None:
        state.position[0] += num_rows

    def close(self) -> None:
        pass


def _entries(cache_hsd: NDArray[Any], scales_hsg: NDArray[np.float16] | None, num_slots: int) -> NDArray[np.floating]:
    """The first slots of keys or values as they are multiplied: float16 or float32."""
    if scales_hsg is None:
        return cache_hsd[:, :num_slots]
    return dequantize_kv(cache_hsd[:, :num_slots], scales_hsg[:, :num_slots])


def _float_values(values_kn: NDArray[np.generic], geometry: PackedGeometry) -> NDArray[np.float32]:
    return widen(values_kn.view(np.float16) if geometry.element is Element.F16 else values_kn)


def _grouped_product(
    codes_mk: NDArray[np.int8], scales_mg: NDArray[np.float32], weight: DeviceWeight
) -> NDArray[np.float32]:
    """Sum over groups of 32 of float(int32 dot) * (activation scale * weight scale), groups ascending.

    A dot of 32 int8 products is below 2^24, so float32 matrix products give it exactly.
    """
    geometry = weight.geometry
    assert weight.scales_gn is not None
    w_codes = unpack_codes(weight.codes_kn, geometry.element).astype(np.float32)
    x_codes = codes_mk.astype(np.float32)
    y = np.zeros((codes_mk.shape[0], geometry.n_padded), np.float32)
    w_scales = weight.scales_gn.astype(np.float32)
    for g in range(geometry.k_padded // ACTIVATION_GROUP):
        k = slice(g * ACTIVATION_GROUP, (g + 1) * ACTIVATION_GROUP)
        scale = scales_mg[:, g, None] * w_scales[g * ACTIVATION_GROUP // geometry.group_size]
        y += x_codes[:, k] @ w_codes[k] * scale
    return y
