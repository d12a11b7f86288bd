"""What the driver is asked for a map of a matrix, how often, and what is said when it refuses; needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kestrel_cuda.backends import cuda_copy_maps
from kestrel_cuda.backends.cuda_copy_maps import CopyMaps
from kestrel_cuda.errors import DeviceError
from kestrel_cuda.kernels.launch import COPY_MAP

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed", exc_type=ImportError)


class FakeDriver:
    """Answers with words 1, 2, ... of its own, or refuses."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.status = driver.CUresult.CUDA_SUCCESS

    def encode(self, *asked: Any) -> tuple[Any, Any]:
        self.asked.append(asked)
        return self.status, SimpleNamespace(opaque=[driver.cuuint64_t(len(self.asked) + i) for i in range(16)])


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", fake.encode)
    return fake


def matrix(rows: int, columns: int, dtype: type[np.generic], address: int = 4096) -> Any:
    """As CuPy's arrays say where they are."""
    flags = SimpleNamespace(c_contiguous=True)
    return SimpleNamespace(
        shape=(rows, columns), ndim=2, dtype=np.dtype(dtype), flags=flags, data=SimpleNamespace(ptr=address)
    )


@pytest.mark.parametrize(
    ("dtype", "kind", "row_bytes"),
    [(np.int8, "UINT8", 160), (np.float16, "UINT16", 320), (np.uint16, "UINT16", 320), (np.uint32, "UINT32", 640)],
)
@pytest.mark.parametrize("swizzled", [False, True])
def test_a_matrix_is_described_innermost_axis_first(
    fake_driver: FakeDriver, dtype: type[np.generic], kind: str, row_bytes: int, swizzled: bool
) -> None:
    map_of_one = CopyMaps().of(matrix(70, 160, dtype), (4, 128), swizzled=swizzled)
    assert (map_of_one.dtype, map_of_one.shape) == (COPY_MAP, (1,))
    assert map_of_one["words"].tolist() == [list(range(1, 17))]
    ((data_type, num_axes, address, lengths, strides, box, steps, interleave, swizzle, _, fill),) = fake_driver.asked
    assert data_type == getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}")
    assert (num_axes, address) == (2, 4096)
    assert [[int(length) for length in axes] for axes in (lengths, strides, box, steps)] == [
        [160, 70], [row_bytes], [128, 4], [1, 1],
    ]  # fmt: skip
    assert interleave == driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    swizzles = driver.CUtensorMapSwizzle
    assert swizzle == (swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE)
    assert fill == driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE


def test_the_driver_is_asked_once_for_each(fake_driver: FakeDriver) -> None:
    maps = CopyMaps()
    first = maps.of(matrix(70, 160, np.int8), (128, 128))
    assert maps.of(matrix(70, 160, np.int8), (128, 128)) is first
    for other, box, swizzled in (
        (matrix(70, 160, np.int8, 8192), (128, 128), False),
        (matrix(35, 320, np.int8), (128, 128), False),
        (matrix(70, 160, np.uint16), (128, 128), False),
        (matrix(70, 160, np.int8), (64, 128), False),
        (matrix(70, 160, np.int8), (128, 128), True),
    ):
        asked = len(fake_driver.asked)
        assert (maps.of(other, box, swizzled=swizzled) != first).any()
        assert len(fake_driver.asked) == asked + 1
    CopyMaps().of(matrix(70, 160, np.int8), (128, 128))
    assert len(fake_driver.asked) == 7


def test_no_more_are_kept_than_that(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copy_maps, "MOST_KEPT", 2)
    maps = CopyMaps()
    for address in (16, 32, 48, 48, 32, 16):
        maps.of(matrix(70, 160, np.int8, address), (128, 128))
    assert [asked[2] for asked in fake_driver.asked] == [16, 32, 48, 16]


def test_a_refusal_says_what_was_refused_and_is_not_kept(fake_driver: FakeDriver) -> None:
    maps, weight = CopyMaps(), matrix(70, 160, np.uint32)
    fake_driver.status = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceError, match="a matrix of 70 x 160 to the copy engine: CUDA_ERROR_INVALID_VALUE"):
        maps.of(weight, (32, 136))
    fake_driver.status = driver.CUresult.CUDA_SUCCESS
    assert maps.of(weight, (32, 136)).size == 1
