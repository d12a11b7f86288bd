"""Rotation and attention of one row have the bits of the steps they stand for.

The steps are the methods of `ComposedSteps`. On the CPU every stretch is its steps; these tests are about the GPU,
where it is one kernel that may start before the one ahead of it is done.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import DTypeLike

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.quant.kv_rows import KV_GROUP, LARGEST_KV_SCALE
from tests.backends.arrays import (
    assert_poison_outside,
    poison,
    poisoned,
    poisoned_activation,
    sequence_state,
)
from tests.backends.stretch_steps import (
    AttentionCase,
    Outputs,
    Step,
    assert_counts_are_zero,
    assert_same,
    assert_same_runs,
    attention_case,
    composed,
    first_codes,
    poison_activation,
    poison_scratch,
)

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
