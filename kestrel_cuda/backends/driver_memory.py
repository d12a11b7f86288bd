"""What the driver says a GPU's memory holds, asked without making a context. Knows nothing of CUDA's runtime.

NVML comes with every NVIDIA driver; where it cannot be asked, the answer is None and callers estimate.
"""

from __future__ import annotations

import ctypes


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def used_bytes(pci_bus_id: str) -> int | None:
    """Bytes in use on the GPU at a PCI address, by every process and the driver itself."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        handle, memory = ctypes.c_void_p(), _Memory()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(handle)) != 0:
            return None
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        return int(memory.used)
    finally:
        nvml.nvmlShutdown()
