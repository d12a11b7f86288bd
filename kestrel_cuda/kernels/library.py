"""Reads the CUDA sources, compiles them through NVRTC, launches kernels by keyword. Knows nothing of what they compute.

A kernel's signature lives in its `.cu` alone; it is parsed here and every launch is checked against it, since a launch
itself checks nothing: a missing argument or a wrong width would be read as garbage on the device.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from queue import Empty, Queue
from threading import Lock, Thread
from typing import Any

import numpy as np

from kestrel_cuda.errors import DeviceError, InternalError

ARCHITECTURES = (80, 86, 89, 90, 120)
"""Compute capabilities every kernel is compiled for in tests."""

FEATURE_ARCHITECTURES = {
    "attention_many_warpgroup": 90,
    "gemm_warpgroup": 90,
    "token_int4_boxed": 90,
    "token_int4_held": 90,
    "token_int4_one_split": 90,
    "token_int8_boxed": 90,
    "token_int8_held": 90,
    "token_int8_one_split": 90,
    "token_small": 90,
    "vision_attention_warpgroup": 90,
    "vision_linear_warpgroup": 90,
}
"""Files with instructions that one architecture alone has, and which: they are compiled for it with its own features
(sm_90a) and for no other."""

_INCLUDE = re.compile(r'#include "(\w+\.cuh)"\n')
_SIGNATURE = re.compile(
    r'extern "C" __global__ void\s*(?:__launch_bounds__\([^)]*(?:\([^)]*\)[^)]*)*\)\s*)?(\w+)\s*\(([^)]*)\)\s*\{', re.S
)
_PARAMETER = re.compile(r"(?:const )?(\w+)\s*(\*?)\s*(\w+)")
_MACRO = re.compile(r"#define (\w+)\(([\w, ]+)\)(.*?[^\\])\n", re.S)
_SCALARS: dict[str, Callable[[Any], Any]] = {"int": np.int32, "float": np.float32, "i64": np.int64}
_INTEGERS = (int, np.integer)
_NUMBERS = (*_INTEGERS, float, np.floating)
_C_TYPES = {"int": ctypes.c_int, "float": ctypes.c_float, "i64": ctypes.c_longlong}
_POINTEES = {
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
_IN_PLACE = {"CopyMap": COPY_MAP}
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
        return not self.is_pointer and self.c_type in _IN_PLACE


@dataclass(frozen=True)
class Signature:
    """A kernel's name and parameters, as its source declares them."""

    name: str
    parameters: tuple[Parameter, ...]


def kernel_files() -> list[str]:
    """Names (without suffix) of the .cu files in this package."""
    return sorted(entry.name[:-3] for entry in files(__package__).iterdir() if entry.name.endswith(".cu"))


@cache
def source(name: str) -> str:
    """A .cu file with every .cuh it includes put in its place, so that the text alone decides what is compiled."""
    folder = files(__package__)
    text = (folder / f"{name}.cu").read_text(encoding="utf-8")

    def put_in(include: re.Match[str]) -> str:
        next_line = text.count("\n", 0, include.start()) + 2
        included = (folder / include[1]).read_text(encoding="utf-8")
        return f'#line 1 "{include[1]}"\n{included}\n#line {next_line} "{name}.cu"\n'

    return _INCLUDE.sub(put_in, text)


def _expand_macros(text: str) -> str:
    """Kernels that a file stamps out by macro, written out so that their signatures can be read."""
    written = []
    for macro, names, body in _MACRO.findall(text):
        parameters = [n.strip() for n in names.split(",")]
        for call in re.findall(rf"^{macro}\(([^)]*)\)$", text, re.M):
            expanded = body.replace("\\\n", "\n")
            for parameter, argument in zip(parameters, [a.strip() for a in call.split(",")], strict=True):
                expanded = re.sub(rf"(?:##)?\b{parameter}\b", argument, expanded)
            written.append(expanded.replace("##", ""))
    return _MACRO.sub("", text) + "\n".join(written)


@cache
def signatures(name: str) -> dict[str, Signature]:
    """Every kernel of a .cu file. Raises InternalError for a parameter type this file does not know."""
    found = {}
    for kernel, parameters in _SIGNATURE.findall(_expand_macros(source(name))):
        parsed = []
        for text in (p.strip() for p in parameters.replace("\n", " ").split(",")):
            bare = text.removeprefix("const __grid_constant__ ")
            match = _PARAMETER.fullmatch(bare)
            values: Container[str] = _SCALARS if bare == text else _IN_PLACE
            if not match or match[1] not in (_POINTEES if match[2] else values):
                raise InternalError(f"{name}.cu: cannot read the parameter {text!r} of {kernel}")
            parsed.append(Parameter(match[3], match[1], bool(match[2])))
        found[kernel] = Signature(kernel, tuple(parsed))
    return found


def run_time_options() -> tuple[str, ...]:
    """Compiler options beside the architecture and `-ftz=true`, which CuPy adds itself."""
    return ("-std=c++17", "--fmad=false")


def architectures(name: str) -> tuple[int, ...]:
    """What a .cu file is compiled for."""
    return (FEATURE_ARCHITECTURES[name],) if name in FEATURE_ARCHITECTURES else ARCHITECTURES


def compile_options(name: str, arch: int) -> tuple[str, ...]:
    """Every option a .cu file is compiled with, the resource report included."""
    with_features = "a" if name in FEATURE_ARCHITECTURES else ""
    return (f"-arch=sm_{arch}{with_features}", *run_time_options(), "-ftz=true", "--ptxas-options=-v")


def compile_cubin(name: str, arch: int) -> tuple[bytes, str]:
    """Machine code of a .cu file for one architecture, and the compiler's log. Needs NVRTC, but no GPU.

    Raises InternalError with the log when the source does not compile.
    """
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(source(name), f"{name}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, compile_options(name, arch))
        except nvrtc.NVRTCError as error:
            raise InternalError(f"{name}.cu does not compile for sm_{arch}:\n{nvrtc.getProgramLog(program)}") from error
        # CuPy leaves out the last byte, a zero, without which no tool takes it for a whole file.
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


@cache
def driver_bindings_work() -> bool:
    """Whether cuda-bindings is there: for early launches and descriptions of matrices, which CuPy does not pass on."""
    try:
        from cuda.bindings import driver  # noqa: F401
    except ImportError:
        return False
    return True


UNASKED_SHARED_BYTES = 48 << 10
"""Shared memory, static and dynamic together, that a block may have without being allowed more."""


class Kernel:
    """One compiled kernel; call it with its launch shape and its parameters by name."""

    def __init__(self, signature: Signature, raw_kernel: Any, stream: Any) -> None:
        self.signature = signature
        self._takes_maps = any(parameter.is_read_in_place for parameter in signature.parameters)
        self._raw_kernel = raw_kernel
        self._launch = raw_kernel.kernel
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
        packed = []
        for parameter in self.signature.parameters:
            try:
                value = arguments.pop(parameter.name)
            except KeyError:
                raise InternalError(f"{self.signature.name}: no argument for {parameter.name}") from None
            packed.append(_pack(self.signature.name, parameter, value))
        if arguments:
            raise InternalError(f"{self.signature.name} takes no {', '.join(arguments)}")
        if shared_bytes > self._allowed_shared_bytes:
            self._raw_kernel.max_dynamic_shared_size_bytes = self._allowed_shared_bytes = shared_bytes
        if (dependent or all_at_once) and driver_bindings_work():
            self._launch_specially(grid, block, packed, shared_bytes, all_at_once)
        else:
            self._launch(grid, block, tuple(packed), shared_bytes, self._stream)

    def _launch_specially(
        self, grid: tuple[int, ...], block: tuple[int, ...], packed: list[Any], shared_bytes: int, all_at_once: bool
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
        values, types = [], []
        for parameter, value in zip(self.signature.parameters, packed, strict=True):
            values.append(value.data.ptr if parameter.is_pointer else value.item())
            types.append(ctypes.c_void_p if parameter.is_pointer else _C_TYPES[parameter.c_type])
        (status,) = driver.cuLaunchKernelEx(config, self._launch.ptr, (tuple(values), tuple(types)), 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise InternalError(f"{self.signature.name} was not launched: {status.name}")


def _pack(kernel: str, parameter: Parameter, value: Any) -> Any:
    if parameter.is_read_in_place:
        return _pack_in_place(kernel, parameter, value)
    if not parameter.is_pointer:
        if isinstance(value, _NUMBERS if parameter.c_type == "float" else _INTEGERS):
            try:
                return _SCALARS[parameter.c_type](value)
            except OverflowError:
                pass
        shown = value if isinstance(value, _NUMBERS) else type(value)
        raise InternalError(f"{kernel}: {parameter.name} takes one {parameter.c_type}, not {shown}")
    wanted = _POINTEES[parameter.c_type]
    found = getattr(value, "dtype", None)
    is_array = found is not None and not isinstance(value, np.generic)
    if not is_array or (wanted is not None and found != wanted and (wanted, found) not in _SAME_BITS):
        raise InternalError(f"{kernel}: {parameter.name} takes an array of {wanted}, not {found or type(value)}")
    return value


def _pack_in_place(kernel: str, parameter: Parameter, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype == _IN_PLACE[parameter.c_type] and value.size == 1:
            return value
        shown = f"{value.size} of {value.dtype}"
    else:
        shown = str(type(value))
    raise InternalError(f"{kernel}: {parameter.name} takes one {parameter.c_type}, not {shown}")


class KernelLibrary:
    """Every kernel of this package that a device can run, compiled when first asked for or before.

    `cubin_dir` holds NAME.cubin files compiled before, by `compile_cubin`, to be loaded instead.
    """

    def __init__(self, stream: Any, compute_capability: int, cubin_dir: Path | None = None, *, device: int = 0) -> None:
        self._stream, self._device = stream, device
        self._cubin_dir = cubin_dir
        served = [name for name in kernel_files() if FEATURE_ARCHITECTURES.get(name) in (None, compute_capability)]
        self._files = {kernel: name for name in served for kernel in signatures(name)}
        self._modules: dict[str, Future[Any]] = {}
        self._lock = Lock()
        self._kernels: dict[str, Kernel] = {}

    def __getitem__(self, name: str) -> Kernel:
        kernel = self._kernels.get(name)
        if kernel is None:
            file = self._files[name]
            function = self._module(file).get_function(name)
            kernel = self._kernels[name] = Kernel(signatures(file)[name], function, self._stream)
        return kernel

    def compile_beside(self, names: Iterable[str]) -> tuple[Callable[[], None], Callable[[], None]]:
        """Begin to compile and load files of kernels, in threads of their own.

        The first result waits for all of them, and raises DeviceError when one cannot be compiled; the second drops
        what has not been begun.
        """
        served = sorted(set(names) & set(self._files.values()))
        waiting: Queue[str] = Queue()
        for name in served:
            waiting.put(name)

        def compile_waiting() -> None:
            with suppress(Empty):
                while True:
                    name = waiting.get_nowait()
                    # Who waits compiles it again, and hears of it.
                    with suppress(Exception):
                        self._module(name)

        for _ in range(min(len(served), os.cpu_count() or 1)):
            # A process that ends does not wait for what it no longer needs.
            Thread(target=compile_waiting, name="compile", daemon=True).start()

        def wait() -> None:
            for name in served:
                self._module(name)

        def drop() -> None:
            with suppress(Empty):
                while True:
                    waiting.get_nowait()

        return wait, drop

    def _module(self, file: str) -> Any:
        begun = mine = Future[Any]()
        try:
            with self._lock:
                begun = self._modules.setdefault(file, mine)
            if begun is mine:
                mine.set_result(self._compile(file))
        except BaseException as error:
            # Not kept: the reason may be gone when someone asks again.
            with self._lock:
                if self._modules.get(file) is mine:
                    del self._modules[file]
            if not mine.done():
                interrupted = DeviceError(f"{file}.cu: interrupted")
                mine.set_exception(error if isinstance(error, Exception) else interrupted)
            raise
        return begun.result()

    def _compile(self, file: str) -> Any:
        import cupy

        if self._cubin_dir is not None:
            module = cupy.RawModule(path=str(self._cubin_dir / f"{file}.cubin"))
        else:
            # CuPy names the architecture after these options; of two, NVRTC 12.9 and 13.0 take the first.
            features = (f"-arch=sm_{FEATURE_ARCHITECTURES[file]}a",) if file in FEATURE_ARCHITECTURES else ()
            module = cupy.RawModule(code=source(file), options=(*features, *run_time_options()), backend="nvrtc")
        try:
            with cupy.cuda.Device(self._device):
                module.compile()
        # CuPy says with RuntimeError that NVRTC is not there.
        except (cupy.cuda.compiler.CompileException, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise DeviceError(f"the driver or NVRTC cannot compile {file}.cu: {reason}") from error
        return module
