"""Folders of the strip cache: their names, what the program puts into them, and removing that and nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path

from kestrel_cuda.config import Quant
from kestrel_cuda.quant.strip_manifest import MANIFEST_FILE, TEMPORARY_PREFIX, WEIGHTS_FILE

_PREFIX, _QUANTS = re.escape(TEMPORARY_PREFIX), "|".join(map(re.escape, Quant))
_TEMPORARY_FOLDER = re.compile(rf"{_PREFIX}.+-(?:{_QUANTS})-[0-9a-f]{{12}}-[0-9a-f]{{8}}", re.DOTALL)
_TEMPORARY_FILE = re.compile(rf"{_PREFIX}[0-9a-f]{{8}}")


def temporary_name(entry: str = "") -> str:
    """A new name for what becomes the folder `entry`, or for a file in one."""
    return f"{TEMPORARY_PREFIX}{entry}{'-' if entry else ''}{secrets.token_hex(4)}"


def is_temporary_folder(name: str) -> bool:
    """Whether a folder of this name is one that a process may have left unfinished."""
    return _TEMPORARY_FOLDER.fullmatch(name) is not None


def foreign_names(folder: int) -> list[str]:
    """What the folder of this handle holds beside the program's own files, sorted."""
    return sorted(name for name in _names(folder) if not _is_own(folder, name))


def remove(path: Path) -> None:
    """Remove the program's own files in a folder and then the folder, which stays where it holds anything else.

    Never goes down into folders. What refuses to go is left there.
    """
    with contextlib.suppress(OSError):
        folder = open_folder(path)
        try:
            for name in _names(folder):
                if _is_own(folder, name):
                    _remove_one(folder, name)
        finally:
            os.close(folder)
        path.rmdir()


def open_folder(path: Path) -> int:
    """A handle of a folder, not of what a link leads to. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as items:
        return [item.name for item in items]


def _is_own(folder: int, name: str) -> bool:
    if name not in (WEIGHTS_FILE, MANIFEST_FILE) and not _TEMPORARY_FILE.fullmatch(name):
        return False
    return not _is_directory(folder, name) or not _is_filled(folder, name)


def _is_directory(folder: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _is_filled(folder: int, name: str) -> bool:
    try:
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        return True  # what cannot be looked into is not ours
    try:
        return bool(_names(inner))
    finally:
        os.close(inner)


def _remove_one(folder: int, name: str) -> None:
    if _is_directory(folder, name):
        os.rmdir(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)
