"""Counts what a process asks of the CUDA driver, by CUPTI's callbacks. Knows nothing of engines.

CUPTI comes with the CUDA toolkit and with PyTorch's wheels; nothing else here needs either.
"""

from __future__ import annotations

import ctypes
import site
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

DRIVER_API, RUNTIME_API, SYNCHRONIZE = 1, 2, 4  # CUpti_CallbackDomain
CONTEXT_SYNCHRONIZED = 2  # CUpti_CallbackIdSync
ENTERED = 0  # CUpti_ApiCallbackSite
TAKES_OR_GIVES_MEMORY = ("MemAlloc", "MemFree", "cudaMalloc", "cudaFree", "MemHost", "HostAlloc", "HostRegister")


class _CallbackData(ctypes.Structure):
    """The head of CUpti_CallbackData."""

    _fields_ = (("site", ctypes.c_int), ("function_name", ctypes.c_char_p))


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_CallbackData))


@dataclass
class DriverCalls:
    """Calls by name, the driver's and the runtime's, and how often the whole device was waited for."""

    calls: Counter[str] = field(default_factory=Counter)
    device_synchronizations: int = 0

    @property
    def memory_calls(self) -> dict[str, int]:
        return {name: n for name, n in self.calls.items() if any(part in name for part in TAKES_OR_GIVES_MEMORY)}


def find_cupti() -> Path | None:
    """The newest libcupti of a toolkit or of a wheel, or None."""
    toolkits = sorted(Path("/usr/local").glob("cuda*/extras/CUPTI/lib64/libcupti.so.*"))
    wheels = [path for folder in site.getsitepackages() for path in Path(folder).glob("nvidia/*/lib/libcupti.so.*")]
    found = sorted((*toolkits, *wheels), key=lambda path: path.name)
    return found[-1] if found else None


@contextmanager
def counted_driver_calls(cupti_path: Path) -> Iterator[DriverCalls]:
    """Count every call made inside. Raises RuntimeError when CUPTI refuses (another tool may hold it)."""
    cupti = ctypes.CDLL(str(cupti_path))
    counts = DriverCalls()

    def count(_: int, domain: int, callback_id: int, data: ctypes._Pointer[_CallbackData]) -> None:
        if domain == SYNCHRONIZE:
            counts.device_synchronizations += callback_id == CONTEXT_SYNCHRONIZED
        elif data[0].site == ENTERED:
            counts.calls[data[0].function_name.decode()] += 1

    callback, subscriber = _Callback(count), ctypes.c_void_p()
    _check(cupti.cuptiSubscribe(ctypes.byref(subscriber), callback, None))
    try:
        for domain in (DRIVER_API, RUNTIME_API, SYNCHRONIZE):
            _check(cupti.cuptiEnableDomain(1, subscriber, domain))
        yield counts
    finally:
        cupti.cuptiUnsubscribe(subscriber)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUPTI refused with status {status}")
