"""Hands a kernel its arguments: checks each against the signature, and launches. Knows no source and compiles nothing.

A launch itself checks nothing: a missing argument or a wrong width would be read as garbage on the device.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, TypeAlias

import numpy as np

from kestrel_cuda.errors import InternalError

SCALARS: dict[str, Callable[[Any], Any]] = {"int": np.int32, "float": np.float32, "i64": np.int64}
_INTEGERS = (int, np.integer)
_NUMBERS = (*_INTEGERS, float, np.floating)
_STRUCT_FORMATS = {"int": "i", "float": "f", "i64": "q", "CopyMap": "128s"}
_C_TYPES = {"int": ctypes.c_int, "float": ctypes.c_float, "i64": ctypes.c_longlong}
POINTEES = {
    "void": None,
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "u16": np.dtype(np.uint16),
    "u32": np.dtype(np.uint32),
    "u64": np.dtype(np.uint64),
    "int": np.dtype(np.int32),
    "float": np.dtype(np.float32),
}
COPY_MAP = np.dtype([("words", np.uint64, 16)])
"""What a `CopyMap` is passed as, a NumPy array of one: the driver's description of a matrix to the copy engine."""

# Declared `const __grid_constant__`, so that the copy engine can read them where they were passed.
IN_PLACE = {"CopyMap": COPY_MAP}
_ARRAYS: set[type] = set()
"""Types that arguments had which were found to be arrays: NumPy's, CuPy's."""

# Arrays that hold raw bits or their float16 reading are the same to a kernel.
_SAME_BITS = {(np.dtype(np.uint16), np.dtype(np.float16)), (np.dtype(np.uint32), np.dtype(np.int8))}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: a value of `c_type`, or a pointer to it."""

    name: str
    c_type: str
    is_pointer: bool

    @property
    def is_read_in_place(self) -> bool:
        return not self.is_pointer and self.c_type in IN_PLACE


@dataclass(frozen=True)
class Signature:
    """A kernel's name and parameters, as its source declares them."""

    name: str
    parameters: tuple[Parameter, ...]


@cache
def launch_kernel() -> Callable[..., None]:
    """The driver's launch, as CuPy calls it."""
    from cupy_backends.cuda.api import driver

    function: Callable[..., None] = driver.launchKernel
    return function


@cache
def driver_bindings_work() -> bool:
    """Whether cuda-bindings is there: for early launches and descriptions of matrices, which CuPy does not pass on."""
    try:
        from cuda.bindings import driver  # noqa: F401
    except ImportError:
        return False
    return True


class DriverLaunch:
    """Hands a kernel's arguments to the driver from memory that is laid out once: a prompt's pass has 250 launches."""

    def __init__(self, signature: Signature, function: int, launch_kernel: Callable[..., None]) -> None:
        self._function, self._launch_kernel = function, launch_kernel
        formats = ["Q" if p.is_pointer else _STRUCT_FORMATS[p.c_type] for p in signature.parameters]
        self._layout = struct.Struct("".join(formats))
        self._packed = ctypes.create_string_buffer(self._layout.size)
        ends = (struct.calcsize("".join(formats[: i + 1])) for i in range(len(formats)))
        first = ctypes.addressof(self._packed)
        places = [first + end - struct.calcsize(own) for end, own in zip(ends, formats, strict=True)]
        self._places = (ctypes.c_void_p * len(places))(*places)
        self._address = ctypes.addressof(self._places)
        self._kinds = [(p.is_pointer, p.is_read_in_place) for p in signature.parameters]
        # The driver has copied them when a launch returns; until then no other thread may lay down its own.
        self._lock = Lock()

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], values: Sequence[Any], shared_bytes: int, stream: Any
    ) -> None:
        passed = [
            value.data.ptr if is_pointer else value.tobytes() if is_map else value
            for (is_pointer, is_map), value in zip(self._kinds, values, strict=True)
        ]
        grid_xyz, block_xyz = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        with self._lock:
            self._layout.pack_into(self._packed, 0, *passed)
            self._launch_kernel(self._function, *grid_xyz, *block_xyz, shared_bytes, stream.ptr, self._address, 0)


Launch: TypeAlias = Callable[[tuple[int, ...], tuple[int, ...], Sequence[Any], int, Any], None]
"""Grid, block, a value a parameter, bytes of dynamic shared memory, stream."""

UNASKED_SHARED_BYTES = 48 << 10
"""Shared memory, static and dynamic together, that a block may have without being allowed more."""


class Kernel:
    """One compiled kernel; call it with its launch shape and its parameters by name."""

    def __init__(self, signature: Signature, raw_kernel: Any, stream: Any, launch: Launch | None = None) -> None:
        self.signature = signature
        self._wanted = [
            (p.name, POINTEES[p.c_type] if p.is_pointer else None, None if p.is_pointer else p.c_type, p)
            for p in signature.parameters
        ]
        self._takes_maps = any(parameter.is_read_in_place for parameter in signature.parameters)
        self._raw_kernel = raw_kernel
        self._launch = launch or raw_kernel.kernel
        self._stream = stream
        self.static_shared_bytes = int(raw_kernel.shared_size_bytes)
        self._allowed_shared_bytes = UNASKED_SHARED_BYTES - self.static_shared_bytes

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        /,
        *,
        shared_bytes: int = 0,
        dependent: bool = False,
        all_at_once: bool = False,
        **arguments: Any,
    ) -> None:
        """Launch on the library's stream with `shared_bytes` of dynamic shared memory.

        A `dependent` launch may start before the kernel ahead of it is done; such a kernel waits for it by itself. Of
        one that is `all_at_once` no block starts before there is room for every block, whatever else the card runs.
        Raises InternalError when an argument does not fit the signature.
        """
        if (dependent or all_at_once) and self._takes_maps:
            raise InternalError(f"{self.signature.name} takes copy maps, which are passed to ordinary launches only")
        values = self._checked(arguments)
        if len(arguments) > len(values):
            unknown = arguments.keys() - {parameter.name for parameter in self.signature.parameters}
            raise InternalError(f"{self.signature.name} takes no {', '.join(sorted(unknown))}")
        if shared_bytes > self._allowed_shared_bytes:
            self._raw_kernel.max_dynamic_shared_size_bytes = self._allowed_shared_bytes = shared_bytes
        if (dependent or all_at_once) and driver_bindings_work():
            self._launch_specially(grid, block, values, shared_bytes, all_at_once)
        else:
            self._launch(grid, block, values, shared_bytes, self._stream)

    def _checked(self, arguments: dict[str, Any]) -> list[Any]:
        """A value a parameter. Nearly all fit at the first look: a launch costs the host as long as this."""
        values = []
        for name, dtype, scalar, parameter in self._wanted:
            try:
                value = arguments[name]
            except KeyError:
                raise InternalError(f"{self.signature.name}: no argument for {name}") from None
            kind = type(value)
            if not (
                (kind is int and scalar == "int" and -(1 << 31) <= value < 1 << 31)
                or (kind is float and scalar == "float")
                or (dtype is not None and kind in _ARRAYS and value.dtype is dtype)
            ):
                _check(self.signature.name, parameter, value)
            values.append(value)
        return values

    def _launch_specially(
        self, grid: tuple[int, ...], block: tuple[int, ...], values: list[Any], shared_bytes: int, all_at_once: bool
    ) -> None:
        from cuda.bindings import driver

        ids = driver.CUlaunchAttributeID
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = (*block, 1, 1)[:3]
        config.sharedMemBytes = shared_bytes
        config.hStream = self._stream.ptr
        attribute = driver.CUlaunchAttribute()
        if all_at_once:
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
        else:
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
        passed, types = [], []
        for parameter, value in zip(self.signature.parameters, values, strict=True):
            passed.append(value.data.ptr if parameter.is_pointer else SCALARS[parameter.c_type](value).item())
            types.append(ctypes.c_void_p if parameter.is_pointer else _C_TYPES[parameter.c_type])
        (status,) = driver.cuLaunchKernelEx(config, self._raw_kernel.kernel.ptr, (tuple(passed), tuple(types)), 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise InternalError(f"{self.signature.name} was not launched: {status.name}")


def _check(kernel: str, parameter: Parameter, value: Any) -> None:
    """Raises InternalError, with what was found and what is wanted, where the parameter does not take the value."""
    if parameter.is_read_in_place:
        _check_in_place(kernel, parameter, value)
        return
    if not parameter.is_pointer:
        if isinstance(value, _NUMBERS if parameter.c_type == "float" else _INTEGERS):
            try:
                SCALARS[parameter.c_type](value)
                return
            except OverflowError:
                pass
        shown = value if isinstance(value, _NUMBERS) else type(value)
        raise InternalError(f"{kernel}: {parameter.name} takes one {parameter.c_type}, not {shown}")
    wanted = POINTEES[parameter.c_type]
    found = getattr(value, "dtype", None)
    is_array = found is not None and not isinstance(value, np.generic)
    if not is_array or (wanted is not None and found != wanted and (wanted, found) not in _SAME_BITS):
        raise InternalError(f"{kernel}: {parameter.name} takes an array of {wanted}, not {found or type(value)}")
    _ARRAYS.add(type(value))


def _check_in_place(kernel: str, parameter: Parameter, value: Any) -> None:
    if isinstance(value, np.ndarray):
        if value.dtype == IN_PLACE[parameter.c_type] and value.size == 1:
            return
        shown = f"{value.size} of {value.dtype}"
    else:
        shown = str(type(value))
    raise InternalError(f"{kernel}: {parameter.name} takes one {parameter.c_type}, not {shown}")
