"""Stretches in a row without a wait between their kernels give what steps that are waited for give.

The steps are the methods of `ComposedSteps`. On the CPU every stretch is its steps; these tests are about the GPU,
where it is one kernel that may start before the one ahead of it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import Array, DeviceWeight, KvLayer
from kestrel_cuda.quant.packed import slab_layout
from kestrel_cuda.weight_keys import LM_HEAD
from tests.backends.arrays import (
    poison,
    poisoned,
    sequence_state,
)
from tests.backends.stretch_steps import (
    EPS,
    Outputs,
    assert_counts_are_zero,
    assert_same,
    attention_case,
    composed,
    poison_activation,
    poison_scratch,
    random_norm,
    random_rows,
    random_weight,
)


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
