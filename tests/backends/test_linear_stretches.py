"""Norms and linears of one row have the bits of the steps they stand for, taken from calls of more rows.

The steps are the methods of `ComposedSteps`. On the CPU every stretch is its steps; these tests are about the GPU,
where it is one kernel that may start before the one ahead of it is done.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import DeviceWeight
from kestrel_cuda.quant.grouped import quantize_activations
from tests.backends.arrays import (
    Floats,
    HostActivation,
    assert_poison_outside,
    normal,
    poison,
    poisoned,
    poisoned_activation,
    rng,
)
from tests.backends.stretch_steps import (
    EPS,
    NUM_ROWS,
    Outputs,
    Step,
    assert_same_runs,
    composed,
    first_codes,
    poison_activation,
    random_norm,
    random_rows,
    random_weight,
)

# Around the pieces of 128 and rounds of 16 pieces; groups of 256 are only used where they divide the inputs.
NUM_INPUTS = {
    "int8": (32, 96, 128, 160, 2048, 2080, 6144),
    "int4": (32, 96, 128, 160, 2048, 2080, 6144),
    "g256": (256, 768, 2048, 2304, 6144),
}
CASES = [pytest.param(kind, k, id=f"{kind}-{k}") for kind, sizes in NUM_INPUTS.items() for k in sizes]
# Around the padding to 4, sets of 16 columns and the blocks of 32 of the kernels for more rows.
NUM_OUTPUTS = (1, 3, 4, 15, 16, 18, 32, 33, 70, 129)


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
