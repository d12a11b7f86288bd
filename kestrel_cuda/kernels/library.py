"""Reads the CUDA sources, compiles them through NVRTC, gives out kernels by name. Knows nothing of what they compute.

A kernel's signature lives in its `.cu` alone; it is parsed here, and every launch is checked against it (launch.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from queue import Empty, Queue
from threading import Lock, Thread
from typing import Any

from kestrel_cuda.errors import DeviceError, InternalError
from kestrel_cuda.kernels.launch import (
    IN_PLACE,
    POINTEES,
    SCALARS,
    DriverLaunch,
    Kernel,
    Parameter,
    Signature,
    launch_kernel,
)

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


def kernel_files() -> list[str]:
    """Names (without suffix) of the .cu files in this package."""
    return sorted(entry.name[:-3] for entry in files(__package__).iterdir() if entry.name.endswith(".cu"))


def file_of(part: str) -> str:
    """The file of a part, "FILE:WANTED" or "FILE" alone."""
    return part.partition(":")[0]


@cache
def source(part: str) -> str:
    """A .cu file with every .cuh it includes put in its place, so that the text alone decides what is compiled.

    A part "FILE:WANTED" leaves out the kernels that the file stamps out by macro for something else: those with no
    argument that is `WANTED` or ends in it behind an underscore.
    """
    name, _, wanted = part.partition(":")
    folder = files(__package__)
    text = (folder / f"{name}.cu").read_text(encoding="utf-8")

    def put_in(include: re.Match[str]) -> str:
        next_line = text.count("\n", 0, include.start()) + 2
        included = (folder / include[1]).read_text(encoding="utf-8")
        return f'#line 1 "{include[1]}"\n{included}\n#line {next_line} "{name}.cu"\n'

    def is_wanted(stamp: re.Match[str]) -> bool:
        arguments = [argument.strip() for argument in stamp[1].split(",")]
        return any(argument == wanted or argument.endswith(f"_{wanted}") for argument in arguments)

    text = _INCLUDE.sub(put_in, text)
    if wanted:
        for macro, _, _ in _MACRO.findall(text):
            text = re.sub(
                rf"^{macro}\(([^)\n]*)\)$", lambda stamp: stamp[0] if is_wanted(stamp) else "", text, flags=re.M
            )
    return text


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
def signatures(part: str) -> dict[str, Signature]:
    """Every kernel of a .cu file or a part. Raises InternalError for a parameter type this file does not know."""
    found = {}
    for kernel, parameters in _SIGNATURE.findall(_expand_macros(source(part))):
        parsed = []
        for text in (p.strip() for p in parameters.replace("\n", " ").split(",")):
            bare = text.removeprefix("const __grid_constant__ ")
            match = _PARAMETER.fullmatch(bare)
            values: Container[str] = SCALARS if bare == text else IN_PLACE
            if not match or match[1] not in (POINTEES if match[2] else values):
                raise InternalError(f"{file_of(part)}.cu: cannot read the parameter {text!r} of {kernel}")
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


class KernelLibrary:
    """Every kernel of this package that a device can run, compiled when first asked for or before.

    `cubin_dir` holds NAME.cubin files compiled before, by `compile_cubin`, to be loaded instead.
    """

    def __init__(self, stream: Any, compute_capability: int, cubin_dir: Path | None = None, *, device: int = 0) -> None:
        self._stream, self._device = stream, device
        self._cubin_dir = cubin_dir
        served = [name for name in kernel_files() if FEATURE_ARCHITECTURES.get(name) in (None, compute_capability)]
        self._files = {kernel: name for name in served for kernel in signatures(name)}
        self._parts: dict[str, str] = {}
        self._modules: dict[str, Future[Any]] = {}
        self._lock = Lock()
        self._kernels: dict[str, Kernel] = {}

    def __getitem__(self, name: str) -> Kernel:
        kernel = self._kernels.get(name)
        if kernel is None:
            file = self._files[name]
            signature = signatures(file)[name]
            function = self._module(self._parts.get(name, file)).get_function(name)
            launch = DriverLaunch(signature, function.kernel.ptr, launch_kernel())
            kernel = self._kernels[name] = Kernel(signature, function, self._stream, launch)
        return kernel

    def compile_beside(self, parts: Iterable[str]) -> tuple[Callable[[], None], Callable[[], None]]:
        """Begin to compile and load files of kernels, or parts of files (`source`), in threads of their own.

        Who asks for another kernel of such a file later waits for the whole of it.
        The first result waits for all of them, and raises DeviceError when one cannot be compiled; the second drops
        what has not been begun.
        """
        has_parts = self._cubin_dir is None
        names = {part if has_parts else file_of(part) for part in parts}
        served = sorted(name for name in names if file_of(name) in self._files.values())
        waiting: Queue[str] = Queue()
        for name in served:
            if name != file_of(name):
                # A part begun before may have been dropped.
                self._parts |= dict.fromkeys(signatures(name), name)
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

    def _module(self, part: str) -> Any:
        begun = mine = Future[Any]()
        try:
            with self._lock:
                begun = self._modules.setdefault(part, mine)
            if begun is mine:
                mine.set_result(self._compile(part))
        except BaseException as error:
            # Not kept: the reason may be gone when someone asks again.
            with self._lock:
                if self._modules.get(part) is mine:
                    del self._modules[part]
            if not mine.done():
                interrupted = DeviceError(f"{file_of(part)}.cu: interrupted")
                mine.set_exception(error if isinstance(error, Exception) else interrupted)
            raise
        return begun.result()

    def _compile(self, part: str) -> Any:
        import cupy

        file = file_of(part)
        if self._cubin_dir is not None:
            module = cupy.RawModule(path=str(self._cubin_dir / f"{file}.cubin"))
        else:
            # CuPy names the architecture after these options; of two, NVRTC 12.9 and 13.0 take the first.
            features = (f"-arch=sm_{FEATURE_ARCHITECTURES[file]}a",) if file in FEATURE_ARCHITECTURES else ()
            module = cupy.RawModule(code=source(part), options=(*features, *run_time_options()), backend="nvrtc")
        try:
            with cupy.cuda.Device(self._device):
                module.compile()
        # CuPy says with RuntimeError that NVRTC is not there.
        except (cupy.cuda.compiler.CompileException, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise DeviceError(f"the driver or NVRTC cannot compile {file}.cu: {reason}") from error
        return module
