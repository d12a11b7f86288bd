"""The only place a backend is chosen; each is imported when it is opened, so the other never costs anything."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.errors import DeviceError


def open_backend(name: Literal["cuda", "cpu"], device: int = 0, *, cubin_dir: Path | None = None) -> Backend:
    """The backend by name. Raises DeviceError when there is no such GPU or no way to use it."""
    if name == "cpu":
        from kestrel_cuda.backends.cpu import CpuBackend

        return CpuBackend()
    from kestrel_cuda.backends.cuda import CudaBackend

    return CudaBackend(device, cubin_dir=cubin_dir)


def open_best_backend(device: int = 0) -> tuple[Backend, str | None]:
    """The GPU when there is one, else the CPU with the reason in one line."""
    try:
        return open_backend("cuda", device), None
    except DeviceError as error:
        return open_backend("cpu"), str(error)
