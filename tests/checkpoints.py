"""Edited copies of a checkpoint for tests: files, JSON keys and tensors changed one at a time. Checks nothing."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kestrel_cuda.config import VisionConfig

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}


class Stored(NamedTuple):
    """A tensor as a safetensors file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def zeros(cls, dtype: str, *shape: int) -> Stored:
        return cls(dtype, shape, bytes(math.prod(shape) * ITEM_BYTES[dtype]))

    def to_float32(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The values of a BF16 or F32 tensor, by another way than the product's."""
        if self.dtype == "F32":
            return np.frombuffer(self.data, np.float32).reshape(self.shape)
        halves = np.zeros((len(self.data) // 2, 2), np.uint16)
        halves[:, 1] = np.frombuffer(self.data, np.uint16)  # little-endian: the upper half comes second
        return halves.view(np.float32).reshape(self.shape)

    def cast(self, dtype: str) -> Stored:
        """A BF16 or F32 tensor as F16 or F32."""
        values = self.to_float32().astype({"F16": np.float16, "F32": np.float32}[dtype])
        return Stored(dtype, self.shape, values.tobytes())


RELEASED_TOWER = VisionConfig(
    depth=27,
    hidden_size=1152,
    num_heads=16,
    intermediate_size=4304,
    out_hidden_size=4096,
    in_channels=3,
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    position_side=48,
    deepstack_blocks=(8, 16, 24),
    rope_theta=10000.0,
)
"""The vision tower of the released 8B checkpoint."""


def copy(source: Path, target: Path) -> Path:
    """A copy of a checkpoint that may be written to."""
    target.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
    return target


def edit_json(path: Path, changes: Mapping[str, object], drop: tuple[str, ...] = ()) -> None:
    """Set and drop keys of a JSON file, nested ones by a dotted path."""
    root = json.loads(path.read_text())
    for dotted, value in [*changes.items(), *((key, None) for key in drop)]:
        *outer, key = dotted.split(".")
        section = root
        for name in outer:
            section = section[name]
        if dotted in drop:
            section.pop(key, None)
        else:
            section[key] = value
    path.write_text(json.dumps(root))


def read_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of every safetensors file in `directory`."""
    tensors: dict[str, Stored] = {}
    for path in sorted(directory.glob("*.safetensors")):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), content[start + begin : start + end])
    return tensors


def write_tensors(directory: Path, tensors: Mapping[str, Stored], num_files: int = 1) -> None:
    """Replace the safetensors files of `directory`: one file, or `num_files` and an index."""
    for path in [*directory.glob("*.safetensors"), *directory.glob("*.index.json")]:
        path.unlink()
    if num_files == 1:
        write_file(directory / "model.safetensors", tensors)
        return
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        name = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        share = dict(list(tensors.items())[number::num_files])
        write_file(directory / name, share)
        weight_map |= dict.fromkeys(share, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_file(path: Path, tensors: Mapping[str, Stored]) -> None:
    """One safetensors file."""
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        stop = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors.values()))
