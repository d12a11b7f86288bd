"""Stretches of a layer against the same steps one by one, to the bit. Knows no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from kestrel_cuda.attention_checks import CONTEXTS, cache_arrays, filled_cache, heads_for
from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.composed import ComposedSteps
from kestrel_cuda.backends.operands import Activation, HeadShape
from kestrel_cuda.config import KvDtype, Quant
from kestrel_cuda.step_checks import Check, pack, poison, quantized_out, sequence_at
from kestrel_cuda.weight_keys import Projection


def stretch_checks(backend: Backend) -> Iterator[Check]:
    """Run every stretch's check, one after the other."""
    rng = np.random.default_rng(8)
    for quant in (Quant.Q8_0, Quant.Q4_0, Quant.G256):
        yield _check_linear(backend, rng, quant)
    yield _check_attention(backend, rng)


def _check_linear(backend: Backend, rng: np.random.Generator, quant: Quant) -> Check:
    """The contract: one row through a stretch has the bits of its steps one by one."""
    differing = 0
    cases = ((64, 256), (192, 2048), (640, 1536))
    for n, k in cases:
        case = pack(backend, rng.standard_normal((n, k), dtype=np.float32), quant)
        parts = [(case.slab.weights[Projection.LM_HEAD], 0)]
        h = backend.to_device(rng.standard_normal((1, k), dtype=np.float32) * 3)
        weight = backend.to_device(rng.standard_normal(k, dtype=np.float32))
        scratch, gate_up = quantized_out(backend, 1, k), poison(backend, (1, n))
        found = []
        for norm_linear in (backend.norm_linear, partial(ComposedSteps.norm_linear, backend)):  # type: ignore[arg-type]
            out = poison(backend, (1, n))
            norm_linear(h, weight, 1e-6, scratch, parts, out, 1)
            found.append(backend.to_host(out).tobytes())
        differing += found[0] != found[1]
        joined, separate = quantized_out(backend, 1, n // 2), quantized_out(backend, 1, n // 2)
        backend.norm_gate_up(h, weight, 1e-6, scratch, parts, gate_up, n // 2, joined, 1)
        ComposedSteps.norm_linear(backend, h, weight, 1e-6, scratch, parts, gate_up, 1)  # type: ignore[arg-type]
        backend.silu_mul(gate_up, n // 2, separate, 1)
        differing += _row_bits(backend, joined) != _row_bits(backend, separate)
        backend.free_slab(case.slab)
    detail = f"{differing} of {2 * len(cases)} stretches differ from their steps"
    return Check(f"norm, linear and silu in one, {quant}", differing == 0, detail)


def _row_bits(backend: Backend, out: Activation) -> tuple[bytes, bytes]:
    return backend.to_host(out.codes_mk).tobytes(), backend.to_host(out.scales_mg).tobytes()


def _check_attention(backend: Backend, rng: np.random.Generator) -> Check:
    """The contract for attention: one row in one stretch has the bits of its steps."""
    differing, num_shapes = 0, 0
    for dtype in (KvDtype.F16, KvDtype.Q8):
        for num_heads, num_kv_heads, d in heads_for(dtype):
            size = num_heads * d
            heads = HeadShape(num_heads, num_kv_heads, d, size, size + num_kv_heads * d, 1e-6)
            for num_slots in CONTEXTS:
                state = sequence_at(backend, num_slots, num_slots - 1, d // 2, rng)
                qkv = backend.to_device(rng.standard_normal((1, size + 2 * num_kv_heads * d), dtype=np.float32))
                q_norm, k_norm = (backend.to_device(rng.uniform(0.5, 1.5, d).astype(np.float32)) for _ in range(2))
                backend.reserve_attention(heads, 1, num_slots)
                found, seed = [], int(rng.integers(1 << 31))
                for rope_attend in (backend.rope_attend, partial(ComposedSteps.rope_attend, backend)):  # type: ignore[arg-type]
                    entries = np.random.default_rng(seed)
                    kv = filled_cache(backend, entries, dtype, (num_kv_heads, num_slots, d), num_slots - 1)
                    q, out = backend.zeros((1, num_heads, d), np.float32), quantized_out(backend, 1, size)
                    rope_attend(qkv, q_norm, k_norm, heads, state, kv, q, out, 1, num_slots)
                    caches = tuple(backend.to_host(cache).tobytes() for cache in cache_arrays(kv))
                    found.append((_row_bits(backend, out), caches))
                differing += found[0] != found[1]
                num_shapes += 1
    detail = f"{differing} of {num_shapes} shapes differ from their steps"
    return Check("rotation and attention in one", differing == 0, detail)
