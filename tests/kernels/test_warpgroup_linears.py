"""Which linears the warpgroups sum up, and by which boxes, on a hollow CUDA backend; needs CuPy but no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kestrel_cuda.quant.packed import Element, PackedGeometry
from tests.hollow_backend import hollow_backend, hollow_map, weight
from tests.kernel_sources import FakeLibrary, constants


@pytest.fixture
def kernels() -> FakeLibrary:
    return FakeLibrary()


@pytest.fixture
def backend(cuda: Any, kernels: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cuda, "driver_bindings_work", lambda: True)
    return hollow_backend(cuda, kernels)


def kernel_of(backend: Any, kernels: FakeLibrary, geometry: PackedGeometry) -> str:
    """The kernel that 300 rows are multiplied by."""
    x = backend.activation(300, geometry.num_inputs, True)
    backend.linear(x, weight(geometry), np.zeros((300, geometry.n_padded), np.float32), 300)
    ((kernel, *_),) = kernels.launches
    return kernel


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("k", "group_size"), [(96, 32), (160, 32), (512, 256)])
def test_the_boxes_are_what_the_kernel_expects_the_bytes_of(
    backend: Any, kernels: FakeLibrary, monkeypatch: pytest.MonkeyPatch, bits: int, k: int, group_size: int
) -> None:
    boxes = []

    def map_of(matrix: Any, box: tuple[int, int], *, swizzled: bool = False) -> Any:
        boxes.append((matrix.dtype.itemsize, *box, swizzled))
        return hollow_map(matrix, box, swizzled=swizzled)

    monkeypatch.setattr(backend, "_maps", SimpleNamespace(of=map_of))
    geometry = PackedGeometry(Element(f"int{bits}"), k, 136, group_size)
    assert kernel_of(backend, kernels, geometry) == f"linear_warpgroups_int{bits}"
    c = constants("gemm_warpgroup")
    scale_rows = c["kGroupsPerPiece"] if group_size == c["kGroup"] else 1
    assert boxes == [
        (1, c["kTileM"], c["kSwizzledRow"], True),
        (4, c["kPiece"] * bits // 32, c["kColumnWords"], False),
        (2, scale_rows, c["kTileN"], False),
    ]


@pytest.mark.parametrize(
    ("n", "bindings", "capability"), [(130, True, 90), (136, False, 90), (136, True, 80), (136, True, 120)]
)
def test_what_the_copy_engine_cannot_bring_is_summed_in_tiles(
    cuda: Any, backend: Any, kernels: FakeLibrary, monkeypatch: pytest.MonkeyPatch, n: int, bindings: bool,
    capability: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(cuda, "driver_bindings_work", lambda: bindings)
    monkeypatch.setattr(backend, "compute_capability", capability)
    assert kernel_of(backend, kernels, PackedGeometry(Element.INT8, 256, n, 32)) == "linear_tiles_int8"
