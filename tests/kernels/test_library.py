"""Signatures read out of the sources, and arguments against them; needs neither a GPU nor CuPy."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from threading import Barrier, Event
from threading import enumerate as threads
from types import SimpleNamespace

import pytest

from kestrel_cuda.errors import DeviceError, InternalError
from kestrel_cuda.kernels import launch, library
from tests.kernel_sources import ALL_KERNELS, expanded


class TestParsing:
    @pytest.mark.parametrize("name", library.kernel_files())
    def test_every_kernel_of_a_file_is_read(self, name: str) -> None:
        assert len(library.signatures(name)) == expanded(name).count('extern "C" __global__')

    def test_kernels_written_by_macro_are_read(self) -> None:
        sizes = [f"{cache}_{d}" for cache in ("f16", "f32") for d in (16, 32, 64, 128)]
        assert {f"attend_{kind}_{size}" for kind in ("split", "tiled") for size in sizes} <= ALL_KERNELS.keys()
        assert {f"attend_row_f16_{d}" for d in (16, 32, 64, 128)} <= ALL_KERNELS.keys()
        half = library.signatures("attention_few")["attend_split_f16_64"]
        wide = library.signatures("attention")["attend_split_f32_64"]
        assert [p.c_type for p in half.parameters if p.name == "k_hsd"] == ["u16"]
        assert [p.c_type for p in wide.parameters if p.name == "k_hsd"] == ["float"]

    def test_no_two_files_have_a_kernel_of_the_same_name(self) -> None:
        assert len(ALL_KERNELS) == sum(len(library.signatures(name)) for name in library.kernel_files())

    def test_copy_maps_are_read(self) -> None:
        parameters = library.signatures("gemm_warpgroup")["linear_warpgroups_int8"].parameters
        assert [p for p in parameters if p.is_read_in_place] == [
            launch.Parameter(name, "CopyMap", False) for name in ("x_map", "codes_map", "scales_map")
        ]

    def test_a_copy_map_is_what_the_kernels_declare(self) -> None:
        declared = re.search(
            r"struct CopyMap \{\n    alignas\(64\) u64 words\[(\d+)\];", library.source("gemm_warpgroup")
        )
        assert declared
        assert launch.COPY_MAP.itemsize == 8 * int(declared[1]) == 128

    @pytest.mark.parametrize(
        "parameter",
        ["const double* x", "CopyMap x", "const CopyMap x", "const CopyMap* x", "__grid_constant__ CopyMap x",
         "const __grid_constant__ int x", "const __grid_constant__ Cut x"],
    )  # fmt: skip
    def test_an_unknown_parameter_type_is_refused(self, monkeypatch: pytest.MonkeyPatch, parameter: str) -> None:
        monkeypatch.setattr(
            library, "source", lambda name: f'extern "C" __global__ void f({parameter}, int n) {{\n}}\n'
        )
        refusal = f"odd.cu: cannot read the parameter '{parameter}' of f"
        with pytest.raises(InternalError, match=re.escape(refusal)):
            library.signatures.__wrapped__("odd")


def test_a_card_has_the_kernels_that_run_on_it() -> None:
    one_architecture = {
        kernel: arch for name, arch in library.FEATURE_ARCHITECTURES.items() for kernel in library.signatures(name)
    }
    for capability in (*library.ARCHITECTURES, 103):
        served = library.KernelLibrary(None, capability)._files.keys()
        others = {kernel for kernel, arch in one_architecture.items() if arch != capability}
        assert served == ALL_KERNELS.keys() - others, capability


def test_features_are_asked_for_where_they_are_needed() -> None:
    assert "-arch=sm_90" in library.compile_options("gemm", 90)
    assert "-arch=sm_90a" in library.compile_options("gemm_warpgroup", 90)
    assert library.architectures("gemm") == library.ARCHITECTURES
    assert library.architectures("gemm_warpgroup") == (90,)


class TestParts:
    @pytest.mark.parametrize("part", ["gemm:int8", "gemv:int4", "attention:f32_64", "attention_many_warpgroup:128"])
    def test_a_part_has_the_kernels_stamped_out_for_it_and_those_that_are_not_stamped_out(self, part: str) -> None:
        whole, some = library.signatures(library.file_of(part)), library.signatures(part)
        wanted = part.partition(":")[2]
        assert {kernel for kernel in whole if kernel.endswith(f"_{wanted}")} <= some.keys() < whole.keys()
        assert all(whole[kernel] == signature for kernel, signature in some.items())
        other = {"int8": "int4", "int4": "int8", "f32_64": "f32_128", "128": "_64"}[wanted]
        assert not any(kernel.endswith(other) for kernel in some)

    def test_lines_keep_their_numbers(self) -> None:
        assert library.source("gemm:int4").count("\n") == library.source("gemm").count("\n")

    def test_every_part_together_is_the_whole(self) -> None:
        parts = (library.signatures(f"attention_few:f16_{d}") for d in (16, 32, 64, 128))
        assert {kernel for part in parts for kernel in part} == library.signatures("attention_few").keys()


class TestCompilingBeside:
    @pytest.fixture
    def compiled(self, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
        """How often each file was compiled; "norm" cannot be."""
        count: Counter[str] = Counter()

        def compile_file(_library: library.KernelLibrary, file: str) -> str:
            count[file] += 1
            if file == "norm":
                raise DeviceError("cannot compile norm.cu")
            return f"module of {file}"

        monkeypatch.setattr(library.KernelLibrary, "_compile", compile_file)
        return count

    def test_each_file_is_compiled_once(self, compiled: Counter[str]) -> None:
        kernels = library.KernelLibrary(None, 80)
        (first, _), (second, _) = kernels.compile_beside(["gemv", "rope"]), kernels.compile_beside(["rope", "gemm"])
        first()
        second()
        assert kernels._module("rope") == "module of rope"
        assert compiled == {"gemv": 1, "rope": 1, "gemm": 1}

    def test_files_that_the_card_does_not_have_are_left_out(self, compiled: Counter[str]) -> None:
        wait, _ = library.KernelLibrary(None, 80).compile_beside(["token_small", "gemv"])
        wait()
        assert compiled == {"gemv": 1}

    def test_who_asks_for_what_no_part_has_gets_the_whole_file(
        self, compiled: Counter[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernels = library.KernelLibrary(None, 80)
        wait, _ = kernels.compile_beside(["gemm:int8", "rope"])
        wait()
        assert compiled == {"gemm:int8": 1, "rope": 1}
        modules = []
        monkeypatch.setattr(library, "Kernel", lambda signature, *_: signature.name)
        monkeypatch.setattr(library, "DriverLaunch", lambda *_: None)
        monkeypatch.setattr(library, "launch_kernel", lambda: None)

        def function_of(_library: library.KernelLibrary, part: str) -> SimpleNamespace:
            modules.append(part)
            return SimpleNamespace(get_function=lambda _name: SimpleNamespace(kernel=SimpleNamespace(ptr=0)))

        monkeypatch.setattr(library.KernelLibrary, "_module", function_of)
        assert [kernels[f"linear_tiles_{element}"] for element in ("int8", "int4")]
        assert modules == ["gemm:int8", "gemm"]

    def test_a_kernel_that_parts_share_comes_from_the_last(self, compiled: Counter[str]) -> None:
        """Parts begun before may have been dropped."""
        kernels = library.KernelLibrary(None, 80)
        for part in ("attention:f32_64", "attention:f32_128"):
            kernels.compile_beside([part])
            assert kernels._parts["attend_merge"] == part

    def test_machine_code_is_of_whole_files(self, compiled: Counter[str], tmp_path: Path) -> None:
        wait, _ = library.KernelLibrary(None, 80, tmp_path).compile_beside(["gemm:int8", "gemm:int4"])
        wait()
        assert compiled == {"gemm": 1}

    def test_files_are_compiled_at_the_same_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        both = Barrier(2)
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        monkeypatch.setattr(library.KernelLibrary, "_compile", lambda _library, _file: both.wait(timeout=30))
        wait, _ = library.KernelLibrary(None, 80).compile_beside(["gemv", "rope"])
        wait()

    def test_what_is_dropped_before_it_began_never_begins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begun, goes_on, count = Event(), Event(), Counter[str]()

        def compile_slowly(_library: library.KernelLibrary, file: str) -> str:
            count[file] += 1
            begun.set()
            assert goes_on.wait(timeout=30)
            return file

        monkeypatch.setattr("os.cpu_count", lambda: 1)
        monkeypatch.setattr(library.KernelLibrary, "_compile", compile_slowly)
        kernels = library.KernelLibrary(None, 80)
        _, drop = kernels.compile_beside(["gemm", "gemv", "rope"])
        assert begun.wait(timeout=30)
        drop()
        goes_on.set()
        assert kernels._module("gemm") == "gemm"
        assert [thread for thread in threads() if thread.name == "compile" and not thread.daemon] == []
        for thread in threads():
            if thread.name == "compile":
                thread.join(timeout=30)
        assert count == {"gemm": 1}

    def test_what_cannot_be_compiled_is_said_to_who_waits_and_to_who_asks(self, compiled: Counter[str]) -> None:
        kernels = library.KernelLibrary(None, 80)
        wait, _ = kernels.compile_beside(["norm", "gemv"])
        for ask in (wait, lambda: kernels["rms_norm"]):
            with pytest.raises(DeviceError, match=r"cannot compile norm\.cu"):
                ask()
        assert kernels._module("gemv") == "module of gemv"

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space left"), DeviceError("out of memory")])
    def test_a_failure_is_not_kept(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        outcomes = [error, None]

        def compile_file(_library: library.KernelLibrary, file: str) -> str:
            if outcome := outcomes.pop(0):
                raise outcome
            return file

        monkeypatch.setattr(library.KernelLibrary, "_compile", compile_file)
        kernels = library.KernelLibrary(None, 80)
        with pytest.raises(type(error)):
            kernels._module("gemv")
        assert kernels._module("gemv") == "gemv"
