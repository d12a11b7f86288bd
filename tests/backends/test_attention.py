"""Causal attention against float64, later cache slots poisoned; on the GPU, a query's bits for every M."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import Activation, Array, HeadShape, KvLayer, SequenceState
from kestrel_cuda.errors import DeviceError
from kestrel_cuda.quant.grouped import quantize_activations
from kestrel_cuda.quant.kv_rows import dequantize_kv, quantize_kv
from tests.backends.arrays import (
    Doubles,
    Floats,
    assert_same_bits,
    normal,
    poison,
    poisoned,
    poisoned_activation,
    read_codes,
    read_values,
    rng,
    sequence_state,
)
from tests.compare import assert_close

F16, F32, Q8 = np.float16, np.float32, np.int8
"""Kinds of cache by the dtype of what they hold; int8 codes have float16 scales beside them."""

NUM_QUERIES = [1, 2, 7, 8, 9, 33, 100]
# Around the subtiles of 64 and the splits of 256.
NUM_SLOTS = [
    1,
    2,
    3,
    31,
    63,
    64,
    65,
    127,
    128,
    129,
    255,
    256,
    257,
    300,
    320,
    511,
    512,
    513,
    768,
    1000,
    1024,
    1025,
    1100,
]
# (head_dim, queries a kv head, kv heads, cache)
SHAPES = [
    (16, 1, 3, F32), (16, 4, 2, F16), (32, 2, 2, F32), (32, 5, 1, F16), (64, 3, 2, F16), (64, 8, 1, F32),
    (128, 1, 2, F16), (128, 2, 2, F32), (128, 4, 1, F32), (128, 8, 1, F16),
    (32, 3, 2, Q8), (64, 2, 2, Q8), (128, 2, 3, Q8), (128, 7, 1, Q8),
]  # fmt: skip
# The most queries a kv head that the kernels take.
LARGEST = [(16, 16, 2, F16), (64, 16, 1, F16), (128, 16, 1, F16), (128, 16, 1, F32), (32, 16, 1, Q8), (128, 16, 1, Q8)]
IDS, LARGEST_IDS = (
    [f"d{d}-{group}x{kv_heads}-{dtype.__name__}" for d, group, kv_heads, dtype in shapes]
    for shapes in (SHAPES, LARGEST)
)

# Both sides read the same cache and, where its entries are float16, the same rounded queries. What is left there are
# weights rounded to float16: relative errors of up to 2^-11, whose mean square is below 8e-8.
MAX_NMSE = {F16: 1e-6, Q8: 1e-6, F32: 2e-12}
MAX_NMSE_BETWEEN_BACKENDS = {F16: 1e-5, Q8: 1e-5, F32: 1e-9}


@dataclass(frozen=True)
class Case:
    """Queries of every position, keys and values of every slot as they are multiplied, and what a cache holds of them:
    `stored` has (entries,) of both, or (codes, scales)."""

    heads: HeadShape
    q_thd: Floats
    k_hsd: NDArray[np.floating]
    v_hsd: NDArray[np.floating]
    stored: tuple[tuple[NDArray[Any], ...], tuple[NDArray[Any], ...]]

    @property
    def as_halves(self) -> Case:
        """The same over a float16 cache."""
        return replace(self, stored=((self.k_hsd,), (self.v_hsd,)))


def case(head_dim: int, group: int, kv_heads: int, dtype: DTypeLike, length: int, sharpness: float = 1.0) -> Case:
    random = rng(head_dim, group, kv_heads, length)
    num_heads = group * kv_heads
    heads = HeadShape(num_heads, kv_heads, head_dim, num_heads * head_dim, (num_heads + kv_heads) * head_dim, 1e-6)
    q = normal(random, length, num_heads, head_dim, scale=sharpness)
    k, v = (normal(random, kv_heads, length, head_dim) for _ in range(2))
    if np.dtype(dtype) == Q8:
        k_rows, v_rows = quantize_kv(k), quantize_kv(v)
        return Case(heads, q, dequantize_kv(*k_rows), dequantize_kv(*v_rows), (k_rows, v_rows))
    k, v = k.astype(dtype), v.astype(dtype)
    return Case(heads, q, k, v, ((k,), (v,)))


def expected_attention(given: Case, first: int, num_rows: int) -> Doubles:
    """Rows [m, heads * d] of queries first .. first + num_rows - 1, in float64; queries have the cache's precision."""
    heads, num_slots = given.heads, first + num_rows
    q = given.q_thd[first:num_slots].astype(given.k_hsd.dtype).astype(np.float64)
    group, d = heads.queries_per_kv, heads.head_dim
    out = np.empty((num_rows, heads.num_heads, d))
    visible = np.arange(num_slots) <= np.arange(first, num_slots)[:, None]
    for head in range(heads.num_heads):
        k, v = (cache[head // group, :num_slots].astype(np.float64) for cache in (given.k_hsd, given.v_hsd))
        scores = q[:, head] @ k.T / np.sqrt(d)
        scores = np.where(visible, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = p @ v / p.sum(axis=-1, keepdims=True)
    return out.reshape(num_rows, -1)


def reserve(backend: Backend, heads: HeadShape, max_rows: int, ctx: int) -> None:
    """Scratch for these sizes, full of poison: nothing may be read that this run did not write."""
    backend.reserve_attention(heads, max_rows, ctx)
    if backend.name == "cuda":
        scratch = backend.attention_scratch  # type: ignore[attr-defined]
        for array in (scratch.max_mhs, scratch.sum_mhs, scratch.out_mhsd, scratch.joined_mk):
            backend.write(array, poison(array.shape))


def cache_with_poison(backend: Backend, given: Case, num_slots: int, ctx: int, beyond: float) -> KvLayer:
    """The first slots of the case; what lies beyond them must not matter."""

    def padded(array: NDArray[Any]) -> Array:
        kv_heads, _, width = array.shape
        whole = np.full((kv_heads, ctx, width), 77 if array.dtype == Q8 else beyond, array.dtype)
        whole[:, :num_slots] = array[:, :num_slots]
        return backend.to_device(whole)

    (k, *k_scales), (v, *v_scales) = ([padded(array) for array in side] for side in given.stored)
    return KvLayer(k, v, *k_scales, *v_scales)


def attend(
    backend: Backend,
    given: Case,
    first: int,
    num_rows: int,
    *,
    ctx: int | None = None,
    beyond: float = np.nan,
    quantized: bool = False,
) -> tuple[Activation, int]:
    """The step over a cache of `ctx` slots; returns its output and the number of rows."""
    heads, num_slots = given.heads, first + num_rows
    ctx = num_slots + 5 if ctx is None else ctx
    reserve(backend, heads, num_rows, ctx)
    kv = cache_with_poison(backend, given, num_slots, ctx, beyond)
    q = backend.to_device(np.concatenate([given.q_thd[first:num_slots], poison((1, *given.q_thd.shape[1:]))]))
    out = poisoned_activation(backend, num_rows + 1, heads.num_heads * heads.head_dim, quantized)
    state = sequence_state(backend, ctx, first, head_dim=heads.head_dim)
    backend.attend(q, kv, heads, state, out, num_rows, num_slots)
    return out, num_rows


@pytest.mark.parametrize(("head_dim", "group", "kv_heads", "dtype"), SHAPES, ids=IDS)
def test_contexts_and_query_counts(
    backend: Backend, cpu_backend: Backend, head_dim: int, group: int, kv_heads: int, dtype: type[np.generic]
) -> None:
    given = case(head_dim, group, kv_heads, dtype, max(NUM_SLOTS))
    for number, num_slots in enumerate(NUM_SLOTS):
        # Every count meets every context over the shapes; each context meets a small and a large count.
        for m in {1, NUM_QUERIES[(number + head_dim // 16) % 7], NUM_QUERIES[(3 * number + group) % 7]}:
            if m > num_slots:
                continue
            first = num_slots - m
            actual = read_values(backend, *attend(backend, given, first, m))
            what = f"{m} queries over {num_slots} slots"
            assert_close(actual, expected_attention(given, first, m), max_nmse=MAX_NMSE[dtype], what=what)
            if backend.name != "cpu":
                on_cpu = read_values(cpu_backend, *attend(cpu_backend, given, first, m))
                bound = MAX_NMSE_BETWEEN_BACKENDS[dtype]
                assert_close(actual, on_cpu, max_nmse=bound, what=f"{what} against the CPU")


@pytest.mark.parametrize("dtype", [F16, F32, Q8])
@pytest.mark.parametrize("m", [1, 8, 9, 33])
@pytest.mark.parametrize("ctx", [300, 301, 700])
def test_slots_beyond_the_last_do_not_matter(backend: Backend, m: int, ctx: int, dtype: type[np.generic]) -> None:
    given, num_slots = case(64, 2, 3, dtype, 300), 300
    results = [
        read_values(backend, *attend(backend, given, num_slots - m, m, ctx=ctx, beyond=beyond))
        for beyond in (0.0, np.nan, np.inf, 60000.0)
    ]
    for other in results[1:]:
        assert_same_bits(other, results[0], "over another poison")
    assert_close(results[0], expected_attention(given, num_slots - m, m), max_nmse=MAX_NMSE[dtype])


@pytest.mark.parametrize("dtype", [F16, F32, Q8])
@pytest.mark.parametrize("m", [1, 8, 9, 100])
def test_sharp_attention(backend: Backend, m: int, dtype: type[np.generic]) -> None:
    """Scores up to about 60, so that a split's maximum moves and earlier splits nearly vanish."""
    given = case(128, 4, 2, dtype, 900, sharpness=15)
    actual = read_values(backend, *attend(backend, given, 900 - m, m))
    # A float32 dot of 680, and so a score of 60, is off by some 1e-5, and so is its exponential.
    assert_close(actual, expected_attention(given, 900 - m, m), max_nmse=1e-10 if dtype == F32 else MAX_NMSE[dtype])


@pytest.mark.parametrize("m", [1, 9])
@pytest.mark.parametrize("at", [0, 255, 256, 299])
def test_one_slot_that_takes_everything(backend: Backend, m: int, at: int) -> None:
    given = case(64, 2, 1, F16, 300)
    given.k_hsd[:] = 0
    given.q_thd[:] = 4
    given.k_hsd[:, at] = 16  # a score of 512: every other exponential is 0
    actual = read_values(backend, *attend(backend, given, 300 - m, m))
    sees = np.arange(300 - m, 300) >= at
    expected = np.tile(given.v_hsd[0, at].astype(np.float64), (m, 2))
    assert_close(actual[sees], expected[sees], max_nmse=1e-14)
    # Every weight is 0 or 1, so none is rounded.
    assert_close(actual, expected_attention(given, 300 - m, m), max_nmse=MAX_NMSE[F32])


@pytest.mark.parametrize("dtype", [F16, F32, Q8])
@pytest.mark.parametrize("m", [1, 20])
def test_equal_scores_give_the_mean(backend: Backend, m: int, dtype: type[np.generic]) -> None:
    given = case(32, 2, 2, dtype, 600)
    given.stored[0][0][:] = 0
    actual = read_values(backend, *attend(backend, given, 600 - m, m))
    mean = given.v_hsd.astype(np.float64).cumsum(axis=1) / np.arange(1, 601)[:, None]
    expected = np.repeat(mean[:, 600 - m :], 2, axis=0).transpose(1, 0, 2).reshape(m, -1)
    assert_close(actual, expected, max_nmse=1e-11)


@pytest.mark.parametrize("m", [1, 8, 9, 70])
@pytest.mark.parametrize(("head_dim", "group", "kv_heads"), [(128, 2, 2), (16, 3, 1), (32, 5, 3)])
def test_quantized_is_the_plain_result_quantized(
    backend: Backend, m: int, head_dim: int, group: int, kv_heads: int
) -> None:
    given = case(head_dim, group, kv_heads, F16, 280)
    codes, scales = read_codes(backend, *attend(backend, given, 280 - m, m, quantized=True))
    plain = read_values(backend, *attend(backend, given, 280 - m, m))
    expected_codes, expected_scales = quantize_activations(plain)
    assert (codes == expected_codes).all()
    assert_same_bits(scales, expected_scales, "scales")


@pytest.mark.parametrize(("head_dim", "group", "kv_heads"), [(32, 3, 2), (64, 2, 3), (128, 2, 2), (128, 16, 1)])
def test_an_int8_cache_gives_the_bits_of_its_entries_in_float16(
    backend: Backend, head_dim: int, group: int, kv_heads: int
) -> None:
    """From every kernel: one query, few and many, over whole and ragged splits."""
    given = case(head_dim, group, kv_heads, Q8, 1100, sharpness=3)
    for num_slots in NUM_SLOTS:
        for m in (1, 2, 8, 9, 33, 100):
            if m > num_slots:
                continue
            actual, expected = (
                read_values(backend, *attend(backend, one, num_slots - m, m, ctx=num_slots + num_slots % 3))
                for one in (given, given.as_halves)
            )
            assert_same_bits(actual, expected, f"{m} queries over {num_slots} slots")


@pytest.mark.parametrize("m", [1, 9])
def test_extreme_entries_of_an_int8_cache(backend: Backend, m: int) -> None:
    """Every code, with scales that are 0, subnormal, ordinary and the largest."""
    given = case(128, 2, 1, Q8, 300)
    codes = np.resize(np.arange(-127, 128, dtype=np.int8), (1, 300, 128))
    scales = np.resize(np.array([2.0**-24, 0, 3e-6, 1e-3, 0.07, 1, 515.5], np.float16), (1, 300, 4))
    k, v = given.stored[0], (codes, scales)
    extreme = replace(given, v_hsd=dequantize_kv(*v), stored=(k, v))
    actual, expected = (read_values(backend, *attend(backend, one, 300 - m, m)) for one in (extreme, extreme.as_halves))
    assert_same_bits(actual, expected)
    assert_close(actual, expected_attention(extreme, 300 - m, m), max_nmse=MAX_NMSE[Q8])


@pytest.mark.parametrize("m", [1, 8, 9])
@pytest.mark.parametrize("at", ["key", "value"])
def test_a_nan_scale_reaches_the_result(backend: Backend, m: int, at: str) -> None:
    given = case(64, 2, 1, Q8, 100)
    scales = given.stored[at == "value"][1]
    scales[0, 50, 1] = np.nan
    values = backend.to_host(attend(backend, given, 100 - m, m)[0].values_mk)[:m]
    spoiled = slice(None) if at == "key" else np.tile([False] * 32 + [True] * 32, 2)
    assert np.isnan(values[:, spoiled]).all()


@pytest.mark.cuda
@pytest.mark.parametrize("length", [1100])
@pytest.mark.parametrize(("head_dim", "group", "kv_heads", "dtype"), [*SHAPES, *LARGEST], ids=[*IDS, *LARGEST_IDS])
def test_a_query_has_the_same_bits_in_every_chunking(
    cuda_backend: Backend, head_dim: int, group: int, kv_heads: int, dtype: type[np.generic], length: int
) -> None:
    """One query at a time, and prefill in chunks that few-query (up to 8) and many-query kernels take, cut at any
    position."""
    given = case(head_dim, group, kv_heads, dtype, length, sharpness=3)
    heads, width = given.heads, group * kv_heads * head_dim
    reserve(cuda_backend, heads, length, length)
    kv = cache_with_poison(cuda_backend, given, length, length, np.nan)
    q = cuda_backend.to_device(given.q_thd)
    state = sequence_state(cuda_backend, length, 0, head_dim=head_dim)
    out = poisoned(cuda_backend, (length, width))

    alone = _in_chunks(cuda_backend, heads, q, kv, state, out, 1)
    assert np.isfinite(alone).all()
    for chunk in (2, 7, 8, 9, 33, 64, 100, 257, length):
        cuda_backend.write(out, poison((length, width)))
        together = _in_chunks(cuda_backend, heads, q, kv, state, out, chunk)
        assert_same_bits(together, alone, f"chunks of {chunk}")


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("head_dim", "group", "kv_heads", "length"),
    [
        (64, 1, 2, 1100), (64, 3, 2, 1100), (64, 12, 1, 1100), (64, 16, 1, 1100),
        (128, 1, 2, 1100), (128, 3, 1, 1100), (128, 4, 2, 5000), (128, 5, 1, 1100), (128, 7, 1, 1100),
        (128, 10, 1, 1100), (128, 16, 1, 1100),
    ],
)  # fmt: skip
def test_warpgroups_and_tiles_give_the_same_bits(
    cuda_backend: Backend, monkeypatch: pytest.MonkeyPatch, head_dim: int, group: int, kv_heads: int, length: int
) -> None:
    if not cuda_backend.has_warpgroup_mma:  # type: ignore[attr-defined]
        pytest.skip("this card has no warpgroup mma")
    given = case(head_dim, group, kv_heads, F16, length, sharpness=3)
    reserve(cuda_backend, given.heads, length, length)
    kv = cache_with_poison(cuda_backend, given, length, length, np.nan)
    q = cuda_backend.to_device(given.q_thd)
    state = sequence_state(cuda_backend, length, 0, head_dim=head_dim)
    out = poisoned(cuda_backend, (length, group * kv_heads * head_dim))
    for chunk in (9, 100, 257, length):
        by_warpgroups = _in_chunks(cuda_backend, given.heads, q, kv, state, out, chunk)
        cuda_backend.write(out, poison(out.shape))
        with monkeypatch.context() as tiles:
            tiles.setattr(type(cuda_backend), "has_warpgroup_mma", False)
            by_tiles = _in_chunks(cuda_backend, given.heads, q, kv, state, out, chunk)
        cuda_backend.write(out, poison(out.shape))
        assert np.isfinite(by_tiles).all()
        assert_same_bits(by_warpgroups, by_tiles, f"chunks of {chunk}")


def _in_chunks(
    backend: Backend, heads: HeadShape, q: Array, kv: KvLayer, state: SequenceState, out: Array, chunk: int
) -> Floats:
    """Every query, `chunk` at a time, over a cache that already holds what comes later."""
    length, width = out.shape
    for first in range(0, length, chunk):
        last = min(first + chunk, length)
        backend.write(state.position, np.array([first], np.int32))
        rows = Activation(width, out[first:last], None, None)
        backend.attend(q[first:last], kv, heads, state, rows, last - first, last)
    host: Floats = backend.to_host(out)
    return host


@pytest.mark.cuda
@pytest.mark.parametrize("group", [1, 2, 4, 16])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(16, F16), (32, F16), (64, F16), (128, F16), (32, Q8), (64, Q8), (128, Q8)]
)
def test_edges_of_the_many_query_tile(
    cuda_backend: Backend, head_dim: int, group: int, dtype: type[np.generic]
) -> None:
    """Query counts around tiles of 64 and 128 rows, from positions around subtiles and splits, in a cache that ends
    with the last of them: the bits that few-query kernels give, and float64."""
    starts = (0, 1, 50, 63, 64, 191, 255, 256, 300, 512)
    counts = (9, 31, 32, 33, 64, 65, 127, 128, 129)
    length = max(starts) + max(counts)
    given = case(head_dim, group, 2, dtype, length, sharpness=3)
    few = [read_values(cuda_backend, *attend(cuda_backend, given, i, min(8, length - i))) for i in range(0, length, 8)]
    alone, expected = np.concatenate(few), expected_attention(given, 0, length)
    for first in starts:
        for m in counts:
            rows, what = slice(first, first + m), f"{m} queries from position {first}"
            actual = read_values(cuda_backend, *attend(cuda_backend, given, first, m, ctx=first + m))
            assert_same_bits(actual, alone[rows], what)
            assert_close(actual, expected[rows], max_nmse=MAX_NMSE[dtype], what=what)


@pytest.mark.cuda
@pytest.mark.parametrize(("head_dim", "queries_per_kv"), [(96, 2), (256, 2), (8, 1), (128, 17)])
def test_heads_the_kernels_do_not_take_are_refused(cuda_backend: Backend, head_dim: int, queries_per_kv: int) -> None:
    with pytest.raises(DeviceError, match=rf"head_dim of {head_dim} and {queries_per_kv} query heads.*--backend cpu"):
        cuda_backend.check_heads(head_dim, queries_per_kv)
