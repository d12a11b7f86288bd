"""A stretch of a layer for one row beside the steps it stands for: called once, in a row and from a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.attention_checks import cache_arrays
from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.composed import ComposedSteps
from kestrel_cuda.backends.operands import Activation, HeadShape, KvLayer
from kestrel_cuda.quant.grouped import GroupScheme
from kestrel_cuda.quant.kv_rows import KV_GROUP, quantize_kv
from tests.backends.arrays import (
    Floats,
    HostWeight,
    assert_poison_outside,
    grouped_weight,
    normal,
    poison,
    rng,
)

EPS = 1e-6
SCHEMES = {"int8": GroupScheme(8, 32), "int4": GroupScheme(4, 32), "g256": GroupScheme(8, 256)}
NUM_ROWS = (2, 5)
"""Row counts of the steps compared with: the kernel for few rows and the one for many."""

Outputs = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Step:
    """Something to submit, what to do before and what to look at after it."""

    reset: Callable[[], None]
    submit: Callable[[], None]
    read: Callable[[], Outputs]


def runs(backend: Backend, step: Step) -> Iterator[tuple[str, Outputs]]:
    """What the step leaves after one call, two in a row, and two replays of two captured calls."""

    def twice() -> None:
        step.submit()
        step.submit()

    step.reset()
    step.submit()
    yield "once", step.read()
    step.reset()
    twice()
    yield "twice in a row", step.read()
    replay = backend.capture(twice)
    step.reset()
    replay()
    replay()
    yield "replayed", step.read()


def assert_same(actual: Outputs, expected: Outputs, what: str) -> None:
    assert actual.keys() == expected.keys()
    for name, array in actual.items():
        assert (array.shape, array.dtype) == (expected[name].shape, expected[name].dtype), f"{what}: {name}"
        integers = np.dtype(f"u{array.dtype.itemsize}")
        differs = array.view(integers) != expected[name].view(integers)
        if differs.any():
            at = tuple(int(i) for i in np.argwhere(differs)[0])
            first = f"first at {at}: {array[at]!r} against {expected[name][at]!r}"
            raise AssertionError(f"{what}: {differs.sum()} of {differs.size} {name} differ, {first}")


def assert_same_runs(backend: Backend, stretch: Step, steps: Step, what: str) -> None:
    for (how, actual), (_, expected) in zip(runs(backend, stretch), runs(backend, steps), strict=True):
        for name, array in expected.items():
            if array.dtype == np.float32:
                assert np.isfinite(array).all(), f"{what}: {name} of the steps, {how}"
        assert_same(actual, expected, f"{what}, {how}")


def random_weight(kind: str, n: int, k: int) -> HostWeight:
    """Codes over the whole range and scales such that rows of size 1 give outputs of about that size."""
    random, scheme = rng(11, n, k), SCHEMES[kind]
    low, high = (-127, 127) if scheme.bits == 8 else (-8, 7)
    codes = random.integers(low, high, (n, k), np.int8, endpoint=True)
    scales = np.exp2(random.uniform(-1, 1, (n, k // scheme.group_size))) * (1.5 / high / np.sqrt(k))
    scales *= random.choice([-1, 1], scales.shape) if scheme.bits == 4 else 1
    return grouped_weight(codes, scales.astype(np.float16), scheme, k)


def random_rows(m: int, k: int) -> Floats:
    """Residual rows with a few loud channels."""
    h = normal(rng(12, k), max(NUM_ROWS), k, scale=2)[:m].copy()
    h[:, :: max(1, k // 5)] *= 30
    return h


def random_norm(k: int) -> Floats:
    return 1 + normal(rng(13, k), k, scale=0.3)


def poison_activation(backend: Backend, out: Activation) -> None:
    """Codes of 99 and scales of NaN."""
    assert out.codes_mk is not None
    assert out.scales_mg is not None
    backend.write(out.codes_mk, np.full(out.codes_mk.shape, 99, np.int8))
    backend.write(out.scales_mg, poison(out.scales_mg.shape))


def first_codes(backend: Backend, out: Activation, num_rows: int) -> Outputs:
    """The first row; rows below those written are untouched."""
    codes, scales = backend.to_host(out.codes_mk), backend.to_host(out.scales_mg)
    assert (codes[num_rows:] == 99).all(), "codes of rows below were written"
    assert_poison_outside(scales, (slice(num_rows),), "scales of rows below")
    return {"codes": codes[0], "scales": scales[0]}


def composed(backend: Backend, name: str) -> Callable[..., None]:
    """A stretch as its steps."""
    method = getattr(ComposedSteps, name)
    return lambda *arguments: method(backend, *arguments)


@dataclass(frozen=True)
class AttentionCase:
    """One row of a joint projection, poison between its members, and a cache of which `position` slots are filled."""

    heads: HeadShape
    qkv_mn: Floats
    q_norm_d: Floats
    k_norm_d: Floats
    caches: dict[str, NDArray[Any]]
    position: int

    @property
    def ctx(self) -> int:
        return self.caches["keys"].shape[1]

    def cache_on(self, backend: Backend) -> KvLayer:
        return KvLayer(*(backend.to_device(cache.copy()) for cache in self.caches.values()))

    def reset(self, backend: Backend, kv: KvLayer) -> None:
        for target, cache in zip(cache_arrays(kv), self.caches.values(), strict=True):
            backend.write(target, cache)

    def read(self, backend: Backend, kv: KvLayer) -> Outputs:
        return {name: backend.to_host(a) for name, a in zip(self.caches, cache_arrays(kv), strict=True)}


def attention_case(
    num_heads: int, num_kv_heads: int, d: int, position: int, ctx: int, gap: int = 0, dtype: DTypeLike = np.float16
) -> AttentionCase:
    random = rng(16, num_heads, d, position)
    q_size, kv_size = num_heads * d, num_kv_heads * d
    k_column = q_size + gap
    v_column = k_column + kv_size + gap
    qkv = poison((1, v_column + kv_size + gap))
    for column, size in ((0, q_size), (k_column, kv_size), (v_column, kv_size)):
        qkv[:, column : column + size] = normal(random, 1, size, scale=2)
    filled = normal(random, 2, num_kv_heads, position, d)
    caches = {}
    for name, rows in zip(("keys", "values"), filled, strict=True):
        caches[name] = poison((num_kv_heads, ctx, d), dtype)
        caches[name][:, :position] = quantize_kv(rows)[0] if np.dtype(dtype) == np.int8 else rows
    if np.dtype(dtype) == np.int8:
        for name, rows in zip(("key scales", "value scales"), filled, strict=True):
            caches[name] = poison((num_kv_heads, ctx, d // KV_GROUP), np.float16)
            caches[name][:, :position] = quantize_kv(rows)[1]
    norms = 1 + normal(random, 2, d, scale=0.3)
    heads = HeadShape(num_heads, num_kv_heads, d, k_column, v_column, EPS)
    return AttentionCase(heads, qkv, norms[0], norms[1], caches, position)


def poison_scratch(backend: Backend) -> None:
    """Nothing may be read of the attention's scratch that the same call did not write, but the counts of blocks."""
    if backend.name == "cuda":
        scratch = backend.attention_scratch  # type: ignore[attr-defined]
        for array in (scratch.max_mhs, scratch.sum_mhs, scratch.out_mhsd, scratch.joined_mk):
            backend.write(array, poison(array.shape))


def assert_counts_are_zero(backend: Backend) -> None:
    if backend.name == "cuda":
        assert not backend.to_host(backend.attention_scratch.arrived_h).any()  # type: ignore[attr-defined]
