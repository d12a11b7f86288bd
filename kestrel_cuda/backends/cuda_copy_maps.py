"""Matrices as the driver describes them to the copy engine, by the boxes it copies. Knows no kernel and no weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.errors import DeviceError
from kestrel_cuda.kernels.launch import COPY_MAP

Box: TypeAlias = tuple[int, int]
"""Rows and columns of what is copied at a time."""

ROW_MULTIPLE_BYTES = 16
"""What the driver wants rows, and addresses, to be multiples of. Slabs and codes are by how they are laid out."""

MOST_KEPT = 4096
"""More than a model of 200 layers has, whose matrices come round in turn."""


def describe(
    address: int,
    item_bytes: int,
    lengths: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    *,
    swizzled_bytes: int = 0,
) -> list[int]:
    """The description's 16 words. Axes are innermost first, with the strides of all but that one.

    `swizzled_bytes`: of rows that are swizzled, 128, as the mma of warpgroups reads them, or 64; 0 where none are.
    Raises DeviceError when the driver refuses.
    """
    from cuda.bindings import driver

    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    swizzle = {
        0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[swizzled_bytes]
    kind = {
        1: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        4: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT32,
    }[item_bytes]
    status, described = driver.cuTensorMapEncodeTiled(
        kind,
        len(lengths),
        address,
        [driver.cuuint64_t(length) for length in lengths],
        [driver.cuuint64_t(stride) for stride in strides_bytes],
        [driver.cuuint32_t(length) for length in box],
        [driver.cuuint32_t(1)] * len(lengths),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        shown = " x ".join(str(length) for length in reversed(lengths))
        raise DeviceError(f"the driver cannot describe a matrix of {shown} to the copy engine: {status.name}")
    return [int(word) for word in described.opaque]


class CopyMaps:
    """Maps of whole matrices, as kernels are passed them. Those asked for last are kept: a window over the layers shows
    the same few addresses again and again, and a map depends on nothing but what it is made from."""

    def __init__(self) -> None:
        self._describe = lru_cache(MOST_KEPT)(_describe_matrix)

    def of(self, matrix: Any, box: Box, *, swizzled: bool = False) -> NDArray[Any]:
        """The map of a device matrix [rows, columns] by boxes of these rows and columns."""
        assert matrix.ndim == 2
        assert matrix.flags.c_contiguous
        return self._describe(matrix.data.ptr, matrix.shape, matrix.dtype.itemsize, box, swizzled)


def _describe_matrix(address: int, shape: tuple[int, int], item_bytes: int, box: Box, swizzled: bool) -> NDArray[Any]:
    rows, columns = shape
    swizzled_bytes = 128 if swizzled else 0
    words = describe(
        address, item_bytes, (columns, rows), (columns * item_bytes,), box[::-1], swizzled_bytes=swizzled_bytes
    )
    return np.array(words, np.uint64).view(COPY_MAP)
