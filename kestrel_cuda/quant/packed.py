"""The one stored form of a weight: where each code and scale lies, and the slab that holds a layer. NumPy only.

Codes are transposed so that a column is an output channel, four consecutive inputs of a column in one 32-bit word
(eight for int4: the low nibbles hold the first four, the high nibbles the next four, in two's complement, so that
zero bytes are zero codes). Columns are padded to a multiple of four and pad columns read zero.

    int8    codes uint32 [K/4, n_padded]    scales float16 [K/group, n_padded]
    int4    codes uint32 [K/8, n_padded]    scales float16 [K/group, n_padded]
    floats  values        [K, n_padded] in the stored type, no scales
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.quant.grouped import GroupedWeight, GroupScheme
from kestrel_cuda.weight_keys import WeightKey

COLUMN_MULTIPLE = 4
SLAB_ALIGNMENT_BYTES = 256


class Element(StrEnum):
    """What one stored weight is."""

    INT8 = "int8"
    INT4 = "int4"
    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"

    @property
    def is_grouped(self) -> bool:
        return self in (Element.INT8, Element.INT4)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class PackedGeometry:
    """Shape of one packed matrix: `num_inputs` (K) by `num_outputs` (N). `group_size` is 0 for floats."""

    element: Element
    num_inputs: int
    num_outputs: int
    group_size: int = 0

    @property
    def k_padded(self) -> int:
        return round_up(self.num_inputs, self.group_size) if self.element.is_grouped else self.num_inputs

    @property
    def n_padded(self) -> int:
        return round_up(self.num_outputs, COLUMN_MULTIPLE)

    @property
    def num_groups(self) -> int:
        return self.k_padded // self.group_size if self.element.is_grouped else 0

    @property
    def codes_shape(self) -> tuple[int, int]:
        inputs_per_word = {Element.INT8: 4, Element.INT4: 8}.get(self.element, 1)
        return self.k_padded // inputs_per_word, self.n_padded

    @property
    def codes_dtype(self) -> np.dtype[np.generic]:
        if self.element in (Element.BF16, Element.F16):
            return np.dtype(np.uint16)
        return np.dtype(np.float32 if self.element is Element.F32 else np.uint32)

    @property
    def scales_shape(self) -> tuple[int, int]:
        return self.num_groups, self.n_padded

    @property
    def codes_bytes(self) -> int:
        return self.codes_shape[0] * self.codes_shape[1] * self.codes_dtype.itemsize

    @property
    def scales_bytes(self) -> int:
        return self.scales_shape[0] * self.scales_shape[1] * 2


def geometry_for(
    scheme: GroupScheme | None, float_element: Element, num_inputs: int, num_outputs: int
) -> PackedGeometry:
    """Geometry under a quantization scheme, or of plain floats of `float_element` when there is none."""
    if scheme is None:
        return PackedGeometry(float_element, num_inputs, num_outputs)
    element = Element.INT8 if scheme.bits == 8 else Element.INT4
    return PackedGeometry(element, num_inputs, num_outputs, scheme.group_size)


@dataclass(frozen=True)
class SlabEntry:
    """One packed matrix inside a slab; offsets in bytes from the slab's start."""

    key: WeightKey
    geometry: PackedGeometry
    codes_offset: int
    scales_offset: int


@dataclass(frozen=True)
class SlabLayout:
    """A contiguous run of bytes that holds every packed matrix of one layer (or lm_head)."""

    layer: int
    entries: tuple[SlabEntry, ...]
    num_bytes: int

    @property
    def geometry(self) -> tuple[PackedGeometry, ...]:
        """What two layouts must share for a buffer of one to serve the other."""
        return tuple(entry.geometry for entry in self.entries)

    @property
    def num_weights(self) -> int:
        return sum(entry.key.num_weights for entry in self.entries)

    def entry(self, key: WeightKey) -> SlabEntry:
        return next(entry for entry in self.entries if entry.key == key)


def slab_layout(layer: int, members: Sequence[tuple[WeightKey, PackedGeometry]]) -> SlabLayout:
    """Lay matrices out one after the other, every array aligned to 256 bytes."""
    entries, offset = [], 0
    for key, geometry in members:
        codes_offset = offset
        offset = round_up(offset + geometry.codes_bytes, SLAB_ALIGNMENT_BYTES)
        entries.append(SlabEntry(key, geometry, codes_offset, offset))
        offset = round_up(offset + geometry.scales_bytes, SLAB_ALIGNMENT_BYTES)
    return SlabLayout(layer, tuple(entries), offset)


def entry_views(slab: NDArray[np.uint8], entry: SlabEntry) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """The codes and scales (float16) of an entry as writable views of its slab's bytes."""
    geometry = entry.geometry
    codes = slab[entry.codes_offset :][: geometry.codes_bytes].view(geometry.codes_dtype)
    scales = slab[entry.scales_offset :][: geometry.scales_bytes].view(np.float16)
    return codes.reshape(geometry.codes_shape), scales.reshape(geometry.scales_shape)


def pack_grouped(
    weight: GroupedWeight, codes_kn: NDArray[np.uint32], scales_gn: NDArray[np.float16], col_offset: int
) -> None:
    """Write one strip into columns `col_offset ...` of packed arrays."""
    n = weight.codes_nk.shape[0]
    columns = slice(col_offset, col_offset + n)
    codes_nk = weight.codes_nk
    if weight.scheme.bits == 4:
        nibbles = codes_nk.view(np.uint8).reshape(n, -1, 2, 4) & 0x0F
        packed = nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)
        words_nk = np.ascontiguousarray(packed).view(np.uint32)[..., 0]
    else:
        words_nk = np.ascontiguousarray(codes_nk).view(np.uint32)
    codes_kn[:, columns] = words_nk.T
    scales_gn[:, columns] = weight.scales_ng.astype(np.float16).T


def unpack_codes(codes_kn: NDArray[np.uint32], element: Element) -> NDArray[np.int8]:
    """int8 [K, n_padded] of packed words."""
    k_words, n = codes_kn.shape
    octets = np.ascontiguousarray(codes_kn).view(np.uint8).reshape(k_words, n, 4).transpose(0, 2, 1)
    if element is Element.INT8:
        return octets.view(np.int8).reshape(k_words * 4, n)
    low = (octets << 4).view(np.int8) >> 4
    high = octets.view(np.int8) >> 4
    return np.stack([low, high], axis=1).reshape(k_words * 8, n)
