"""One safetensors file: its header, checked, and its tensors as views of mapped memory. Knows no model."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from kestrel_cuda.checkpoint.files import FileStamp, open_file, printable, unreadable
from kestrel_cuda.checkpoint.json_file import parse_json
from kestrel_cuda.errors import CheckpointError
from kestrel_cuda.paths import shown_path

FloatDtype = Literal["BF16", "F16", "F32"]
FLOAT_DTYPES: dict[str, type[np.generic]] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the library's own bound
_SCAN_VALUES = 2**20

# The bits of the exponent: all of them are set in an infinity and in a NaN, and in nothing else.
_EXPONENT: dict[FloatDtype, tuple[type[np.unsignedinteger[Any]], int]] = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
}


@dataclass(frozen=True)
class RawTensor:
    """A tensor as stored. `data` is a read-only view of the file: uint16 bit patterns for BF16, float16, float32."""

    name: str
    dtype: FloatDtype
    shape: tuple[int, ...]
    data: NDArray[Any]


class StoredTensor(NamedTuple):
    """What a header says of a tensor: its bytes are `[start, stop)` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """A safetensors file, mapped into memory; nothing of a tensor is read before its view is.

    Raises CheckpointError, with expected and actual size, when the file is truncated or of another kind.
    `stamp` is the file as it was when it was opened. Reading from several threads is safe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_file(path) as file:
            try:
                self.stamp = FileStamp.from_status(path, os.fstat(file.fileno()))
                self.tensors = _read_header(file, self.stamp)
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise unreadable(path, error) from error

    def view(self, stored_name: str, name: str) -> RawTensor:
        """The tensor `stored_name` under the name `name`; its dtype has to be one of FLOAT_DTYPES."""
        stored = self.tensors[stored_name]
        dtype = np.dtype(FLOAT_DTYPES[stored.dtype])
        count = (stored.stop - stored.start) // dtype.itemsize
        data = np.frombuffer(self._memory, dtype, count, stored.start).reshape(stored.shape)
        return RawTensor(name, cast(FloatDtype, stored.dtype), stored.shape, data)


def widen(rows: RawTensor | NDArray[Any]) -> NDArray[np.float32]:
    """Stored values as float32, exactly: uint16 holds BF16 bit patterns. A float32 array comes back uncopied."""
    data = rows.data if isinstance(rows, RawTensor) else rows
    if data.dtype == np.uint16:
        bits: NDArray[np.uint32] = np.left_shift(data, 16, dtype=np.uint32)
        return bits.view(np.float32)
    return data.astype(np.float32, copy=False)


def narrow(rows: RawTensor | NDArray[Any]) -> NDArray[np.uint16]:
    """Stored values as BF16 bit patterns, to nearest, ties to even; those of BF16 as they are."""
    data = rows.data if isinstance(rows, RawTensor) else rows
    if data.dtype == np.uint16:
        return data
    bits = np.ascontiguousarray(widen(data)).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def first_nonfinite_row(raw: RawTensor) -> int | None:
    """The first index along the first axis under which a value is infinite or not a number; None when there is none.

    Reads the tensor once, in pieces of a few megabytes.
    """
    dtype, exponent = _EXPONENT[raw.dtype]
    bits_of_all = raw.data.reshape(-1).view(dtype)
    for start in range(0, bits_of_all.size, _SCAN_VALUES):
        bits = bits_of_all[start : start + _SCAN_VALUES] & dtype(exponent)
        # The exponent alone is left, so that the largest one says whether any is full.
        if bits.max() == exponent:
            return (start + int(bits.argmax())) // (bits_of_all.size // (raw.shape or (1,))[0])
    return None


def _read_header(file: BinaryIO, stamp: FileStamp) -> dict[str, StoredTensor]:
    """The tensors that the header lists; the library then checks dtypes, shapes and that the bytes are covered."""
    path, size = stamp.path, stamp.size
    start = file.read(_LENGTH_BYTES)
    length = int.from_bytes(start, "little")
    data_start = _LENGTH_BYTES + length
    if len(start) < _LENGTH_BYTES or data_start > size:
        raise _not_safetensors(path, size, start + file.read(32))
    if length > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{shown_path(path)} has a damaged header: {length} bytes long, at most {_MAX_HEADER_BYTES} are read; "
            "fetch it again"
        )
    try:
        tensors = _listed(parse_json(file.read(length)), data_start)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{shown_path(path)} has a damaged header ({size} bytes in all); fetch it again"
        ) from error
    expected = max((tensor.stop for tensor in tensors.values()), default=data_start)
    if size != expected:
        kind = "truncated" if size < expected else "too long"
        raise CheckpointError(
            f"{shown_path(path)} is {kind}: {size} bytes, its header needs {expected}; fetch it again"
        )
    try:
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        reason = printable(str(error), most=200)
        raise CheckpointError(f"{shown_path(path)} is damaged ({size} bytes): {reason}; fetch it again") from error
    return tensors


def _listed(header: Any, data_start: int) -> dict[str, StoredTensor]:
    """What a header says of each tensor, of whatever kind it is."""
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in (*shape, start, stop)):
            raise TypeError(f"{name} is listed as {entry}")
        tensors[name] = StoredTensor(dtype, shape, data_start + start, data_start + stop)
    return tensors


def _not_safetensors(path: Path, size: int, start: bytes) -> CheckpointError:
    if size < _LENGTH_BYTES:
        return CheckpointError(
            f"{shown_path(path)} is {size} bytes; a safetensors file has at least {_LENGTH_BYTES}; fetch it again"
        )
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if 0 not in start[:_LENGTH_BYTES]:  # a real length has zeros in its upper bytes, a text has none
        beginning = start.decode("ascii", "replace").splitlines()[0]
        return CheckpointError(
            f"{shown_path(path)} is not a safetensors file: {size} bytes that begin with {beginning!r}; fetch it again"
        )
    return CheckpointError(
        f"{shown_path(path)} is truncated: {size} bytes, its header alone needs {_LENGTH_BYTES + length}; fetch it "
        "again"
    )
