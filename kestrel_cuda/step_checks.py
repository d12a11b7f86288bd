"""Every step of a backend but attention against float64 arithmetic written out here. Knows no checkpoint.

Outputs are filled with NaN first, so an element that a kernel forgets fails the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.base import Backend, SourceMatrix
from kestrel_cuda.backends.operands import CHOSEN_SLOTS, Activation, SequenceState
from kestrel_cuda.checkpoint.tensor_file import widen
from kestrel_cuda.config import Quant
from kestrel_cuda.quant.grouped import GroupedWeight, quantize, quantize_activations, scheme_for
from kestrel_cuda.quant.packed import Element, entry_views, geometry_for, pack_grouped, slab_layout
from kestrel_cuda.weight_keys import LM_HEAD, LM_HEAD_LAYER, Projection

ROWS = (1, 2, 3, 5, 17, 64)
LINEAR_SHAPES = ((64, 32), (100, 96), (36, 300), (256, 2048), (516, 1056))
"""Outputs and inputs: whole and short groups, one and many pieces, a ragged last tile."""

EXACT_STEP = 1e-12
"""Largest normalized mean square error of a float32 step against float64."""

CODE_STEPS = 0.501
"""Largest distance of an int8 code from the float64 value it rounds, in its group's steps."""


@dataclass(frozen=True)
class Check:
    """One check: whether it held and what was seen."""

    name: str
    passed: bool
    detail: str
    skipped: bool = False


def nmse(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Mean square error over the mean square of the expected values, in float64; NaN and infinity never pass."""
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    if not np.isfinite(actual).all():
        return float("inf")
    return float(np.sum((actual - expected) ** 2) / max(np.sum(expected**2), 1e-30))


def step_checks(backend: Backend) -> Iterator[Check]:
    """Run every step's check, one after the other."""
    rng = np.random.default_rng(7)
    for quant in (Quant.Q8_0, Quant.Q4_0, Quant.G256):
        yield _check_packing(backend, rng, quant)
    for quant in Quant:
        yield _check_linear(backend, rng, quant)
    yield _check_row_independence(backend, rng)
    yield _check_embed(backend, rng)
    yield _check_norm(backend, rng)
    yield _check_silu_mul(backend, rng)
    yield _check_quantized_rows(backend, rng)
    yield _check_choice(backend, rng)


def judge(name: str, errors: list[float], limit: float) -> Check:
    worst = max(errors)
    return Check(name, worst <= limit, f"largest NMSE {worst:.1e} over {len(errors)} shapes, limit {limit:.0e}")


def poison(backend: Backend, shape: tuple[int, ...]) -> Any:
    """A float32 array of NaN."""
    return backend.to_device(np.full(shape, np.nan, np.float32))


@dataclass(frozen=True)
class PackedCase:
    """A packed matrix, the same by the NumPy definition (None where nothing is quantized), and its values."""

    slab: Any
    strip: GroupedWeight | None
    values_nk: NDArray[np.float64]


def pack(backend: Backend, weight_nk: NDArray[np.float32], quant: Quant) -> PackedCase:
    """One matrix packed by the backend, and the values it stands for."""
    n, k = weight_nk.shape
    scheme = scheme_for(quant, k)
    layout = slab_layout(LM_HEAD_LAYER, [(LM_HEAD, geometry_for(scheme, Element.F32, k, n))])
    slab = backend.allocate_slab(layout)
    packer = backend.packer()
    packer.pack(slab, layout.entries[0], [SourceMatrix("check", weight_nk)])
    packer.finish()
    packer.close()
    strip = None if scheme is None else quantize(weight_nk, scheme)
    if strip is None:
        return PackedCase(slab, None, weight_nk.astype(np.float64))
    scales = np.repeat(strip.scales_ng.astype(np.float64), strip.scheme.group_size, axis=1)
    return PackedCase(slab, strip, (strip.codes_nk * scales)[:, :k])


def _check_packing(backend: Backend, rng: np.random.Generator, quant: Quant) -> Check:
    wrong = 0
    for n, k in LINEAR_SHAPES:
        weight = _adversarial_weight(rng, n, k)
        case = pack(backend, weight, quant)
        entry = case.slab.layout.entries[0]
        host = np.zeros(case.slab.layout.num_bytes, np.uint8)
        codes_kn, scales_gn = entry_views(host, entry)
        assert case.strip is not None
        pack_grouped(case.strip, codes_kn, scales_gn, 0)  # type: ignore[arg-type]
        wrong += int(np.count_nonzero(host != backend.to_host(case.slab.raw)))
        backend.free_slab(case.slab)
    return Check(f"pack {quant}", wrong == 0, f"{wrong} bytes differ from the definition in NumPy")


def _adversarial_weight(rng: np.random.Generator, n: int, k: int) -> NDArray[np.float32]:
    """Values of few mantissa bits, so ties are common, with a zero group, a constant group and a subnormal one."""
    weight = rng.standard_normal((n, k), dtype=np.float32) * np.float32(0.1)
    weight = (weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    weight[0, :32] = 0
    weight[1 % n, :32] = -0.25
    weight[2 % n, :32] = 1e-39
    return weight


def _check_linear(backend: Backend, rng: np.random.Generator, quant: Quant) -> Check:
    errors = []
    for n, k in LINEAR_SHAPES:
        case = pack(backend, rng.standard_normal((n, k), dtype=np.float32), quant)
        for m in ROWS:
            x_mk = rng.standard_normal((m, k), dtype=np.float32)
            x = _fill(backend, x_mk, quantized=quant is not Quant.NONE)
            residual = rng.standard_normal((m, n), dtype=np.float32)
            for add in (False, True):
                out = backend.to_device(residual) if add else poison(backend, (m, n))
                backend.linear(x.device, case.slab.weights[Projection.LM_HEAD], out, m, add=add)
                expected = x.values_mk @ case.values_nk.T + (residual if add else 0)
                errors.append(nmse(backend.to_host(out), expected))
        backend.free_slab(case.slab)
    return judge(f"linear {quant}", errors, EXACT_STEP)


@dataclass(frozen=True)
class _Filled:
    device: Activation
    values_mk: NDArray[np.float64]


def _fill(backend: Backend, x_mk: NDArray[np.float32], quantized: bool) -> _Filled:
    """An activation written from the host, and the values it stands for."""
    m, k = x_mk.shape
    x = backend.activation(m, k, quantized)
    if x.values_mk is not None:
        backend.write(x.values_mk, x_mk)
        return _Filled(x, x_mk.astype(np.float64))
    codes, scales = quantize_activations(x_mk)
    backend.write(x.codes_mk, codes)
    backend.write(x.scales_mg, scales)
    return _Filled(x, (codes.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=1))[:, :k])


def _check_row_independence(backend: Backend, rng: np.random.Generator) -> Check:
    """The contract: a row's result has the same bits alone and among others (exact on a GPU, close on the CPU)."""
    n, k, differing = 516, 1056, 0
    for quant in Quant:
        case = pack(backend, rng.standard_normal((n, k), dtype=np.float32), quant)
        x_mk = rng.standard_normal((max(ROWS), k), dtype=np.float32)
        results = []
        for m in ROWS:
            out = poison(backend, (m, n))
            x = _fill(backend, x_mk[:m], quantized=quant is not Quant.NONE)
            backend.linear(x.device, case.slab.weights[Projection.LM_HEAD], out, m)
            results.append(backend.to_host(out))
        for result in results:
            same = np.array_equal(result.view(np.uint32), results[-1][: len(result)].view(np.uint32))
            close = backend.name == "cpu" and nmse(result, results[-1][: len(result)]) <= EXACT_STEP
            differing += not (same or close)
        backend.free_slab(case.slab)
    return Check("linear, rows alone and together", differing == 0, f"{differing} of {4 * len(ROWS)} batches differ")


def _check_norm(backend: Backend, rng: np.random.Generator) -> Check:
    errors = []
    for k in (32, 96, 2048):
        for m in ROWS:
            h = rng.standard_normal((m, k), dtype=np.float32) * 3
            weight = rng.standard_normal(k, dtype=np.float32)
            out = backend.activation(m, k, quantized=False)
            backend.write(out.values_mk, np.full((m, k), np.nan, np.float32))
            backend.norm(backend.to_device(h), backend.to_device(weight), 1e-6, out, m)
            wide = h.astype(np.float64)
            expected = weight * wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-6)
            errors.append(nmse(backend.to_host(out.values_mk), expected))
    return judge("RMSNorm", errors, EXACT_STEP)


def _check_silu_mul(backend: Backend, rng: np.random.Generator) -> Check:
    errors = []
    for k in (32, 96, 6144):
        for m in ROWS:
            gate_up = rng.standard_normal((m, 2 * k), dtype=np.float32) * 4
            out = backend.activation(m, k, quantized=False)
            backend.write(out.values_mk, np.full((m, k), np.nan, np.float32))
            backend.silu_mul(backend.to_device(gate_up), k, out, m)
            gate, up = gate_up[:, :k].astype(np.float64), gate_up[:, k:].astype(np.float64)
            errors.append(nmse(backend.to_host(out.values_mk), gate / (1 + np.exp(-gate)) * up))
    return judge("silu x up", errors, EXACT_STEP)


def _check_embed(backend: Backend, rng: np.random.Generator) -> Check:
    wrong, k = 0, 96
    for dtype in (np.uint16, np.float16, np.float32):
        table = rng.standard_normal((50, k), dtype=np.float32)
        table = (table.view(np.uint32) >> 16).astype(np.uint16) if dtype is np.uint16 else table.astype(dtype)
        for m in ROWS:
            state = sequence_at(backend, 80, 3, 4, rng)
            ids = rng.integers(0, 50, 81).astype(np.int32)
            backend.write(state.tokens, ids)
            h = poison(backend, (m, k))
            backend.embed(backend.to_device(table), state, h, m)
            wrong += not np.array_equal(backend.to_host(h), widen(table[ids[3 : 3 + m]]))
            backend.advance(state, m)
            wrong += int(backend.to_host(state.position)[0]) != 3 + m
    return Check("embedding rows, and the position moved on", wrong == 0, f"{wrong} of {6 * len(ROWS)} cases wrong")


def quantized_out(backend: Backend, m: int, k: int) -> Activation:
    """Rows [m, k] to quantize into: codes of 99, scales of NaN."""
    out = backend.activation(m, k, quantized=True)
    backend.write(out.codes_mk, np.full(out.codes_mk.shape, 99, np.int8))  # type: ignore[union-attr]
    backend.write(out.scales_mg, np.full(out.scales_mg.shape, np.nan, np.float32))  # type: ignore[union-attr]
    return out


def steps_off(backend: Backend, out: Activation, expected_mk: NDArray[np.float64]) -> float:
    """The largest distance of int8 codes from the values they round, in steps of their group; a half is exact."""
    codes, scales = backend.to_host(out.codes_mk), backend.to_host(out.scales_mg).astype(np.float64)
    if not np.isfinite(scales).all():
        return float("inf")
    step = np.repeat(scales, 32, axis=1)[:, : expected_mk.shape[1]]
    off = np.abs(codes[:, : expected_mk.shape[1]] - expected_mk / np.where(step, step, 1))
    return float(off.max())


def _check_quantized_rows(backend: Backend, rng: np.random.Generator) -> Check:
    """RMSNorm and silu x up into int8 rows, whose codes are the float64 values rounded."""
    worst = 0.0
    for k in (32, 96, 2048):
        for m in ROWS:
            h = rng.standard_normal((m, k), dtype=np.float32) * 3
            weight = rng.standard_normal(k, dtype=np.float32)
            out = quantized_out(backend, m, k)
            backend.norm(backend.to_device(h), backend.to_device(weight), 1e-6, out, m)
            wide = h.astype(np.float64)
            expected = weight * wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-6)
            worst = max(worst, steps_off(backend, out, expected))
            gate_up = rng.standard_normal((m, 2 * k), dtype=np.float32) * 4
            out = quantized_out(backend, m, k)
            backend.silu_mul(backend.to_device(gate_up), k, out, m)
            gate, up = gate_up[:, :k].astype(np.float64), gate_up[:, k:].astype(np.float64)
            worst = max(worst, steps_off(backend, out, gate / (1 + np.exp(-gate)) * up))
    return Check("RMSNorm and silu x up into int8 rows", worst <= CODE_STEPS, within_steps(worst, CODE_STEPS))


def within_steps(worst: float, limit: float) -> str:
    return f"at most {worst:.4f} steps off, limit {limit}"


def sequence_at(backend: Backend, ctx: int, position: int, half: int, rng: np.random.Generator) -> SequenceState:
    """A state with `position` slots filled and a random rotation table."""
    angles = rng.uniform(-3, 3, (ctx, half))
    return SequenceState(
        tokens=backend.zeros((ctx + 1,), np.int32),
        position=backend.to_device(np.array([position], np.int32)),
        chosen=backend.shared_zeros((CHOSEN_SLOTS,), np.int32),
        cos_sd=backend.to_device(np.cos(angles).astype(np.float32)),
        sin_sd=backend.to_device(np.sin(angles).astype(np.float32)),
    )


def _check_choice(backend: Backend, rng: np.random.Generator) -> Check:
    wrong = 0
    cases: list[Callable[[NDArray[np.float32]], None]] = [
        lambda logits: None,
        lambda logits: logits.__setitem__([5, 900, 4999], 50.0),
        lambda logits: logits.__setitem__(slice(5000, None), 99.0),
        lambda logits: logits.__setitem__(slice(0, 4000), np.nan),
        lambda logits: logits.__setitem__(slice(None), -np.inf),
    ]
    for edit in cases:
        logits = rng.standard_normal(6000, dtype=np.float32)
        edit(logits)
        state = sequence_at(backend, 8, 3, 4, rng)
        backend.choose(backend.to_device(logits), 5000, state, 2)
        backend.wait(backend.mark())
        expected = int(np.nanargmax(logits[:5000]))
        ids = np.zeros(CHOSEN_SLOTS, np.int32)
        ids[5 % CHOSEN_SLOTS] = expected
        wrong += not np.array_equal(backend.peek(state.chosen), ids)
        wrong += int(backend.to_host(state.position)[0]) != 5 or int(backend.to_host(state.tokens)[5]) != expected
    return Check("choice of the next id", wrong == 0, f"{wrong} of {2 * len(cases)} comparisons wrong")
