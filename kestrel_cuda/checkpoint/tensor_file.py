"""One safetensors file: its header, checked, and its tensors as views of mapped memory. Knows no model."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from kestrel_cuda.errors import CheckpointError

FloatDtype = Literal["BF16", "F16", "F32"]
FLOAT_DTYPES: dict[str, type[np.generic]] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
_LENGTH_BYTES = 8


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
    Reading from several threads is safe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = _read_header(path)
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

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


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that the header lists; the library then checks dtypes, shapes and that the bytes are covered."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_LENGTH_BYTES)
            data_start = _LENGTH_BYTES + int.from_bytes(start, "little")
            if len(start) < _LENGTH_BYTES or data_start > size:
                raise _not_safetensors(path, size, start + file.read(32))
            header = json.loads(file.read(data_start - _LENGTH_BYTES))
        header.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(
                entry["dtype"], tuple(entry["shape"]), *(data_start + offset for offset in entry["data_offsets"])
            )
            for name, entry in header.items()
        }
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a damaged header ({size} bytes in all); fetch it again") from error
    expected = max((tensor.stop for tensor in tensors.values()), default=data_start)
    if size != expected:
        kind = "truncated" if size < expected else "too long"
        raise CheckpointError(f"{path} is {kind}: {size} bytes, its header needs {expected}; fetch it again")
    try:
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged ({size} bytes): {error}; fetch it again") from error
    return tensors


def _not_safetensors(path: Path, size: int, start: bytes) -> CheckpointError:
    if size < _LENGTH_BYTES:
        return CheckpointError(
            f"{path} is {size} bytes; a safetensors file has at least {_LENGTH_BYTES}; fetch it again"
        )
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if 0 not in start[:_LENGTH_BYTES]:  # a real length has zeros in its upper bytes, a text has none
        shown = start.decode("ascii", "replace").splitlines()[0]
        return CheckpointError(
            f"{path} is not a safetensors file: {size} bytes that begin with {shown!r}; fetch it again"
        )
    return CheckpointError(
        f"{path} is truncated: {size} bytes, its header alone needs {_LENGTH_BYTES + length}; fetch it again"
    )
