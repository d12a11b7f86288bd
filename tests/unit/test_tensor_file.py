"""One safetensors file: damaged headers by name, and a look for values that are not finite."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel_cuda.checkpoint import tensor_file
from kestrel_cuda.checkpoint.tensor_file import RawTensor, TensorFile, first_nonfinite_row
from kestrel_cuda.errors import CheckpointError

DTYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
PATTERNS = {  # bits of an infinity, a NaN of either sign, and the largest finite value
    "BF16": (np.uint16, [0x7F80, 0xFF80, 0x7F81, 0xFFFF], 0x7F7F),
    "F16": (np.uint16, [0x7C00, 0xFC00, 0x7C01, 0xFFFF], 0x7BFF),
    "F32": (np.uint32, [0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF], 0x7F7FFFFF),
}


def raw(dtype: Any, bits: np.ndarray[Any, Any]) -> RawTensor:
    return RawTensor("embedding", dtype, bits.shape, bits.view(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", list(PATTERNS))
def test_the_first_row_that_is_not_finite(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_SCAN_VALUES", 100)  # rows of 7 cross the pieces
    unsigned, patterns, largest = PATTERNS[dtype]
    bits = np.full((60, 7), largest, unsigned)
    bits[::2] |= unsigned(1 << (8 * bits.itemsize - 1))
    bits[3] = 0
    assert first_nonfinite_row(raw(dtype, bits)) is None
    for pattern in patterns:
        for row, column in ((0, 0), (14, 1), (14, 2), (59, 6)):
            damaged = bits.copy()
            damaged[row, column] = pattern
            damaged[59, 6] = pattern
            assert first_nonfinite_row(raw(dtype, damaged)) == row


def test_a_vector_and_an_empty_tensor() -> None:
    assert first_nonfinite_row(raw("BF16", np.array([0, 0x7F80], np.uint16))) == 1
    assert first_nonfinite_row(raw("F32", np.zeros((0, 4), np.uint32))) is None
    assert first_nonfinite_row(raw("F32", np.zeros((4, 0), np.uint32))) is None


# Headers


def error_of(path: Path, header: bytes, length: int | None = None) -> str:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError) as caught:
        TensorFile(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0.5, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, True]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
        {"dtype": "F32", "shape": None, "data_offsets": [0, 4]},
        None,
        7,
    ],
)
def test_entries_of_wrong_kinds(tmp_path: Path, entry: object) -> None:
    assert "has a damaged header" in error_of(tmp_path / "file", json.dumps({"a": entry}).encode())


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"a": ' * 100_000,
        b'{"__metadata__": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}',
    ],
)
def test_headers_that_no_writer_writes(tmp_path: Path, header: bytes) -> None:
    assert "has a damaged header" in error_of(tmp_path / "file", header)


def test_numbers_far_too_large(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [10**400], "data_offsets": [0, 0]}}).encode()
    assert "is damaged" in error_of(tmp_path / "file", header)


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes((1 << 33).to_bytes(8, "little"))
    os.truncate(path, (1 << 33) + 8)
    with pytest.raises(CheckpointError, match="at most 100000000 are read"):
        TensorFile(path)
