"""Device arrays for the tests of single steps: poisoned outputs, packed weights, activations, a sequence state.

Device arrays are only sliced, viewed and copied here: CuPy's own arithmetic would allocate from its pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import CHOSEN_SLOTS, Activation, Array, DeviceWeight, SequenceState
from kestrel_cuda.quant.grouped import GroupedWeight, GroupScheme
from kestrel_cuda.quant.packed import Element, PackedGeometry, entry_views, pack_grouped, slab_layout
from kestrel_cuda.weight_keys import LM_HEAD

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

POISON_F32 = np.uint32(0x7FC0DEAD).view(np.float32)
POISON_F16 = np.uint16(0x7EAD).view(np.float16)
POISON_TOKEN = np.int32(-7)
"""What no step writes: NaNs with a payload of their own, and an id that would be read out of bounds."""

POISON_CODE = np.int8(99)

_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_POISON = {
    np.dtype(np.int8): POISON_CODE,
    np.dtype(np.float16): POISON_F16,
    np.dtype(np.float32): POISON_F32,
}


def rng(*seed: int) -> np.random.Generator:
    """Random numbers that are the same on every machine."""
    return np.random.Generator(np.random.Philox(list(seed)))


def normal(generator: np.random.Generator, *shape: int, scale: float = 1.0) -> Floats:
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(scale)


def bits(array: NDArray[Any]) -> NDArray[Any]:
    """The bit patterns of floats, so that NaN equals itself and -0 differs from 0."""
    return np.ascontiguousarray(array).view(_INTEGERS[array.dtype.itemsize])


def assert_same_bits(actual: NDArray[Any], expected: NDArray[Any], what: str = "array") -> None:
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    differs = bits(actual) != bits(expected)
    if differs.any():
        at = tuple(int(i) for i in np.argwhere(differs)[0])
        first = f"first at {at}: {actual[at]!r} against {expected[at]!r}"
        raise AssertionError(f"{what}: {differs.sum()} of {differs.size} differ, {first}")


def poison(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """A host array that is poison all over."""
    return np.full(shape, _POISON[np.dtype(dtype)], dtype)


def poisoned(backend: Backend, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
    """A device array that is poison all over."""
    return backend.to_device(poison(shape, dtype))


def assert_poison_outside(array: NDArray[Any], written: tuple[slice | int, ...], what: str = "array") -> None:
    """Every element but those of `array[written]` still is poison."""
    outside = np.ones(array.shape, bool)
    outside[written] = False
    changed = outside & (bits(array) != bits(poison(array.shape, array.dtype)))
    if changed.any():
        at = tuple(int(i) for i in np.argwhere(changed)[0])
        first = f"first at {at}: {array[at]!r}"
        raise AssertionError(f"{what}: {changed.sum()} elements outside the target were written, {first}")


def to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """The upper halves of float32 values, nearest, ties to even; finite values only."""
    raw = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((raw + np.uint32(0x7FFF) + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(halves: NDArray[np.uint16]) -> Floats:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def stored(values: NDArray[Any], element: Element) -> NDArray[Any]:
    """Float values as a checkpoint stores them."""
    match element:
        case Element.BF16:
            return to_bf16(values)
        case Element.F16:
            return values.astype(np.float16)
        case _:
            return values.astype(np.float32)


def stored_values(data: NDArray[Any]) -> Doubles:
    """float64 of what a checkpoint stores; uint16 holds bfloat16 bits."""
    return (from_bf16(data) if data.dtype == np.uint16 else data).astype(np.float64)


@dataclass(frozen=True)
class HostWeight:
    """A packed matrix on the host and the exact values it stands for."""

    geometry: PackedGeometry
    slab: NDArray[np.uint8]
    values_nk: Doubles

    def on(self, backend: Backend) -> DeviceWeight:
        layout = slab_layout(0, [(LM_HEAD, self.geometry)])
        slab = backend.allocate_slab(layout)
        backend.write(slab.raw, self.slab)
        return slab.weights[LM_HEAD.projection]


def grouped_weight(
    codes_nk: NDArray[np.int8], scales_ng: NDArray[np.float16], scheme: GroupScheme, k: int
) -> HostWeight:
    """A grouped matrix of given codes [n, k rounded up] and scales."""
    n, k_padded = codes_nk.shape
    element = Element.INT8 if scheme.bits == 8 else Element.INT4
    geometry = PackedGeometry(element, k, n, scheme.group_size)
    assert k_padded == geometry.k_padded
    layout = slab_layout(0, [(LM_HEAD, geometry)])
    slab = np.zeros(layout.num_bytes, np.uint8)
    codes_kn, scales_gn = entry_views(slab, layout.entries[0])
    wide = scales_ng.astype(np.float32)
    pack_grouped(GroupedWeight(codes_nk, wide, scheme, k, 0), codes_kn, scales_gn, 0)  # type: ignore[arg-type]
    return HostWeight(geometry, slab, codes_nk * np.repeat(wide.astype(np.float64), scheme.group_size, axis=1))


def float_weight(values_nk: NDArray[Any], element: Element) -> HostWeight:
    """A matrix of plain floats, rounded to `element`."""
    n, k = values_nk.shape
    geometry = PackedGeometry(element, k, n)
    layout = slab_layout(0, [(LM_HEAD, geometry)])
    slab = np.zeros(layout.num_bytes, np.uint8)
    data = stored(values_nk, element)
    codes_kn, _ = entry_views(slab, layout.entries[0])
    codes_kn[:, :n] = (data if element is Element.F32 else data.view(np.uint16)).T
    return HostWeight(geometry, slab, stored_values(data))


@dataclass(frozen=True)
class HostActivation:
    """Input rows on the host: floats [m, k], or codes [m, k rounded up to 32] and scales, with their exact values."""

    num_inputs: int
    values_mk: Floats | None
    codes_mk: NDArray[np.int8] | None
    scales_mg: Floats | None

    @property
    def exact_mk(self) -> Doubles:
        if self.values_mk is not None:
            return self.values_mk.astype(np.float64)
        assert self.codes_mk is not None
        assert self.scales_mg is not None
        return self.codes_mk * np.repeat(self.scales_mg.astype(np.float64), 32, axis=1)

    def on(self, backend: Backend) -> Activation:
        """On the device, with rows of poison below that a step must not look at."""
        if self.values_mk is not None:
            below = np.vstack([self.values_mk, poison((2, self.num_inputs))])
            return Activation(self.num_inputs, backend.to_device(below), None, None)
        assert self.codes_mk is not None
        assert self.scales_mg is not None
        codes = np.vstack([self.codes_mk, np.full((2, self.codes_mk.shape[1]), 127, np.int8)])
        scales = np.vstack([self.scales_mg, poison((2, self.scales_mg.shape[1]))])
        return Activation(self.num_inputs, None, backend.to_device(codes), backend.to_device(scales))


def rows_of(x: Activation, first: int, num_rows: int) -> Activation:
    """Consecutive rows of an activation as one of its own."""
    rows = slice(first, first + num_rows)
    if x.values_mk is not None:
        return Activation(x.num_inputs, x.values_mk[rows], None, None)
    assert x.codes_mk is not None
    assert x.scales_mg is not None
    return Activation(x.num_inputs, None, x.codes_mk[rows], x.scales_mg[rows])


def poisoned_activation(backend: Backend, max_rows: int, num_inputs: int, quantized: bool) -> Activation:
    """An output of a step: values and scales are poison, codes are 99."""
    out = backend.activation(max_rows, num_inputs, quantized)
    if out.values_mk is not None:
        backend.write(out.values_mk, poison(out.values_mk.shape))
    else:
        assert out.codes_mk is not None
        assert out.scales_mg is not None
        backend.write(out.codes_mk, np.full(out.codes_mk.shape, 99, np.int8))
        backend.write(out.scales_mg, poison(out.scales_mg.shape))
    return out


def read_values(backend: Backend, out: Activation, num_rows: int) -> Floats:
    """The rows a step wrote as floats; the rows below must be poison still."""
    values = backend.to_host(out.values_mk)
    assert_poison_outside(values, (slice(num_rows),), "rows below")
    return values[:num_rows]


def read_codes(backend: Backend, out: Activation, num_rows: int) -> tuple[NDArray[np.int8], Floats]:
    """The codes and scales a step wrote; the rows below must be untouched."""
    codes, scales = backend.to_host(out.codes_mk), backend.to_host(out.scales_mg)
    assert (codes[num_rows:] == 99).all(), "codes of rows below were written"
    assert_poison_outside(scales, (slice(num_rows),), "scales of rows below")
    return codes[:num_rows], scales[:num_rows]


def sequence_state(
    backend: Backend, ctx: int, position: int, *, tokens: NDArray[np.int32] | None = None, head_dim: int = 16
) -> SequenceState:
    """A state at `position`. Rotations are random angles; ids that are not given are poison."""
    angles_sd = rng(ctx, head_dim).uniform(-np.pi, np.pi, (ctx, head_dim // 2))
    ids = np.full(ctx + 1, POISON_TOKEN, np.int32)
    if tokens is not None:
        ids[: len(tokens)] = tokens
    return SequenceState(
        tokens=backend.to_device(ids),
        position=backend.to_device(np.array([position], np.int32)),
        chosen=backend.to_device(np.full(CHOSEN_SLOTS, POISON_TOKEN, np.int32)),
        cos_sd=backend.to_device(np.cos(angles_sd).astype(np.float32)),
        sin_sd=backend.to_device(np.sin(angles_sd).astype(np.float32)),
    )
