"""What the CUDA sources say of themselves (constants, bounds, layouts), and a kernel library that launches nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kestrel_cuda.kernels import launch, library


def expanded(name: str) -> str:
    """A source with its kernels written out, macros and all."""
    return library._expand_macros(library.source(name))


def constants(name: str) -> dict[str, int]:
    """The integer constants of a .cu file and of common.cuh; those that depend on a template are left out."""
    found: dict[str, int] = {}
    for constant, expression in re.findall(r"constexpr int (\w+) = ([^;]+);", library.source(name)):
        try:
            found[constant] = eval(expression.replace("/", "//"), {"__builtins__": {}}, found)
        except (NameError, SyntaxError):
            continue
    return found


def launch_bounds(name: str) -> dict[str, int]:
    """Threads a block of each kernel may have."""
    pattern = r"__launch_bounds__\(([^,)]+)(?:, \w+)?\)\s*(\w+)\("
    return {kernel: eval(threads, {}, constants(name)) for threads, kernel in re.findall(pattern, expanded(name))}


_ITEM_BYTES = {"i8": 1, "u16": 2, "u32": 4, "float": 4, "int": 4, "uint4": 16}


def struct_bytes(name: str, struct: str, head_dim: int) -> int:
    """sizeof of the arrays of a struct that is a template over the head dim; a union counts as its largest member."""
    text = library.source(name)
    known: dict[str, int] = constants(name) | {"kHeadDim": head_dim}

    def value(expression: str) -> int:
        expression = re.sub(r"\w+<kHeadDim>::", "", expression).replace("/", "//")
        expression = re.sub(r"([^()?]+) \? ([^():]+) : ([^()]+)", r"\2 if \1 else \3", expression)
        return int(eval(expression, {"__builtins__": {}}, known))

    bodies = {
        found[1]: found[2]
        for found in re.finditer(r"^struct (?:__align__\(\d+\) )?(\w+) \{\n(.*?)^\};", text, re.M | re.S)
    }
    for body in (bodies["Shape"], bodies[struct]):
        for constant, expression in re.findall(r"static constexpr int (\w+) = ([^;]+);", body):
            known[constant] = value(expression)

    def arrays(body: str) -> list[int]:
        found = []
        for item, declared in re.findall(rf"^ +({'|'.join(_ITEM_BYTES)}) ([^;=()]+);", body, re.M):
            for lengths in re.findall(r"\w+((?:\[[^]]+\])+)", declared):
                factors = [value(length) for length in re.findall(r"\[([^]]+)\]", lengths)]
                found.append(_ITEM_BYTES[item] * int(np.prod(factors)))
        return found

    union = re.search(r"^    union \{\n(.*?)^    \};\n", bodies[struct], re.M | re.S)
    rest = bodies[struct].replace(union[0], "") if union else bodies[struct]
    return sum(arrays(rest)) + (max(arrays(union[1])) if union else 0)


def few_queries_bytes(name: str, cache: str, head_dim: int) -> int:
    """The arrays of attention_few.cuh's `FewQueries`, with the new key of a cache of that kind."""
    new_row = {"f16": "HalfRow", "q8": "Int8Row"}[cache]
    return struct_bytes(name, "FewQueries", head_dim) + struct_bytes(name, new_row, head_dim)


def few_weights_bytes(name: str) -> int:
    """The arrays of attention_few.cuh's `FewWeights`."""
    return struct_bytes(name, "FewWeights", 0)


def many_rows_bytes(name: str, cache: str, head_dim: int) -> int:
    """The arrays of attention_many.cuh's `ManyRows` with the stages of its ring."""
    stages = {"f16": "HalfStages", "q8": "Int8Stages"}[cache]
    return struct_bytes(name, "ManyRows", head_dim) + struct_bytes(name, stages, head_dim)


def tile_stage_bytes(bits: int, rows: int, columns: int) -> int:
    """sizeof of the `Stage` of one of gemm.cu's tiles: arrays of four-byte elements, one a line."""
    tile = re.search(r"^struct Tile \{\n(.*?)^\};", library.source("gemm"), re.M | re.S)
    assert tile
    known: dict[str, int] = constants("gemm") | {"kBits": bits, "kTileM": rows, "kTileN": columns}

    def value(expression: str) -> int:
        expression = re.sub(r"(kBits == 8) \? (\d+) : (\d+)", r"\2 if \1 else \3", expression).replace("/", "//")
        return int(eval(expression, {"__builtins__": {}}, known))

    for constant, expression in re.findall(r"constexpr int (k(?:Words|\w+Words)) = ([^;]+);", tile[1]):
        known[constant] = value(expression)
    arrays = re.findall(r"^        (?:u32|float) \w+\[([^]]+)\]\[([^]]+)\];", tile[1], re.M)
    assert len(arrays) == 4
    return sum(4 * value(outer) * value(inner) for outer, inner in arrays)


def static_shared_bytes(kernel: str) -> int:
    """Shared memory that a kernel declares beside its dynamic part; 0 for one that never has both."""
    if found := re.fullmatch(r"attend_(?:split|row)_(f16|q8)_(\d+)", kernel):
        shared_bytes = few_queries_bytes("attention_few", found[1], int(found[2])) + few_weights_bytes("attention_few")
        return shared_bytes + (16 if "row" in kernel else 0)
    if kernel.startswith("decode_token_"):
        return 1 << 10  # about
    if kernel.startswith("norm_"):
        return constants("decode")["kNormThreads"] // constants("decode")["kWarp"] * 4
    return 0


ALL_KERNELS = {kernel: name for name in library.kernel_files() for kernel in library.signatures(name)}


@dataclass
class FakeRawKernel:
    """What a kernel is handed, instead of a launch."""

    launches: list[tuple[Any, ...]] = field(default_factory=list)
    num_early: int = 0
    num_at_once: int = 0
    shared_size_bytes: int = 0
    max_dynamic_shared_size_bytes: int = 0

    def kernel(self, *launch: Any) -> None:
        self.launches.append(launch)


class FakeKernel(launch.Kernel):
    """A kernel whose special launches are counted and otherwise like any other."""

    def __call__(
        self, *shape: tuple[int, ...], dependent: bool = False, all_at_once: bool = False, **options: Any
    ) -> None:
        self._raw_kernel.num_early += dependent
        self._raw_kernel.num_at_once += all_at_once
        super().__call__(*shape, **options)


class FakeLibrary(dict[str, launch.Kernel]):
    """Kernels by name, as the sources declare them; a name that no source declares is a KeyError."""

    def __init__(self) -> None:
        self.raw = {kernel: FakeRawKernel(shared_size_bytes=static_shared_bytes(kernel)) for kernel in ALL_KERNELS}
        stream = object()
        super().__init__(
            (kernel, FakeKernel(library.signatures(name)[kernel], self.raw[kernel], stream))
            for kernel, name in ALL_KERNELS.items()
        )

    @property
    def launches(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], int]]:
        """Kernel, grid, block and dynamic shared memory of every launch."""
        for kernel, raw in self.raw.items():
            for grid, block, _, shared_bytes, _ in raw.launches:
                yield kernel, grid, block, shared_bytes
