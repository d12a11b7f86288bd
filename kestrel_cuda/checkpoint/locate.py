"""Which files make up a checkpoint directory, and which tensor lies in which of them. Knows no shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kestrel_cuda.checkpoint.json_file import read_json
from kestrel_cuda.checkpoint.names import canonical
from kestrel_cuda.checkpoint.tensor_file import StoredTensor, TensorFile
from kestrel_cuda.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Location:
    """Where a tensor is: its file, and its name there."""

    file: TensorFile
    stored_name: str

    @property
    def stored(self) -> StoredTensor:
        return self.file.tensors[self.stored_name]


def check_directory(path: Path) -> None:
    needed = "a directory with config.json and *.safetensors, as on Hugging Face"
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give {needed}")
    if not path.is_dir():
        kind = "GGUF file, which is not read" if path.suffix == ".gguf" else "file"
        raise CheckpointError(f"{path} is a {kind}; give {needed}")
    if not (path / "config.json").is_file():
        gguf = next(path.glob("*.gguf"), None)
        found = f"{gguf.name}: GGUF files are not read" if gguf else "no config.json"
        raise CheckpointError(f"{path} holds {found}; give {needed}")


def locate_tensors(path: Path, warnings: list[str]) -> dict[str, Location]:
    """Every stored tensor by canonical name, from the files that the index names or from the single file."""
    index = path / _INDEX
    if index.is_file():
        weight_map = _weight_map(index)
        file_names = sorted(set(weight_map.values()))
        if _SINGLE not in file_names and (path / _SINGLE).exists():
            warnings.append(f"{_SINGLE} is left alone: {_INDEX} does not name it")
    else:
        weight_map = None
        file_names = [_SINGLE]
    missing = [name for name in file_names if not (path / name).is_file()]
    if missing:
        raise CheckpointError(_missing_files(path, missing, indexed=weight_map is not None))

    locations: dict[str, Location] = {}
    for file_name in file_names:
        file = TensorFile(path / file_name)
        for stored_name in file.tensors:
            # A tensor that two shards hold is the one the index points at.
            if weight_map is not None and weight_map.get(stored_name, file_name) != file_name:
                continue
            name = canonical(stored_name)
            if name in locations:
                raise CheckpointError(
                    f"{path} holds {name} twice, also as {stored_name} in {file_name}; keep one of them"
                )
            locations[name] = Location(file, stored_name)
    return locations


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).child("weight_map")
    if weight_map is None or not weight_map.values:
        raise CheckpointError(f"{index} lacks weight_map; take this file from the original checkpoint")
    return {name: str(file_name) for name, file_name in weight_map.values.items()}


def _missing_files(path: Path, missing: list[str], indexed: bool) -> str:
    broken = [name for name in missing if (path / name).is_symlink()]
    if broken:
        return f"{path}: {shortened(broken)} is a link to a file that does not exist; fetch it again"
    if indexed:
        return f"{path} lacks files that {_INDEX} names ({len(missing)}): {shortened(missing)}; fetch them"
    if any(path.glob("*.safetensors")):
        return f"{path} holds safetensors files but neither {_SINGLE} nor {_INDEX}; fetch the index"
    return f"{path} lacks {_SINGLE} (or {_INDEX} and its files); only safetensors are read"


def shortened(names: Iterable[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
