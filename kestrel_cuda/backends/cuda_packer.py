"""Quantizes and packs weights on the device while they load, through bounded scratch memory.

Source rows go up as stored, become strips of codes and scales (kernels/quantize.cu), and are transposed into their
column range of the slab (kernels/transpose.cu). Large matrices go in blocks of rows, so scratch stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.base import PackedTensor, Slab, SourceMatrix
from kestrel_cuda.checkpoint.tensor_file import widen
from kestrel_cuda.quant.packed import Element, SlabEntry, round_up

if TYPE_CHECKING:
    from kestrel_cuda.backends.cuda_device import CudaDevice

SCRATCH_BYTES = 32 << 20
MAX_PENDING = 4096
_TILE = 32
_KINDS = {np.dtype(np.uint16): 0, np.dtype(np.float16): 1, np.dtype(np.float32): 2}


class CudaPacker:
    """Device scratch for one load; see `Packer`."""

    def __init__(self, backend: CudaDevice) -> None:
        self._backend = backend
        self._source = backend.device_memory.array((SCRATCH_BYTES,), np.uint8)
        self._codes = backend.device_memory.array((SCRATCH_BYTES,), np.uint8)
        self._scales = backend.device_memory.array((SCRATCH_BYTES // 8,), np.uint8)
        self._flags = backend.zeros((MAX_PENDING, 3), np.uint32)
        self._names: list[str] = []

    def pack(self, slab: Slab, entry: SlabEntry, members: Sequence[SourceMatrix]) -> None:
        column = 0
        for member in members:
            slot = len(self._names)
            if slot == MAX_PENDING:
                raise OverflowError("finish() must be called before more tensors are packed")
            self._names.append(member.name)
            num_outputs, num_inputs = member.data.shape
            widest = max(member.data.dtype.itemsize, 4 if entry.geometry.element is Element.F32 else 1)
            step = max(_TILE, SCRATCH_BYTES // (round_up(num_inputs, 256) * widest) // _TILE * _TILE)
            if step * num_inputs * widest > SCRATCH_BYTES:
                raise OverflowError(f"{member.name}: {num_inputs} inputs are more than the loader's scratch holds")
            for first in range(0, num_outputs, step):
                self._pack_rows(slab, entry, member.data[first : first + step], column + first, self._flags[slot])
            column += num_outputs

    def finish(self) -> list[PackedTensor]:
        flags = self._backend.to_host(self._flags)
        found = [PackedTensor(name, *map(int, flags[i])) for i, name in enumerate(self._names)]
        self._names = []
        self._backend.fill_zero(self._flags)
        return found

    def close(self) -> None:
        for array in (self._source, self._codes, self._scales, self._flags):
            self._backend.device_memory.free(array)

    def _pack_rows(self, slab: Slab, entry: SlabEntry, rows_nk: NDArray[Any], column: int, flags: Any) -> None:
        geometry, kernels = entry.geometry, self._backend.kernels
        weight = slab.weights[entry.key.projection]
        n, k = rows_nk.shape
        if not geometry.element.is_grouped:
            if geometry.element is Element.F32 and rows_nk.dtype != np.float32:
                rows_nk = widen(rows_nk)
            source = self._upload(rows_nk)
            kernels["count_nonfinite"](
                (self._backend.num_multiprocessors * 4,), (256,), source=source, flags=flags,
                source_kind=_KINDS[rows_nk.dtype], num_values=n * k,
            )  # fmt: skip
            name = "transpose_words" if geometry.element is Element.F32 else "transpose_halves"
            size = {"k_words": k} if name == "transpose_words" else {"k": k}
            dtype = np.uint32 if name == "transpose_words" else np.uint16
            kernels[name](
                _tiles(k, n), (_TILE, 8), in_nk=source.view(dtype), out_kn=weight.codes_kn.view(dtype), n=n,
                ld=geometry.n_padded, col_offset=column, **size,
            )  # fmt: skip
            return
        source = self._upload(rows_nk)
        k_padded, group_size = geometry.k_padded, geometry.group_size
        num_groups = k_padded // group_size
        bits = 8 if geometry.element is Element.INT8 else 4
        codes, scales = self._codes.view(np.int8), self._scales.view(np.float32)
        kernels["quantize_weight"](
            (-(-n * num_groups // 8),), (256,), source=source, codes_nk=codes, scales_ng=scales, flags=flags,
            source_kind=_KINDS[rows_nk.dtype], n=n, k=k, k_padded=k_padded, group_size=group_size, bits=bits,
        )  # fmt: skip
        k_words = geometry.codes_shape[0]
        kernels["transpose_words" if bits == 8 else "transpose_int4"](
            _tiles(k_words, n), (_TILE, 8), in_nk=self._codes.view(np.uint32), out_kn=weight.codes_kn, n=n,
            k_words=k_words, ld=geometry.n_padded, col_offset=column,
        )  # fmt: skip
        kernels["transpose_scales"](
            _tiles(num_groups, n), (_TILE, 8), scales_ng=scales, out_gn=weight.scales_gn, n=n, num_groups=num_groups,
            ld=geometry.n_padded, col_offset=column,
        )  # fmt: skip

    def _upload(self, rows_nk: NDArray[Any]) -> Any:
        rows_nk = np.ascontiguousarray(rows_nk)
        self._source.data.copy_from_host_async(rows_nk.ctypes.data, rows_nk.nbytes, self._backend.stream)
        return self._source


def _tiles(num_columns: int, num_rows: int) -> tuple[int, int]:
    return -(-num_columns // _TILE), -(-num_rows // _TILE)
