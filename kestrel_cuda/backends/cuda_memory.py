"""Device and pinned memory taken straight from the runtime and counted to the byte. Knows nothing of what it holds."""

from __future__ import annotations

import mmap
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.backends.base import MemoryInfo
from kestrel_cuda.backends.driver_memory import used_bytes
from kestrel_cuda.errors import DeviceError
from kestrel_cuda.sizes import format_size

MAX_CONTEXT_BYTES = 768 << 20
"""The most that counts as what the driver takes for a process: more is another process's."""

_REGISTER_MAPPED = 2

_contexts: dict[str, int] = {}
"""Bytes of this process's context on each GPU, by PCI address."""


def page_aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Host bytes that share no page with anything else, so that pinning them never meets a page pinned before."""
    return np.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), np.uint8, num_bytes)


class DeviceMemory:
    """Every allocation of one device. CuPy's own pool is not used: what is freed goes back to the driver, and
    `num_allocations` counts every call, those inside CuPy included, `num_frees` those made here."""

    def __init__(self, device: int, used_before_bytes: int | None, pci_bus_id: str) -> None:
        self._device = device
        self._live: dict[int, int] = {}
        self._registered: dict[int, NDArray[Any]] = {}
        self.num_allocations = 0
        self.num_frees = 0
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.pinned_bytes = 0
        self._used_before_bytes, self._pci_bus_id = used_before_bytes, pci_bus_id
        self.context_bytes = 0
        self.measure_context()
        cupy.cuda.set_allocator(self._allocate_for_cupy)

    def info(self) -> MemoryInfo:
        free, total = runtime.memGetInfo()
        return MemoryInfo(free, total, self.allocated_bytes, self.peak_bytes, self.context_bytes)

    def measure_context(self) -> None:
        """What the driver has taken for this process beside its allocations; an estimate where it cannot be asked."""
        used = used_bytes(self._pci_bus_id)
        free, total = runtime.memGetInfo()
        if used is None or self._used_before_bytes is None:
            self.context_bytes = min(total - free - self.allocated_bytes, MAX_CONTEXT_BYTES)
        else:
            # What another process takes meanwhile is no part of it, and not to be counted for as long as this one runs.
            measured = min(used - self._used_before_bytes - self.allocated_bytes, MAX_CONTEXT_BYTES)
            # What the first device object of a process made the driver take is in use before the next one begins.
            self.context_bytes = max(measured, _contexts.get(self._pci_bus_id, 0))
            _contexts[self._pci_bus_id] = self.context_bytes

    def allocate(self, num_bytes: int) -> Any:
        """A pointer object CuPy arrays can stand on. Raises DeviceError when the device has no room."""
        try:
            address = runtime.malloc(max(num_bytes, 1))
        except runtime.CUDARuntimeError as error:
            free, total = runtime.memGetInfo()
            raise DeviceError(
                f"the GPU cannot give {format_size(num_bytes)}: {format_size(free)} of {format_size(total)} are free, "
                f"{format_size(self.allocated_bytes)} are in use here; "
                f"try a smaller --keep, --ctx or --quant q4_0 ({error})"
            ) from None
        self._live[address] = num_bytes
        self.num_allocations += 1
        self.allocated_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, num_bytes, self, self._device), 0)

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """A CuPy array of unset bytes."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return cupy.ndarray(shape, dtype, memptr=self.allocate(num_bytes))

    def free(self, array: Any) -> None:
        """Give an array of this object back to the driver."""
        self._free_address(array.data.mem.ptr)

    def close(self) -> None:
        """Give everything back that is still held."""
        for address in list(self._live):
            self._free_address(address)
        for array in list(self._registered.values()):
            self.unpin(array)

    def pin(self, array: NDArray[Any], *, mapped: bool = False) -> bool:
        """Register touched host memory with the device; False when the driver refuses."""
        try:
            runtime.hostRegister(array.ctypes.data, array.nbytes, _REGISTER_MAPPED if mapped else 0)
        except runtime.CUDARuntimeError:
            return False
        self._registered[array.ctypes.data] = array
        self.pinned_bytes += array.nbytes
        return True

    def unpin(self, array: NDArray[Any]) -> None:
        """Take back what `pin` did."""
        runtime.hostUnregister(array.ctypes.data)
        del self._registered[array.ctypes.data]
        self.pinned_bytes -= array.nbytes

    def view_of_host(self, array: NDArray[Any]) -> Any:
        """A CuPy array over registered host memory, which kernels reach through the link."""
        memory = cupy.cuda.UnownedMemory(array.ctypes.data, array.nbytes, array, self._device)
        return cupy.ndarray(array.shape, array.dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))

    def host_of(self, view: Any) -> NDArray[Any]:
        """The registered host memory that a whole view is over."""
        return self._registered[view.data.ptr]

    def _free_address(self, address: int) -> None:
        self.allocated_bytes -= self._live.pop(address)
        self.num_frees += 1
        runtime.free(address)

    def _allocate_for_cupy(self, num_bytes: int) -> Any:
        self.num_allocations += 1
        return cupy.cuda.memory._malloc(num_bytes)
