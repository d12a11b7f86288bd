"""Query and key norm, rotation and the write into the cache against float64; slots that are not written stay poison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import Array, HeadShape, KvLayer
from kestrel_cuda.quant.kv_rows import KV_GROUP, quantize_kv
from tests.backends.arrays import (
    Doubles,
    Floats,
    assert_poison_outside,
    assert_same_bits,
    normal,
    poison,
    poisoned,
    rng,
    sequence_state,
)
from tests.compare import assert_close

EPS = 1e-6
HEAD_DIMS = [16, 32, 64, 128]
CACHES = [pytest.param(np.float16, id="f16"), pytest.param(np.float32, id="f32"), pytest.param(np.int8, id="q8")]


@dataclass(frozen=True)
class Case:
    """Rows of a joint projection; gaps between the members are poison, as nothing may read them."""

    heads: HeadShape
    qkv_mn: Floats
    q_norm_d: Floats
    k_norm_d: Floats

    def part(self, column: int, num_heads: int) -> Floats:
        d = self.heads.head_dim
        return self.qkv_mn[:, column : column + num_heads * d].reshape(len(self.qkv_mn), num_heads, d)


def case(num_rows: int, head_dim: int, num_heads: int = 4, num_kv_heads: int = 2, gap: int = 0) -> Case:
    random = rng(num_rows, head_dim, num_heads, gap)
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    k_column = q_size + gap
    v_column = k_column + kv_size + gap
    qkv = poison((num_rows, v_column + kv_size + gap))
    for column, size in ((0, q_size), (k_column, kv_size), (v_column, kv_size)):
        qkv[:, column : column + size] = normal(random, num_rows, size, scale=2)
    heads = HeadShape(num_heads, num_kv_heads, head_dim, k_column, v_column, EPS)
    return Case(heads, qkv, 1 + normal(random, head_dim, scale=0.3), 1 + normal(random, head_dim, scale=0.3))


@dataclass(frozen=True)
class Stored:
    """Queries [m, h, d] and the whole caches [h, s, d], with the scales [h, s, g] of int8 ones."""

    q_mhd: Floats
    k_hsd: NDArray[Any]
    v_hsd: NDArray[Any]
    k_scales_hsg: NDArray[Any] | None = None
    v_scales_hsg: NDArray[Any] | None = None

    @property
    def caches(self) -> dict[str, NDArray[Any]]:
        arrays = {"keys": self.k_hsd, "values": self.v_hsd}
        scales = {"key scales": self.k_scales_hsg, "value scales": self.v_scales_hsg}
        return arrays | {name: array for name, array in scales.items() if array is not None}


def rope_store(backend: Backend, given: Case, position: int, ctx: int, dtype: DTypeLike) -> Stored:
    """Runs the step over poisoned outputs and checks that only this run's rows and slots were written."""
    m, heads = len(given.qkv_mn), given.heads
    state = sequence_state(backend, ctx, position, head_dim=heads.head_dim)
    cache_shape = (heads.num_kv_heads, ctx, heads.head_dim)
    caches = [poisoned(backend, cache_shape, dtype) for _ in range(2)]
    if np.dtype(dtype) == np.int8:
        scale_shape = (*cache_shape[:2], heads.head_dim // KV_GROUP)
        caches += [poisoned(backend, scale_shape, np.float16) for _ in range(2)]
    kv = KvLayer(*caches)
    q: Array = poisoned(backend, (m + 2, heads.num_heads, heads.head_dim))
    backend.rope_store(
        backend.to_device(given.qkv_mn.copy()),
        backend.to_device(given.q_norm_d.copy()),
        backend.to_device(given.k_norm_d.copy()),
        heads,
        state,
        kv,
        q,
        m,
    )
    q_mhd = backend.to_host(q)
    assert_poison_outside(q_mhd, (slice(m),), "queries")
    stored = Stored(q_mhd[:m], *(backend.to_host(cache) for cache in caches))
    for name, cache in stored.caches.items():
        assert_poison_outside(cache, (slice(None), slice(position, position + m)), name)
    assert backend.to_host(state.position)[0] == position, "the position moves with the choice, not here"
    return stored


def rotated(x_mhd: Floats, weight_d: Floats, position: int, ctx: int) -> Doubles:
    """Normed and rotated in float64, with the table that `sequence_state` makes."""
    num_rows, _, d = x_mhd.shape
    angles = rng(ctx, d).uniform(-np.pi, np.pi, (ctx, d // 2))[position : position + num_rows, None]
    cos, sin = (f(angles).astype(np.float32).astype(np.float64) for f in (np.cos, np.sin))
    wide = x_mhd.astype(np.float64)
    normed = weight_d * wide / np.sqrt(np.square(wide).mean(axis=-1, keepdims=True) + np.float32(EPS))
    first, second = normed[..., : d // 2], normed[..., d // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def assert_stored(given: Case, got: Stored, position: int, ctx: int) -> None:
    m, heads = len(given.qkv_mn), given.heads
    slots = slice(position, position + m)
    q = rotated(given.part(0, heads.num_heads), given.q_norm_d, position, ctx)
    k = rotated(given.part(heads.k_column, heads.num_kv_heads), given.k_norm_d, position, ctx).transpose(1, 0, 2)
    v = given.part(heads.v_column, heads.num_kv_heads).transpose(1, 0, 2)
    assert_close(got.q_mhd, q, max_nmse=1e-13, max_abs=1e-5, what="queries")
    if got.k_scales_hsg is not None:
        assert_quantized(got.k_hsd[:, slots], got.k_scales_hsg[:, slots], k)
        v_codes, v_scales = quantize_kv(v)
        assert_same_bits(got.v_hsd[:, slots], v_codes, "value codes")
        assert got.v_scales_hsg is not None
        assert_same_bits(got.v_scales_hsg[:, slots], v_scales, "value scales")
        return
    if got.k_hsd.dtype == np.float16:
        # Half a unit in the last place, and what float32 was off before.
        error = np.abs(got.k_hsd[:, slots].astype(np.float64) - k)
        assert (error <= np.abs(k) * 2.0**-11 + 2e-6).all()
    else:
        assert_close(got.k_hsd[:, slots], k, max_nmse=1e-13, max_abs=1e-5, what="keys")
    assert_same_bits(got.v_hsd[:, slots], np.ascontiguousarray(v.astype(got.v_hsd.dtype)), "values")


def assert_quantized(codes: NDArray[np.int8], scales: NDArray[np.float16], expected: Doubles) -> None:
    """Scales of groups of 32 within half a unit in the last place, codes the nearest of them; a tie may go either way,
    and float32 was off before."""
    groups = expected.reshape(*scales.shape, KV_GROUP)
    exact = np.abs(groups).max(axis=-1) / 127
    assert (np.abs(scales - exact) <= exact * 2.0**-11 * 1.001).all()
    off = np.abs(codes.reshape(groups.shape) - groups / scales[..., None].astype(np.float64))
    assert off.max() <= 0.501


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("num_rows", [1, 2, 9, 33])
def test_fused(backend: Backend, cpu_backend: Backend, num_rows: int, head_dim: int, dtype: DTypeLike) -> None:
    if dtype == np.int8 and head_dim % KV_GROUP:
        pytest.skip("no whole groups: refused when a checkpoint is opened")
    given, position, ctx = case(num_rows, head_dim), 5, 40
    got = rope_store(backend, given, position, ctx, dtype)
    assert_stored(given, got, position, ctx)
    if backend.name != "cpu":
        on_cpu = rope_store(cpu_backend, given, position, ctx, dtype)
        slots = slice(position, position + num_rows)
        assert_close(got.q_mhd, on_cpu.q_mhd, max_nmse=1e-9, what="queries against the CPU")
        if dtype == np.int8:
            off = np.abs(got.k_hsd[:, slots].astype(np.int16) - on_cpu.k_hsd[:, slots])
            assert off.max() <= 1
            assert np.count_nonzero(off) <= 1 + off.size // 1000, "but for ties"
        else:
            bound = 1e-5 if dtype == np.float16 else 1e-9
            assert_close(got.k_hsd[:, slots], on_cpu.k_hsd[:, slots], max_nmse=bound, what="keys against the CPU")
        for name in got.caches.keys() & {"values", "value scales"}:
            same = (stored.caches[name][:, slots] for stored in (got, on_cpu))
            assert_same_bits(*same, f"{name} against the CPU")


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("gap", [4, 12])
def test_unfused_columns(backend: Backend, gap: int, dtype: DTypeLike) -> None:
    given = case(7, 32, gap=gap)
    assert_stored(given, rope_store(backend, given, 0, 7, dtype), 0, 7)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (2, 2), (8, 1), (6, 2), (15, 3), (32, 8)])
def test_head_counts(backend: Backend, num_heads: int, num_kv_heads: int) -> None:
    given = case(3, 64, num_heads, num_kv_heads)
    assert_stored(given, rope_store(backend, given, 2, 8, np.float32), 2, 8)


def test_the_last_slot_can_be_written(backend: Backend) -> None:
    given = case(1, 128)
    assert_stored(given, rope_store(backend, given, 63, 64, np.float16), 63, 64)


def test_a_cache_of_halves_saturates(backend: Backend) -> None:
    given = case(2, 16)
    heads = given.heads
    extremes = np.array([1e5, -1e5, 65504, 65519, 65520, -65520, 3e38, -3e38], np.float32)
    given.qkv_mn[1, heads.v_column : heads.v_column + 8] = extremes
    loud = Case(heads, given.qkv_mn, given.q_norm_d, given.k_norm_d * np.float32(1e6))
    got = rope_store(backend, loud, 0, 4, np.float16)
    top = 65504.0
    assert got.v_hsd[0, 1, :8].tolist() == [top, -top, top, top, top, -top, top, -top]
    keys = rotated(loud.part(heads.k_column, 2), loud.k_norm_d, 0, 4).transpose(1, 0, 2)
    assert np.isfinite(got.k_hsd[:, :2]).all()
    beyond = np.abs(keys) > 66000
    assert beyond.any()
    assert (got.k_hsd[:, :2][beyond] == np.sign(keys[beyond]) * top).all()


def test_an_int8_cache_saturates_and_passes_on_what_is_no_number(backend: Backend) -> None:
    given = case(2, 64)
    column = given.heads.v_column
    given.qkv_mn[1, column : column + 4] = [1e5, -3e38, np.inf, 1000]
    given.qkv_mn[1, column + 40] = np.nan
    given.qkv_mn[0, column : column + 64] = 0
    given.qkv_mn[0, column + 1 : column + 3] = [3.7e-6, 1e-39]
    given.qkv_mn[0, column + 33] = 3.9e-6
    got = rope_store(backend, given, 0, 2, np.int8)
    assert got.v_scales_hsg is not None
    assert got.v_hsd[0, 1, :4].tolist() == [127, -127, 127, 2]
    assert got.v_scales_hsg[0, 1, 0] == 515.5
    assert np.isnan(got.v_scales_hsg[0, 1, 1])
    assert got.v_scales_hsg[0, 0].tolist() == [0, 2.0**-24], "below half the least scale, and above"
    assert got.v_hsd[0, 0, [1, 2, 33]].tolist() == [0, 0, 65]


def test_a_cache_of_floats_does_not_saturate(backend: Backend) -> None:
    given = case(1, 16)
    given.qkv_mn[0, given.heads.v_column] = 3e38
    got = rope_store(backend, given, 0, 2, np.float32)
    assert got.v_hsd[0, 0, 0] == np.float32(3e38)


@pytest.mark.parametrize("dtype", CACHES)
def test_a_row_has_the_same_bits_in_every_batch(backend: Backend, dtype: DTypeLike) -> None:
    given, ctx = case(20, 64), 20
    together = rope_store(backend, given, 0, ctx, dtype)
    for row in (0, 7, 19):
        one = Case(given.heads, given.qkv_mn[row : row + 1], given.q_norm_d, given.k_norm_d)
        alone = rope_store(backend, one, row, ctx, dtype)
        assert_same_bits(alone.q_mhd[0], together.q_mhd[row], "queries")
        for name, cache in alone.caches.items():
            assert_same_bits(cache[:, row], together.caches[name][:, row], name)
