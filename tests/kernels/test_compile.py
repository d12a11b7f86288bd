"""Every kernel compiles for every supported card, with the run-time options and without spills; needs no GPU.

`pytest -rP tests/kernels/test_compile.py` shows each kernel's registers and shared memory.
"""

from __future__ import annotations

import re
import struct
from concurrent.futures import Future
from typing import NamedTuple

import pytest

from kestrel_cuda.kernels import library

PTXAS_FUNCTION = re.compile(
    r"Function properties for (?P<name>\S+)\s+"
    r"ptxas\s+\.?\s*(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"(?:\s+ptxas info\s+: Used (?P<registers>\d+) registers(?P<rest>[^\n]*))?"
)


class FunctionUse(NamedTuple):
    """What ptxas says of one function: bytes of local memory by cause, and what it uses on the multiprocessor."""

    name: str
    stack_bytes: int
    spill_bytes: int
    usage: str


def parse_ptxas(log: str) -> list[FunctionUse]:
    """The functions of a `--ptxas-options=-v` log; `usage` is empty for one that is not a kernel."""
    return [
        FunctionUse(
            match["name"],
            int(match["stack"]),
            int(match["stores"]) + int(match["loads"]),
            f"{match['registers']} registers{match['rest']}" if match["registers"] else "",
        )
        for match in PTXAS_FUNCTION.finditer(log)
    ]


def test_a_spill_and_a_stack_frame_are_seen() -> None:
    log = """ptxas info    : Compiling entry function 'gemv' for 'sm_90'
ptxas info    : Function properties for gemv
ptxas         .     256 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 128 bytes smem
ptxas info    : Function properties for _Z6helperfi
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
    assert parse_ptxas(log) == [
        FunctionUse("gemv", 256, 20, "32 registers, used 1 barriers, 128 bytes smem"),
        FunctionUse("_Z6helperfi", 0, 0, ""),
    ]


SPILLS = {"decode_token_int4_128_boxed": 28, "decode_token_int8_128_boxed": 28}
"""Bytes written and read. What a token's warps, of 112 registers, spill does not stay in what is left of the
first-level cache: 24 to 32 bytes of stack a thread cost 8 % of a token."""


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        (name, arch)
        for arch in library.ARCHITECTURES
        for name in library.kernel_files()
        if arch in library.architectures(name)
    ],
)
def test_compiles_without_spills(
    compiled: dict[tuple[str, int], Future[tuple[bytes, str]]], name: str, arch: int
) -> None:
    cubin, log = compiled[name, arch].result()
    assert cubin.startswith(b"\x7fELF")
    headers_at, size, count = struct.unpack_from("<Q", cubin, 32)[0], *struct.unpack_from("<HH", cubin, 54)
    assert headers_at + size * count <= len(cubin), "cut off"
    functions = parse_ptxas(log)
    assert any(function.usage for function in functions), f"no kernel in the log of {name}:\n{log}"
    for function in functions:
        print(f"sm_{arch} {name} {function.name}: {function.usage}")
    assert "instructions are serialized" not in log, log
    in_local_memory = [f for f in functions if max(f.stack_bytes, f.spill_bytes) > SPILLS.get(f.name, 0)]
    assert not in_local_memory, f"{name} for sm_{arch} keeps registers in local memory: {in_local_memory}"
