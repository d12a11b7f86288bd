"""Files of a checkpoint, opened only when they are plain files. Knows the content of none of them.

A link that leads nowhere counts as present: what somebody meant to be there is never passed over.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kestrel_cuda.errors import CheckpointError
from kestrel_cuda.paths import shown_path

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotAFileError(OSError):
    """Something else than a plain file bears the name; `strerror` says what."""


class FileStamp(NamedTuple):
    """A file as it was when it was looked at: its size in bytes and its time."""

    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """The file as it is now. Raises CheckpointError when there is none."""
        try:
            return cls.from_status(path, path.stat())
        except OSError as error:
            raise unreadable(path, error) from error

    @classmethod
    def from_status(cls, path: Path, status: os.stat_result) -> FileStamp:
        return cls(path, status.st_size, status.st_mtime_ns)


def is_present(path: Path) -> bool:
    """Whether anything bears this name. What cannot be looked at does, so that opening it says why."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def open_file(path: Path) -> BinaryIO:
    """A plain file, open for reading. Raises CheckpointError for anything else; never waits for a pipe."""
    try:
        return open_plain(path)
    except OSError as error:
        raise unreadable(path, error) from error


def open_plain(path: Path | str, dir_fd: int | None = None) -> BinaryIO:
    """As `open_file`, in the folder `dir_fd` if one is given. Raises OSError, NotAFileError among them."""
    _check_plain(os.stat(path, dir_fd=dir_fd))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK, dir_fd=dir_fd)
    try:
        _check_plain(os.fstat(descriptor))  # what bears the name may have changed meanwhile
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text in a file. Raises CheckpointError when there is no file to read, UnicodeDecodeError for other bytes."""
    with open_file(path) as file, io.TextIOWrapper(file, encoding) as text:
        try:
            return text.read()
        except OSError as error:
            raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error that says why `path` cannot be read, and what to do about it."""
    if isinstance(error, NotAFileError):
        return CheckpointError(f"{shown_path(path)} {error.strerror}; put the file of that name there")
    if error.errno == errno.ELOOP:
        return CheckpointError(f"{shown_path(path)} is a link that leads back to itself; fetch the file again")
    if error.errno == errno.ENOENT and path.is_symlink():
        return CheckpointError(f"{shown_path(path)} is a link to a file that does not exist; fetch it again")
    if error.errno == errno.ENOENT:
        return CheckpointError(f"{shown_path(path)} does not exist; fetch it")
    if error.errno in (errno.EACCES, errno.EPERM):
        return CheckpointError(f"cannot read {shown_path(path)}: {error.strerror}; allow this user to read it")
    return CheckpointError(f"cannot read {shown_path(path)}: {error.strerror}; check the disk that it is on")


def printable(text: str, most: int = 80) -> str:
    """Text from a file as an error may show it: one line, of characters that can be printed, not too long."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= most else shown[: most - 3] + "..."


def shortened(names: Iterable[str], most: int = 3) -> str:
    """The first few names, and how many more there are; names come from files and may hold anything."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(printable(name) for name in listed[:most]) + more


def _check_plain(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise NotAFileError(errno.EINVAL, f"is {kind}, not a file")
