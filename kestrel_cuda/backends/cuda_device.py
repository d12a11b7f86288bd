"""One GPU: its memory, its two streams and their events, its measured rates. Knows no step of a layer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.errors import DeviceError, InternalError

try:
    import cupy
    from cupy.cuda import runtime
except ImportError as error:
    raise DeviceError(f"CuPy cannot be imported ({error}); pip install cupy-cuda12x brings it") from error
except OSError as error:
    raise DeviceError(
        f"CuPy cannot start ({error}); set CUPY_CACHE_DIR to a folder that can be written, or use --backend cpu"
    ) from error

from kestrel_cuda.backends.base import MemoryInfo, Slab
from kestrel_cuda.backends.cuda_memory import DeviceMemory, page_aligned
from kestrel_cuda.backends.cuda_packer import CudaPacker
from kestrel_cuda.backends.driver_memory import used_bytes
from kestrel_cuda.backends.operands import DeviceWeight
from kestrel_cuda.kernels.library import KernelLibrary
from kestrel_cuda.quant.packed import SlabLayout

LEAST_COMPUTE_CAPABILITY = 80
READ_PASSES = 4
TABLE_KINDS = {np.dtype(np.uint16): 0, np.dtype(np.float16): 1, np.dtype(np.float32): 2}
"""Of embeddings: kernels/common.cuh's `table_entry`; bfloat16 are uint16 here."""
WARPGROUP_CAPABILITY = 90


@dataclass(frozen=True)
class SlabEvents:
    """`ready`: the last upload has arrived. `read`: the steps that read the slab before it was released are done."""

    ready: Any
    read: Any


def _driver_is_there() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class CudaDevice:
    """One GPU. Raises DeviceError when it is missing, too old, or the driver cannot be used."""

    name = "cuda"
    num_load_threads = 1
    can_capture = True
    runs_ahead = True
    rows_are_independent = True

    def __init__(self, device: int = 0, *, cubin_dir: Path | None = None) -> None:
        if not _driver_is_there():
            raise DeviceError("no NVIDIA driver is installed here; install one, or use --backend cpu")
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            raise DeviceError(f"no usable NVIDIA GPU ({error}); look at nvidia-smi, or use --backend cpu") from None
        if not 0 <= device < count:
            raise DeviceError(f"there is no GPU {device}; this machine has {count} (numbered from 0)")
        pci_bus_id = runtime.deviceGetPCIBusId(device)
        used_before_bytes = used_bytes(pci_bus_id)
        properties = runtime.getDeviceProperties(device)
        self.device_name = properties["name"].decode()
        self.compute_capability = properties["major"] * 10 + properties["minor"]
        if self.compute_capability < LEAST_COMPUTE_CAPABILITY:
            raise DeviceError(
                f"{self.device_name} has compute capability {properties['major']}.{properties['minor']}; "
                "8.0 or newer is needed (Ampere, 2020)"
            )
        self.num_multiprocessors = properties["multiProcessorCount"]
        self.most_shared_bytes = properties["sharedMemPerBlockOptin"]
        cupy.cuda.Device(device).use()
        self._unpinned_bytes = 0
        self.device_memory = DeviceMemory(device, used_before_bytes, pci_bus_id)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.copy_stream = cupy.cuda.Stream(non_blocking=True)
        self.kernels = KernelLibrary(self.stream, self.compute_capability, cubin_dir, device=device)

    @property
    def has_warpgroup_mma(self) -> bool:
        """Whether kernels of `FEATURE_ARCHITECTURES` run here: Hopper's mma of four warps together."""
        return bool(self.compute_capability == WARPGROUP_CAPABILITY)

    # memory

    def memory(self) -> MemoryInfo:
        return self.device_memory.info()

    def reset_peak(self) -> None:
        self.device_memory.peak_bytes = self.device_memory.allocated_bytes

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        array = self.device_memory.array(shape, dtype)
        self.fill_zero(array)
        return array

    def free(self, array: Any) -> None:
        self.synchronize()
        self.device_memory.free(array)

    def fill_zero(self, array: Any) -> None:
        array.data.memset_async(0, array.nbytes, self.stream)

    def to_device(self, array: NDArray[Any]) -> Any:
        target = self.device_memory.array(array.shape, array.dtype)
        self.write(target, array)
        return target

    def to_host(self, array: Any) -> NDArray[Any]:
        if not array.flags.c_contiguous:
            raise InternalError("only contiguous device arrays can be copied to the host")
        host = np.empty(array.shape, array.dtype)
        if host.nbytes:
            array.data.copy_to_host_async(ctypes.c_void_p(host.ctypes.data), host.nbytes, self.stream)
        self.stream.synchronize()
        return host

    def write(self, target: Any, source: NDArray[Any]) -> None:
        if target.nbytes != source.nbytes or not target.flags.c_contiguous:
            raise InternalError(f"cannot write {source.nbytes} bytes over {target.nbytes}")
        source = np.ascontiguousarray(source)
        if source.nbytes:
            target.data.copy_from_host_async(ctypes.c_void_p(source.ctypes.data), source.nbytes, self.stream)
        self.stream.synchronize()

    def copy(self, target: Any, source: Any) -> None:
        if target.nbytes != source.nbytes or not (target.flags.c_contiguous and source.flags.c_contiguous):
            raise InternalError(f"cannot copy {source.nbytes} bytes over {target.nbytes}, or not in one piece")
        target.data.copy_from_device_async(source.data, source.nbytes, self.stream)

    def map_host(self, array: NDArray[Any]) -> Any:
        held = page_aligned(array.nbytes).view(array.dtype).reshape(array.shape)
        held[...] = array
        if not self.device_memory.pin(held, mapped=True):
            raise DeviceError(f"the driver refused to map {held.nbytes} bytes of host memory for the embeddings")
        return self.device_memory.view_of_host(held)

    def shared_zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        held = page_aligned(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
        held.fill(0)
        if not self.device_memory.pin(held, mapped=True):
            raise DeviceError(
                f"the driver refused to map {held.nbytes} bytes of host memory for chosen ids; free host memory, or "
                "raise the limit of locked memory"
            )
        return self.device_memory.view_of_host(held)

    def peek(self, array: Any) -> NDArray[Any]:
        return self.device_memory.host_of(array)

    def allocate_slab(self, layout: SlabLayout) -> Slab:
        return self.slab_over(layout, self.zeros((layout.num_bytes,), np.uint8))

    def slab_over(self, layout: SlabLayout, raw: Any) -> Slab:
        weights = {}
        for entry in layout.entries:
            geometry = entry.geometry
            codes = raw[entry.codes_offset : entry.codes_offset + geometry.codes_bytes]
            codes_kn = codes.view(geometry.codes_dtype).reshape(geometry.codes_shape)
            scales = raw[entry.scales_offset : entry.scales_offset + geometry.scales_bytes]
            scales_gn = scales.view(np.float16).reshape(geometry.scales_shape) if geometry.element.is_grouped else None
            weights[entry.key.projection] = DeviceWeight(geometry, codes_kn, scales_gn)
        events = SlabEvents(cupy.cuda.Event(disable_timing=True), cupy.cuda.Event(disable_timing=True))
        events.read.record(self.stream)
        return Slab(layout, raw, weights, events)

    def free_slab(self, slab: Slab) -> None:
        self.synchronize()
        self.device_memory.free(slab.raw)

    def host_slab(self, layout: SlabLayout) -> NDArray[np.uint8]:
        host = page_aligned(layout.num_bytes)
        host.fill(0)
        if not self.device_memory.pin(host):
            self._unpinned_bytes += host.nbytes
        return host

    def upload(self, slab: Slab, host: NDArray[np.uint8]) -> None:
        self.copy_stream.wait_event(slab.events.read)
        slab.raw.data.copy_from_host_async(ctypes.c_void_p(host.ctypes.data), host.nbytes, self.copy_stream)
        slab.events.ready.record(self.copy_stream)

    def wait_upload(self, slab: Slab) -> None:
        self.stream.wait_event(slab.events.ready)

    def uploads_done(self) -> Callable[[], None]:
        event = cupy.cuda.Event(disable_timing=True)
        event.record(self.copy_stream)
        return event.synchronize  # type: ignore[no-any-return]

    def release(self, slab: Slab) -> None:
        slab.events.read.record(self.stream)

    def download(self, host: NDArray[np.uint8], slab: Slab) -> None:
        slab.raw.data.copy_to_host_async(ctypes.c_void_p(host.ctypes.data), host.nbytes, self.stream)
        self.stream.synchronize()

    def packer(self) -> CudaPacker:
        return CudaPacker(self)

    def host_pinned_bytes(self) -> int:
        return self.device_memory.pinned_bytes

    def host_unpinned_bytes(self) -> int:
        return self._unpinned_bytes

    # time

    def mark(self) -> Any:
        event = cupy.cuda.Event()
        event.record(self.stream)
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def elapsed_ms(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end))

    def synchronize(self) -> None:
        self.copy_stream.synchronize()
        self.stream.synchronize()

    def capture(self, steps: Callable[[], None]) -> Callable[[], None]:
        self.stream.begin_capture()
        try:
            steps()
        finally:
            graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)

    def read_rate_gb_per_s(self, num_bytes: int = 1 << 30) -> float | None:
        """Median rate of reading `num_bytes` of device memory over and over (10^9 bytes a second).

        The scratch is freed again. None when that much is not free.
        """
        if runtime.memGetInfo()[0] < 2 * num_bytes:
            return None
        data, sink = self.zeros((num_bytes,), np.uint8), self.zeros((1,), np.uint32)
        grid = (self.num_multiprocessors * 4,)
        times_ms = []
        for _ in range(7):
            start = self.mark()
            self.kernels["read_vectors"](
                grid, (512,), data=data, out=sink, num_vectors=num_bytes // 16, num_passes=READ_PASSES
            )
            times_ms.append(self.elapsed_ms(start, self.mark()))
        self.device_memory.free(data)
        self.device_memory.free(sink)
        return READ_PASSES * num_bytes / float(np.median(times_ms[2:])) / 1e6

    def link_rate_gb_per_s(self, num_bytes: int = 64 << 20) -> float:
        """Median rate of copies of `num_bytes` from pinned host memory (10^9 bytes a second), scratch freed again."""
        host = page_aligned(num_bytes)
        host.fill(0)
        pinned = self.device_memory.pin(host)
        device = self.device_memory.array((num_bytes,), np.uint8)
        times_ms = []
        for _ in range(7):
            start = self.mark()
            device.data.copy_from_host_async(ctypes.c_void_p(host.ctypes.data), num_bytes, self.stream)
            times_ms.append(self.elapsed_ms(start, self.mark()))
        self.device_memory.free(device)
        if pinned:
            self.device_memory.unpin(host)
        return num_bytes / float(np.median(times_ms[2:])) / 1e6

    def close(self) -> None:
        self.synchronize()
        self.device_memory.close()
