"""q/k norm, rotation, cache write and attention against float64, for every kind of cache. Knows no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import HeadShape, KvLayer
from kestrel_cuda.config import KvDtype
from kestrel_cuda.quant.kv_rows import KV_GROUP, dequantize_kv, quantize_kv
from kestrel_cuda.step_checks import (
    CODE_STEPS,
    EXACT_STEP,
    Check,
    judge,
    nmse,
    quantized_out,
    sequence_at,
    steps_off,
    within_steps,
)

CONTEXTS = (1, 63, 256, 257, 600)
HEADS = ((4, 2, 16), (6, 2, 64), (16, 8, 128))
"""Query heads, key-value heads and the size of one."""

HALF_ENTRIES, HALF_CODE_STEPS = 1e-6, 0.75
"""What may be lost where entries are read as float16: queries and the weights of values are rounded to it too."""

SCALE_ERROR = 1.001 * 2.0**-11
"""Largest relative error of a cache scale: half a unit in the last place of a float16."""

_NAMES = {KvDtype.F16: "float16", KvDtype.F32: "float32", KvDtype.Q8: "int8"}

Doubles = NDArray[np.float64]


def attention_checks(backend: Backend) -> Iterator[Check]:
    """One check for each kind of cache."""
    rng = np.random.default_rng(9)
    for dtype in KvDtype:
        yield _check_attention(backend, rng, dtype)


def heads_for(dtype: KvDtype) -> list[tuple[int, int, int]]:
    """Of HEADS, those that such a cache takes."""
    return [shape for shape in HEADS if dtype is not KvDtype.Q8 or shape[2] % KV_GROUP == 0]


def filled_cache(
    backend: Backend, rng: np.random.Generator, dtype: KvDtype, shape: tuple[int, int, int], num_filled: int
) -> KvLayer:
    """Random entries [kv_heads, ctx, d] in the first slots; what is read of the others is NaN."""
    arrays: list[list[Any]] = []
    for _ in range(2):
        rows = rng.standard_normal(shape, dtype=np.float32)
        if dtype is KvDtype.Q8:
            codes, scales = quantize_kv(rows)
            codes[:, num_filled:], scales[:, num_filled:] = 99, np.nan
            arrays.append([backend.to_device(codes), backend.to_device(scales)])
        else:
            rows[:, num_filled:] = np.nan
            arrays.append([backend.to_device(rows.astype(np.float16 if dtype is KvDtype.F16 else np.float32))])
    (keys, *k_scales), (values, *v_scales) = arrays
    return KvLayer(keys, values, *k_scales, *v_scales)


def cache_arrays(kv: KvLayer) -> list[Any]:
    """Every array of a layer's cache."""
    return [array for array in (kv.k_hsd, kv.v_hsd, kv.k_scales_hsg, kv.v_scales_hsg) if array is not None]


def _check_attention(backend: Backend, rng: np.random.Generator, dtype: KvDtype) -> Check:
    """Queries over a cache whose unread slots hold NaN; the attention of an int8 cache over what was written there."""
    errors, off, entries_off, scales_off = [], 0.0, 0.0, 0.0
    for num_heads, num_kv_heads, d in heads_for(dtype):
        kv_size = num_kv_heads * d
        heads = HeadShape(num_heads, num_kv_heads, d, num_heads * d, num_heads * d + kv_size, 1e-6)
        for num_slots in CONTEXTS:
            for m in (1, 9, 40):
                if m > num_slots:
                    continue
                ctx, first = num_slots + 3, num_slots - m
                state = sequence_at(backend, ctx, first, d // 2, rng)
                kv = filled_cache(backend, rng, dtype, (num_kv_heads, ctx, d), first)
                old = [backend.to_host(cache)[:, :first].astype(np.float64) for cache in (kv.k_hsd, kv.v_hsd)]
                qkv = rng.standard_normal((m, num_heads * d + 2 * kv_size), dtype=np.float32)
                norms = rng.uniform(0.5, 1.5, (2, d)).astype(np.float32)
                q = backend.zeros((m, num_heads, d), np.float32)
                q_norm, k_norm = backend.to_device(norms[0].copy()), backend.to_device(norms[1].copy())
                backend.rope_store(backend.to_device(qkv), q_norm, k_norm, heads, state, kv, q, m)
                out = backend.activation(m, num_heads * d, quantized=False)
                backend.reserve_attention(heads, m, ctx)
                backend.attend(q, kv, heads, state, out, m, num_slots)
                table = [backend.to_host(t)[first:num_slots].astype(np.float64) for t in (state.cos_sd, state.sin_sd)]
                rows = _rows_float64(qkv.astype(np.float64), norms, heads, table[0], table[1])
                if dtype is KvDtype.Q8:
                    written = [_Written.read(backend, *pair) for pair in _pairs(kv)]
                    new = (rows.k_hsd, rows.v_hsd)
                    entries_off = max(entries_off, *(w.codes_off(x, first) for w, x in zip(written, new, strict=True)))
                    scales_off = max(scales_off, *(w.scales_off(x, first) for w, x in zip(written, new, strict=True)))
                    k_hsd, v_hsd = (w.values_hsd[:, :num_slots] for w in written)
                else:
                    stored = np.float16 if dtype is KvDtype.F16 else np.float32
                    k_hsd, v_hsd = (
                        np.concatenate([before, row_hsd.astype(stored)], axis=1)
                        for before, row_hsd in zip(old, (rows.k_hsd, rows.v_hsd), strict=True)
                    )
                expected = _attention_float64(rows.q_mhd, k_hsd, v_hsd, heads, first)
                errors.append(nmse(backend.to_host(out.values_mk), expected))
                rounded = quantized_out(backend, m, num_heads * d)
                backend.attend(q, kv, heads, state, rounded, m, num_slots)
                off = max(off, steps_off(backend, rounded, expected))
    limit, most = (EXACT_STEP, CODE_STEPS) if dtype is KvDtype.F32 else (HALF_ENTRIES, HALF_CODE_STEPS)
    found = judge(f"attention, {_NAMES[dtype]} cache", errors, limit)
    passed, detail = found.passed and off <= most, f"{found.detail}; int8 rows {within_steps(off, most)}"
    if dtype is KvDtype.Q8:
        passed &= entries_off <= CODE_STEPS and scales_off <= SCALE_ERROR
        detail += f"; entries {within_steps(entries_off, CODE_STEPS)}"
    return Check(found.name, passed, detail)


def _pairs(kv: KvLayer) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    return (kv.k_hsd, kv.k_scales_hsg), (kv.v_hsd, kv.v_scales_hsg)


@dataclass(frozen=True)
class _Written:
    """What an int8 cache holds, and how far its last slots are from what should be there."""

    codes_hsd: NDArray[np.int8]
    scales_hsg: NDArray[np.float16]

    @classmethod
    def read(cls, backend: Backend, codes: Any, scales: Any) -> _Written:
        return cls(backend.to_host(codes), backend.to_host(scales))

    @property
    def values_hsd(self) -> Doubles:
        values: Doubles = dequantize_kv(self.codes_hsd, self.scales_hsg).astype(np.float64)
        return values

    def codes_off(self, expected_hsd: Doubles, first: int) -> float:
        """The largest distance of a code from the value it rounds, in steps of the scale beside it."""
        slots = slice(first, first + expected_hsd.shape[1])
        steps = np.repeat(self.scales_hsg[:, slots].astype(np.float64), KV_GROUP, axis=-1)
        off = np.abs(self.codes_hsd[:, slots] - expected_hsd / steps).max()
        return float(off) if np.isfinite(off) else float("inf")

    def scales_off(self, expected_hsd: Doubles, first: int) -> float:
        """The largest relative error of a scale."""
        kv_heads, num_rows, d = expected_hsd.shape
        exact = np.abs(expected_hsd.reshape(kv_heads, num_rows, d // KV_GROUP, KV_GROUP)).max(axis=-1) / 127
        off = np.abs(self.scales_hsg[:, first : first + num_rows] / exact - 1).max()
        return float(off) if np.isfinite(off) else float("inf")


@dataclass(frozen=True)
class _Rows:
    """Normed and rotated queries [m, heads, d] and keys, and values, [kv_heads, m, d]."""

    q_mhd: Doubles
    k_hsd: Doubles
    v_hsd: Doubles


def _rows_float64(qkv: Doubles, norms: NDArray[np.float32], heads: HeadShape, cos: Doubles, sin: Doubles) -> _Rows:
    m, d = len(qkv), heads.head_dim

    def turned(x: Doubles, weight: NDArray[np.float32]) -> Doubles:
        x = weight * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + heads.norm_eps)
        a, b = x[..., : d // 2], x[..., d // 2 :]
        c, s = cos[:, None], sin[:, None]
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    q = turned(qkv[:, : heads.k_column].reshape(m, -1, d), norms[0])
    k = turned(qkv[:, heads.k_column : heads.v_column].reshape(m, -1, d), norms[1])
    v = qkv[:, heads.v_column :].reshape(m, -1, d)
    return _Rows(q, k.transpose(1, 0, 2), v.transpose(1, 0, 2))


def _attention_float64(q_mhd: Doubles, k_hsd: Doubles, v_hsd: Doubles, heads: HeadShape, first: int) -> Doubles:
    """Rows [m, heads * d] of queries that see slots up to `first` and their own."""
    m, d = len(q_mhd), heads.head_dim
    out = np.empty((m, heads.num_heads, d))
    for row in range(m):
        for head in range(heads.num_heads):
            seen, kv_head = first + row + 1, head // heads.queries_per_kv
            scores = k_hsd[kv_head, :seen] @ q_mhd[row, head] * d**-0.5
            p = np.exp(scores - scores.max())
            out[row, head] = p @ v_hsd[kv_head, :seen] / p.sum()
    return out.reshape(m, -1)
