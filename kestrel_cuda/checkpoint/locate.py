"""Which files make up a checkpoint directory, and which tensor lies in which of them. Knows no shapes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kestrel_cuda.checkpoint.files import FileStamp, is_present, printable, shortened, unreadable
from kestrel_cuda.checkpoint.json_file import read_json, shown
from kestrel_cuda.checkpoint.names import canonical
from kestrel_cuda.checkpoint.tensor_file import StoredTensor, TensorFile
from kestrel_cuda.errors import CheckpointError
from kestrel_cuda.paths import shown_path

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_NAME_CHARACTERS = 255


@dataclass(frozen=True)
class Location:
    """Where a tensor is: its file, and its name there."""

    file: TensorFile
    stored_name: str

    @property
    def stored(self) -> StoredTensor:
        return self.file.tensors[self.stored_name]


@dataclass(frozen=True)
class StoredTensors:
    """Every stored tensor by canonical name, and the files they are in, the index among them.

    `unlisted` has the tensors that the index leaves out though a file holds them; they do not count as stored.
    """

    locations: dict[str, Location]
    files: tuple[FileStamp, ...]
    unlisted: dict[str, Path]


def check_directory(path: Path) -> None:
    needed = "a directory with config.json and *.safetensors, as on Hugging Face"
    if not is_present(path):
        fetched = ""
        if not path.is_absolute() and len(path.parts) == 2:
            fetched = f" (hf download {shown_path(path)} --local-dir DIR fetches one of that name)"
        raise CheckpointError(f"{shown_path(path)} does not exist; give {needed}{fetched}")
    try:
        path.stat()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{shown_path(path)} is a link to a directory that does not exist; give {needed}"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    if not path.is_dir():
        kind = "GGUF file, which is not read" if path.suffix == ".gguf" else "file"
        raise CheckpointError(f"{shown_path(path)} is a {kind}; give {needed}")
    if not is_present(path / "config.json"):
        gguf = next(path.glob("*.gguf"), None)
        found = f"{gguf.name}: GGUF files are not read" if gguf else "no config.json"
        raise CheckpointError(f"{shown_path(path)} holds {found}; give {needed}")


def locate_tensors(path: Path, warnings: list[str]) -> StoredTensors:
    """Every stored tensor, from the files that the index names or from the single file."""
    index = path / _INDEX
    index_stamps: list[FileStamp] = []
    if is_present(index):
        weight_map = _weight_map(index)
        index_stamps.append(FileStamp.of(index))
        file_names = sorted(set(weight_map.values()))
        if _SINGLE not in file_names and is_present(path / _SINGLE):
            warnings.append(f"{_SINGLE} is left alone: {_INDEX} does not name it")
    else:
        weight_map = None
        file_names = [_SINGLE]
    missing = [name for name in file_names if not is_present(path / name)]
    if missing:
        raise CheckpointError(_missing_files(path, missing, indexed=weight_map is not None))

    locations: dict[str, Location] = {}
    unlisted: dict[str, Path] = {}
    files = {name: TensorFile(path / name) for name in file_names}
    if weight_map is not None:
        _check_listed(index, weight_map, files)
    for file_name, file in files.items():
        for stored_name in file.tensors:
            name = canonical(stored_name)
            if weight_map is not None and weight_map.get(stored_name) != file_name:
                # A tensor that two shards hold is the one the index points at.
                if stored_name not in weight_map:
                    unlisted[name] = file.path
                continue
            if name in locations:
                also = printable(stored_name)
                raise CheckpointError(
                    f"{shown_path(path)} holds {printable(name)} twice, also as {also} in {file_name}; keep one of them"
                )
            locations[name] = Location(file, stored_name)
    stamps = sorted([*index_stamps, *(file.stamp for file in files.values())])
    return StoredTensors(locations, tuple(stamps), {name: unlisted[name] for name in unlisted.keys() - locations})


def _weight_map(index: Path) -> dict[str, str]:
    """The file of every tensor, each file under one name though the index may spell or link it in several ways."""
    weight_map = read_json(index).child("weight_map")
    if weight_map is None or not weight_map.values:
        raise CheckpointError(f"{shown_path(index)} lacks weight_map; take this file from the original checkpoint")
    spellings: dict[str, str] = {}
    names: dict[str, str] = {}
    for file_name in weight_map.values.values():
        if not isinstance(file_name, str) or not _is_file_name(file_name):
            raise CheckpointError(f"{shown_path(index)} gives {shown(file_name)} for a file; the name of one is needed")
        if file_name in spellings:
            continue
        relative = PurePosixPath(file_name)
        if relative.is_absolute() or ".." in relative.parts:
            raise CheckpointError(
                f"{shown_path(index)} names {printable(file_name)}, which is outside {shown_path(index.parent)}; "
                "files beside it are needed"
            )
        real = os.path.realpath(index.parent / relative)
        spellings[file_name] = names.setdefault(real, str(relative))
    return {tensor: spellings[str(file_name)] for tensor, file_name in weight_map.values.items()}


def _is_file_name(text: str) -> bool:
    return text.isprintable() and len(text) <= _MAX_NAME_CHARACTERS and PurePosixPath(text).name != ""


def _check_listed(index: Path, weight_map: dict[str, str], files: dict[str, TensorFile]) -> None:
    """Raise when a file lacks a tensor that the index places in it."""
    absent = [tensor for tensor, file_name in weight_map.items() if tensor not in files[file_name].tensors]
    if absent:
        raise CheckpointError(
            f"{shown_path(index.parent / weight_map[absent[0]])} lacks tensors that {_INDEX} places there "
            f"({len(absent)}): "
            f"{shortened(absent)}; fetch both again"
        )


def _missing_files(path: Path, missing: list[str], indexed: bool) -> str:
    if indexed:
        return f"{shown_path(path)} lacks files that {_INDEX} names ({len(missing)}): {shortened(missing)}; fetch them"
    if any(path.glob("*.safetensors")):
        return f"{shown_path(path)} holds safetensors files but neither {_SINGLE} nor {_INDEX}; fetch the index"
    return f"{shown_path(path)} lacks {_SINGLE} (or {_INDEX} and its files); only safetensors are read"
