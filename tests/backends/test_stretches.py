"""Stretches of a layer for one row: the bits of the steps they stand for, called once, in a row and from a capture.

The steps are the methods of `ComposedSteps`. Linears and norms are taken from calls of more rows, whose kernels are
other ones. On the CPU every stretch is its steps; these tests are about the GPU, where it is one kernel that may start
before the one ahead of it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.attention_checks import cache_arrays
from kestrel_cuda.backends.base import Activation, Array, Backend, DeviceWeight, HeadShape, KvLayer
from kestrel_cuda.backends.composed import ComposedSteps
from kestrel_cuda.quant.grouped import GroupScheme, quantize_activations
from kestrel_cuda.quant.kv_rows import KV_GROUP, LARGEST_KV_SCALE, quantize_kv
from kestrel_cuda.quant.packed import slab_layout
from kestrel_cuda.weight_keys import LM_HEAD
from tests.backends.arrays import (
    Floats,
    HostActivation,
    HostWeight,
    assert_poison_outside,
    grouped_weight,
    normal,
    poison,
    poisoned,
    poisoned_activation,
    rng,
    sequence_state,
)

EPS = 1e-6
SCHEMES = {"int8": GroupScheme(8, 32), "int4": GroupScheme(4, 32), "g256": GroupScheme(8, 256)}
# Around the pieces of 128 and rounds of 16 pieces; groups of 256 are only used where they divide the inputs.
NUM_INPUTS = {
    "int8": (32, 96, 128, 160, 2048, 2080, 6144),
    "int4": (32, 96, 128, 160, 2048, 2080, 6144),
    "g256": (256, 768, 2048, 2304, 6144),
}
CASES = [pytest.param(kind, k, id=f"{kind}-{k}") for kind, sizes in NUM_INPUTS.items() for k in sizes]
# Around the padding to 4, sets of 16 columns and the blocks of 32 of the kernels for more rows.
NUM_OUTPUTS = (1, 3, 4, 15, 16, 18, 32, 33, 70, 129)
NUM_ROWS = (2, 5)
"""Row counts of the steps compared with: the kernel for few rows and the one for many."""

SHAPES = [(4, 2, 16), (6, 2, 32), (5, 1, 64), (16, 8, 128), (16, 1, 128), (3, 3, 16)]
"""(heads, kv heads, head_dim); heads of the last share a scale between kv heads, which no kernel does."""

ATTENTION_SHAPES = [
    pytest.param(*shape, dtype, id=f"{shape[0]}-{shape[1]}-{shape[2]}-{np.dtype(dtype).name}")
    for dtype in (np.float16, np.int8)
    for shape in SHAPES
    if dtype != np.int8 or shape[2] % KV_GROUP == 0
]

CONTEXTS = (1, 2, 63, 64, 255, 256, 257, 512, 513, 1100)
"""Around the subtiles of 64 and the splits of 256."""

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


def norm_linear_step(
    backend: Backend, num_rows: int, k: int, weight: DeviceWeight, norm_linear: Callable[..., None], h: Floats
) -> Step:
    n = weight.geometry.num_outputs
    device_h, norm = backend.to_device(h[:num_rows].copy()), backend.to_device(random_norm(k))
    scratch = poisoned_activation(backend, num_rows, k, quantized=True)
    out = poisoned(backend, (num_rows + 1, n + 3))

    def reset() -> None:
        poison_activation(backend, scratch)
        backend.write(out, poison(out.shape))

    def read() -> Outputs:
        host = backend.to_host(out)
        assert_poison_outside(host, (slice(num_rows), slice(n)), "output")
        return {"outputs": host[0, :n]}

    return Step(reset, lambda: norm_linear(device_h, norm, EPS, scratch, [(weight, 0)], out, num_rows), read)


def composed(backend: Backend, name: str) -> Callable[..., None]:
    """A stretch as its steps."""
    method = getattr(ComposedSteps, name)
    return lambda *arguments: method(backend, *arguments)


@pytest.mark.parametrize(("kind", "k"), CASES)
def test_norm_linear(backend: Backend, kind: str, k: int) -> None:
    h = random_rows(max(NUM_ROWS), k)
    for n in NUM_OUTPUTS:
        weight = random_weight(kind, n, k).on(backend)
        stretch = norm_linear_step(backend, 1, k, weight, backend.norm_linear, h)
        for m in NUM_ROWS:
            steps = norm_linear_step(backend, m, k, weight, composed(backend, "norm_linear"), h)
            assert_same_runs(backend, stretch, steps, f"{n} outputs, as the first of {m} rows")


def norm_gate_up_step(
    backend: Backend, num_rows: int, k: int, weight: DeviceWeight, norm_gate_up: Callable[..., None], h: Floats
) -> Step:
    half = weight.geometry.num_outputs // 2
    device_h, norm = backend.to_device(h[:num_rows].copy()), backend.to_device(random_norm(k))
    scratch = poisoned_activation(backend, num_rows, k, quantized=True)
    gate_up = poisoned(backend, (num_rows, 2 * half))
    out = poisoned_activation(backend, num_rows + 1, half, quantized=True)

    def reset() -> None:
        for activation in (scratch, out):
            poison_activation(backend, activation)
        backend.write(gate_up, poison(gate_up.shape))

    def submit() -> None:
        norm_gate_up(device_h, norm, EPS, scratch, [(weight, 0)], gate_up, half, out, num_rows)

    return Step(reset, submit, lambda: first_codes(backend, out, num_rows))


@pytest.mark.parametrize(
    ("kind", "k", "half"),
    [
        pytest.param(kind, k, half, id=f"{kind}-{k}-{half}")
        for kind, sizes in NUM_INPUTS.items()
        for k in sizes
        for half in (32, 96, 6144)
        if half < 6144 or k <= 256
    ],
)
def test_norm_gate_up(backend: Backend, kind: str, k: int, half: int) -> None:
    h, weight = random_rows(max(NUM_ROWS), k), random_weight(kind, 2 * half, k).on(backend)
    stretch = norm_gate_up_step(backend, 1, k, weight, backend.norm_gate_up, h)
    for m in NUM_ROWS:
        steps = norm_gate_up_step(backend, m, k, weight, composed(backend, "norm_gate_up"), h)
        assert_same_runs(backend, stretch, steps, f"as the first of {m} rows")


def linear_step(
    backend: Backend, num_rows: int, x_mk: Floats, weight: DeviceWeight, residual: Floats, column: int, add: bool
) -> Step:
    n = weight.geometry.num_outputs
    x = HostActivation(x_mk.shape[1], None, *quantize_activations(x_mk[:num_rows])).on(backend)
    target = (slice(num_rows), slice(column, column + n))
    before = poison((num_rows + 1, column + n + 3))
    if add:
        before[target] = residual[:num_rows]
    out = backend.to_device(before.copy())

    def read() -> Outputs:
        host = backend.to_host(out)
        assert_poison_outside(host, target, "output")
        return {"outputs": host[0, target[1]]}

    def submit() -> None:
        backend.linear(x, weight, out, num_rows, column=column, add=add)

    return Step(lambda: backend.write(out, before), submit, read)


def assert_linear(backend: Backend, kind: str, n: int, k: int) -> None:
    x, residual = normal(rng(14, k), max(NUM_ROWS), k), normal(rng(15, n), max(NUM_ROWS), n)
    weight = random_weight(kind, n, k).on(backend)
    for add, column in ((True, 0), (False, 0), (True, 4)):
        stretch = linear_step(backend, 1, x, weight, residual, column, add)
        for m in NUM_ROWS:
            what = f"{n} outputs {'added' if add else 'set'} at {column}, as the first of {m} rows"
            assert_same_runs(backend, stretch, linear_step(backend, m, x, weight, residual, column, add), what)


@pytest.mark.parametrize(("kind", "k"), CASES)
def test_linear_of_one_row(backend: Backend, kind: str, k: int) -> None:
    for n in NUM_OUTPUTS:
        assert_linear(backend, kind, n, k)


@pytest.mark.parametrize(("kind", "k"), [("int8", 32), ("int8", 160), ("int4", 160), ("g256", 256)])
@pytest.mark.parametrize("more", [4, 20, 36])
def test_linear_of_very_many_outputs(backend: Backend, kind: str, k: int, more: int) -> None:
    """More than 8 sets of 16 columns for each multiprocessor: blocks of four sets."""
    assert_linear(backend, kind, 16 * 8 * getattr(backend, "num_multiprocessors", 8) + more, k)


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


def rope_attend_step(
    backend: Backend, given: AttentionCase, rope_attend: Callable[..., None], num_slots: int | None = None
) -> Step:
    """`num_slots` may be more than are filled, as in a capture that serves several positions."""
    heads, ctx, d = given.heads, given.ctx, given.heads.head_dim
    qkv, q_norm, k_norm = (backend.to_device(a.copy()) for a in (given.qkv_mn, given.q_norm_d, given.k_norm_d))
    kv = given.cache_on(backend)
    state = sequence_state(backend, ctx, given.position, head_dim=d)
    q = poisoned(backend, (2, heads.num_heads, d))
    out = poisoned_activation(backend, 2, heads.num_heads * d, quantized=True)
    slots = given.position + 1 if num_slots is None else num_slots

    def reset() -> None:
        given.reset(backend, kv)
        backend.write(q, poison(q.shape))
        poison_activation(backend, out)
        poison_scratch(backend)

    def read() -> Outputs:
        assert_counts_are_zero(backend)
        caches = given.read(backend, kv)
        for name, cache in caches.items():
            assert_poison_outside(cache, (slice(None), slice(given.position + 1)), f"{name} beyond the last")
        return caches | first_codes(backend, out, 1)

    def submit() -> None:
        rope_attend(qkv, q_norm, k_norm, heads, state, kv, q, out, 1, slots)

    return Step(reset, submit, read)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "d", "dtype"), ATTENTION_SHAPES)
@pytest.mark.parametrize("num_slots", CONTEXTS)
def test_rope_attend(
    backend: Backend, num_heads: int, num_kv_heads: int, d: int, dtype: DTypeLike, num_slots: int
) -> None:
    ctx = num_slots + 600
    given = attention_case(num_heads, num_kv_heads, d, num_slots - 1, ctx, gap=4, dtype=dtype)
    backend.reserve_attention(given.heads, 1, ctx)
    steps = rope_attend_step(backend, given, composed(backend, "rope_attend"))
    assert_same_runs(backend, rope_attend_step(backend, given, backend.rope_attend), steps, "attention")
    if backend.name == "cuda":
        for more in (255, 600):
            ahead = rope_attend_step(backend, given, backend.rope_attend, num_slots + more)
            assert_same_runs(backend, ahead, steps, f"attention told of {more} slots more")


@pytest.mark.parametrize("dtype", [np.float16, np.int8])
def test_rope_attend_saturates_what_a_half_cannot_hold(backend: Backend, dtype: DTypeLike) -> None:
    given = attention_case(4, 2, 32, 5, 8, dtype=dtype)
    given.qkv_mn[0, given.heads.v_column :][:4] = [1e5, -1e5, 65520, -3e38]
    given.k_norm_d[:] *= 1e6
    backend.reserve_attention(given.heads, 1, 8)
    stretch, steps = (
        rope_attend_step(backend, given, f) for f in (backend.rope_attend, composed(backend, "rope_attend"))
    )
    for step in (stretch, steps):
        step.reset()
        step.submit()
    expected = steps.read()
    if dtype == np.int8:
        assert (expected["key scales"][:, 5] == LARGEST_KV_SCALE).all()
        assert (expected["value scales"][0, 5] == LARGEST_KV_SCALE).all()
    else:
        assert (np.abs(expected["keys"][:, 5]) == 65504).any()
    assert_same(stretch.read(), expected, "attention")


@pytest.mark.parametrize("dtype", [np.float16, np.int8])
def test_attention_follows_the_position(backend: Backend, dtype: DTypeLike) -> None:
    """Told of one number of slots, it serves every position below, each reading what those before it wrote."""
    ctx, num_steps = 600, 8
    given = attention_case(8, 4, 64, 252, ctx, dtype=dtype)
    backend.reserve_attention(given.heads, 1, ctx)
    results = []
    for rope_attend in (backend.rope_attend, composed(backend, "rope_attend")):
        heads = given.heads
        qkv, q_norm, k_norm = (backend.to_device(a.copy()) for a in (given.qkv_mn, given.q_norm_d, given.k_norm_d))
        kv = given.cache_on(backend)
        state = sequence_state(backend, ctx, given.position, head_dim=64)
        q, out = poisoned(backend, (1, 8, 64)), poisoned_activation(backend, 1, 512, quantized=True)
        found = []
        for number in range(num_steps):
            # The CPU wants the number of slots itself.
            slots = 512 if backend.name == "cuda" else given.position + number + 1
            backend.write(qkv, np.roll(given.qkv_mn, number, axis=1))
            rope_attend(qkv, q_norm, k_norm, heads, state, kv, q, out, 1, slots)
            found.append(first_codes(backend, out, 1))
            backend.advance(state, 1)
            backend.synchronize()
        assert_counts_are_zero(backend)
        found.append(given.read(backend, kv))
        results.append(found)
    for number, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert_same(actual, expected, f"step {number}")


@dataclass(frozen=True)
class Block:
    """The matrices, norms and cache of one small decoder layer on the device."""

    qkv: DeviceWeight
    o: DeviceWeight
    gate_up: DeviceWeight
    down: DeviceWeight
    norms: tuple[Array, Array, Array, Array]
    kv: KvLayer


@pytest.mark.parametrize("dtype", [np.float16, np.int8])
def test_a_chain_of_stretches(backend: Backend, dtype: DTypeLike) -> None:
    """Layers in a row without a wait between kernels, against steps that are waited for one by one."""
    hidden, half, position, ctx, kind = 512, 1536, 300, 310, "int8"
    given = attention_case(8, 4, 64, position, ctx, dtype=dtype)
    heads, num_blocks = given.heads, 3
    q_size, width = 8 * 64, given.qkv_mn.shape[1]
    sizes = ((width, hidden), (hidden, q_size), (2 * half, hidden), (hidden, half))
    matrices = [random_weight(kind, n, k) for n, k in sizes]
    backend.reserve_attention(heads, 1, ctx)
    state = sequence_state(backend, ctx, position, head_dim=64)
    norms = [random_norm(hidden), random_norm(hidden), given.q_norm_d, given.k_norm_d]
    blocks = [
        Block(
            *(matrix.on(backend) for matrix in matrices),
            norms=tuple(backend.to_device(norm.copy()) for norm in norms),  # type: ignore[arg-type]
            kv=given.cache_on(backend),
        )
        for _ in range(num_blocks)
    ]
    first_h = random_rows(1, hidden)
    h, qkv, gate_up = backend.to_device(first_h), poisoned(backend, (1, width)), poisoned(backend, (1, 2 * half))
    q = poisoned(backend, (1, 8, 64))
    normed, attended, mlp = (backend.activation(1, k, True) for k in (hidden, q_size, half))

    def submit(block: Block, stretches: Any, done: Callable[[], None]) -> None:
        input_k, post_k, q_d, k_d = block.norms
        stretches.norm_linear(h, input_k, EPS, normed, [(block.qkv, 0)], qkv, 1)
        done()
        stretches.rope_attend(qkv, q_d, k_d, heads, state, block.kv, q, attended, 1, position + 1)
        done()
        backend.linear(attended, block.o, h, 1, add=True)
        done()
        stretches.norm_gate_up(h, post_k, EPS, normed, [(block.gate_up, 0)], gate_up, half, mlp, 1)
        done()
        backend.linear(mlp, block.down, h, 1, add=True)
        done()

    class Steps:
        norm_linear = staticmethod(composed(backend, "norm_linear"))
        rope_attend = staticmethod(composed(backend, "rope_attend"))
        norm_gate_up = staticmethod(composed(backend, "norm_gate_up"))

    def reset() -> None:
        backend.write(h, first_h)
        for block in blocks:
            given.reset(backend, block.kv)
        for array in (qkv, gate_up, q):
            backend.write(array, poison(array.shape))
        for activation in (normed, attended, mlp):
            poison_activation(backend, activation)
        poison_scratch(backend)

    def read() -> Outputs:
        assert_counts_are_zero(backend)
        caches = {}
        for number, block in enumerate(blocks):
            for name, cache in given.read(backend, block.kv).items():
                caches[f"{name} of layer {number}"] = cache
        return {"residual": backend.to_host(h)} | caches

    def chain() -> None:
        for block in blocks:
            submit(block, backend, lambda: None)

    reset()
    for _ in range(2):
        for block in blocks:
            submit(block, Steps, backend.synchronize)
    expected = read()
    assert np.isfinite(expected["residual"]).all()
    for number in range(20 if backend.name == "cuda" else 1):
        reset()
        chain()
        chain()
        assert_same(read(), expected, f"chain {number}")
    replay = backend.capture(chain)
    for number in range(20 if backend.name == "cuda" else 1):
        reset()
        replay()
        replay()
        assert_same(read(), expected, f"replay {number}")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_that_have_just_arrived(backend: Backend, kind: str) -> None:
    """A kernel that asks for its weights before its predecessor is done still gets those uploaded last."""
    n, k, num_uploads = 2048, 2048, 24
    pair = [random_weight(kind, n, k) for _ in range(2)]
    other = np.random.default_rng(17).permutation(n // 4)
    layout = slab_layout(0, [(LM_HEAD, pair[0].geometry)])
    hosts = [backend.host_slab(layout) for _ in pair]
    hosts[0][:] = pair[0].slab
    # The same scales, and the codes of other columns: nothing of one upload passes for the other's.
    codes_bytes = layout.entries[0].geometry.codes_bytes
    codes = pair[1].slab[:codes_bytes].reshape(-1, n // 4, 16)
    hosts[1][:] = pair[1].slab
    hosts[1][:codes_bytes] = codes[:, other].reshape(-1)
    slab = backend.allocate_slab(layout)
    weight = slab.weights[LM_HEAD.projection]
    h, norm = backend.to_device(random_rows(1, k)), backend.to_device(random_norm(k))
    scratch = backend.activation(1, k, True)
    outs = [poisoned(backend, (1, n)) for _ in range(num_uploads)]
    added = poisoned(backend, (1, n))

    expected = []
    for host in hosts:
        backend.upload(slab, host)
        backend.wait_upload(slab)
        backend.synchronize()
        composed(backend, "norm_linear")(h, norm, EPS, scratch, [(weight, 0)], added, 1)
        expected.append({"outputs": backend.to_host(added)})
        backend.release(slab)
    assert (expected[0]["outputs"] != expected[1]["outputs"]).mean() > 0.9

    for number, out in enumerate(outs):
        backend.upload(slab, hosts[number % 2])
        backend.wait_upload(slab)
        backend.norm_linear(h, norm, EPS, scratch, [(weight, 0)], out, 1)
        backend.linear(scratch, weight, added, 1, add=True)
        backend.release(slab)
    for number, out in enumerate(outs):
        assert_same({"outputs": backend.to_host(out)}, expected[number % 2], f"upload {number}")
    backend.free_slab(slab)
