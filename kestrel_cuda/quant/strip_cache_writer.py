"""Saves the packed form of a checkpoint for `strip_cache.find`: whole or not at all. Knows not how it is packed.

A folder is written under a temporary name, whose lock the writing process holds, and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.checkpoint.files import shortened
from kestrel_cuda.errors import InternalError, SettingError
from kestrel_cuda.paths import shown_path
from kestrel_cuda.quant.packed import SlabLayout
from kestrel_cuda.quant.strip_cache import StripCache, find
from kestrel_cuda.quant.strip_folder import foreign_names, is_temporary_folder, open_folder, remove, temporary_name
from kestrel_cuda.quant.strip_manifest import (
    MANIFEST_FILE,
    PIECE_BYTES,
    WEIGHTS_FILE,
    Fingerprint,
    Manifest,
    finish_hash,
    hash_executor,
    slab_name,
    start_hash,
)
from kestrel_cuda.sizes import format_size


class StripCacheWriter:
    """Saves a packed checkpoint, slab by slab: a context in which every slab is added once, then committed.

    Entering it says that what bears its name now is to be replaced, which is refused where that holds anything that
    is not ours. Left without `commit`, it leaves nothing behind. Entering and writing raise SettingError when the
    directory cannot be written or has not enough room; `because` says why there was anything to write, when it was
    not that nothing was there: what `find` complained of.
    """

    def __init__(self, directory: Path, expected: Fingerprint, because: str | None = None) -> None:
        self._directory, self._expected = directory, expected
        self._because = f"{because}; " if because else ""
        self._target = directory / expected.folder
        self._ranges = {layout.layer: start for layout, start in expected.ranges()}
        self._slab_sha256: dict[str, str] = {}
        self._executor = hash_executor()
        self._lock = self._file = -1
        # Noted before they are made, so that an interrupt leaves none of them.
        self._made: list[Path] = []
        self._temporaries: list[Path] = []

    def __enter__(self) -> Self:
        directory, expected = self._directory, self._expected
        try:
            self._make_directory()
            _sweep(directory)
            if self._target.is_symlink() or (self._target.exists() and not self._target.is_dir()):
                raise SettingError(
                    f"{self._because}--strip-cache: {shown_path(self._target)} is not a directory; remove it"
                )
            self._refuse_foreign()
            self._replaced = _identity(self._target)
            self._make_temporary()
            free_bytes = shutil.disk_usage(directory).free
            if free_bytes < expected.num_bytes:
                free, needed = format_size(free_bytes), format_size(expected.num_bytes)
                raise SettingError(
                    f"{self._because}--strip-cache {shown_path(directory)} has {free} free; {needed} are needed: "
                    "make room, or "
                    "give another directory"
                )
            self._file = os.open(self._temporary / WEIGHTS_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            self._write(memoryview(expected.header), 0)
            # The sources are hashed while they are packed, so that they are read from the disk once.
            self._source_chunks = {source.name: start_hash(source, self._executor) for source in expected.sources}
        except OSError as error:
            self._abort()
            raise self._cannot_write(error) from error
        except BaseException:
            self._abort()
            raise
        return self

    def add(self, layout: SlabLayout, slab: NDArray[np.uint8]) -> None:
        """Write the bytes of a slab [layout.num_bytes]. Slabs may come in any order, and from several threads."""
        start = self._ranges[layout.layer]
        if slab.nbytes != layout.num_bytes:
            raise InternalError(f"{slab_name(layout.layer)} is {layout.num_bytes} bytes, the buffer {slab.nbytes}")
        source, digest = slab.data, hashlib.sha256()
        try:
            for offset in range(0, layout.num_bytes, PIECE_BYTES):
                piece = source[offset : offset + PIECE_BYTES]
                digest.update(piece)
                self._write(piece, start + offset)
        except OSError as error:
            raise self._cannot_write(error) from error
        self._slab_sha256[slab_name(layout.layer)] = digest.hexdigest()

    def commit(self, lost_groups: Mapping[str, int]) -> StripCache:
        """Give the folder its name and return it, open; or the one that another process has finished meanwhile.

        `lost_groups` has the tensors with groups too small for a float16 scale, and how many.
        Raises CheckpointError when a source has changed since its fingerprint was taken.
        """
        expected = self._expected
        lacking = [slab_name(layer) for layer in self._ranges if slab_name(layer) not in self._slab_sha256]
        if lacking:
            raise InternalError(f"the strip cache was committed without {lacking[0]} ({len(lacking)} slabs lack)")
        source_sha256 = {name: finish_hash(chunks) for name, chunks in self._source_chunks.items()}
        for source in expected.sources:
            source.check_unchanged()
        manifest = Manifest.new(expected, source_sha256, self._slab_sha256, lost_groups)
        try:
            os.fsync(self._file)
            with (self._temporary / MANIFEST_FILE).open("w") as file:
                file.write(manifest.to_json(expected))
                file.flush()
                os.fsync(file.fileno())
            # Opened first: whoever replaces the folder later takes nothing from this process.
            cache = StripCache(self._target, self._lock, expected, manifest)
            try:
                winner = self._publish()
            except BaseException:
                cache.close()
                raise
        except OSError as error:
            raise self._cannot_write(error) from error
        if winner is None:
            return cache
        cache.close()
        return winner

    def __exit__(self, *exception: object) -> None:
        self._abort()

    def _publish(self) -> StripCache | None:
        """Move the folder to its name; returns another process's folder instead when that came first."""
        while True:
            try:
                self._temporary.rename(self._target)
                return None
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if _identity(self._target) != self._replaced:
                winner = find(self._directory, self._expected)
                if isinstance(winner, StripCache):
                    return winner
            self._refuse_foreign()
            old = self._directory / temporary_name(self._expected.folder)
            self._temporaries.append(old)
            with contextlib.suppress(FileNotFoundError):  # another process has just moved it
                self._target.rename(old)
                remove(old)

    def _refuse_foreign(self) -> None:
        """Raise SettingError when what is to be replaced holds more than what was saved there."""
        try:
            folder = open_folder(self._target)
        except FileNotFoundError:
            return
        try:
            foreign = foreign_names(folder)
        finally:
            os.close(folder)
        if foreign:
            raise SettingError(
                f"{self._because}--strip-cache: {shown_path(self._target)} is to be replaced, but holds what this "
                "program did not "
                f"put there ({shortened(foreign)}); move that elsewhere, or give another directory"
            )

    def _make_directory(self) -> None:
        """The directory and those above it, as far as there are none."""
        missing = [path for path in (self._directory, *self._directory.parents) if not path.is_dir()]
        for path in reversed(missing):
            self._made.append(path)
            try:
                path.mkdir()
            except OSError as error:
                self._made.pop()
                if not isinstance(error, FileExistsError) or not path.is_dir():
                    raise

    def _make_temporary(self) -> None:
        """A new folder and a handle that holds its lock, which the system drops however the process ends."""
        while True:
            self._temporary = self._directory / temporary_name(self._expected.folder)
            self._temporaries.append(self._temporary)
            self._temporary.mkdir()
            try:
                self._lock = open_folder(self._temporary)
            except FileNotFoundError:
                continue
            with contextlib.suppress(OSError):  # no locks on this file system: then nobody sweeps there either
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self._temporary.exists():  # else another process swept it before it was locked
                return
            os.close(self._lock)
            self._lock = -1

    def _write(self, piece: memoryview, offset: int) -> None:
        while piece:
            num_written = os.pwrite(self._file, piece, offset)
            piece, offset = piece[num_written:], offset + num_written

    def _abort(self) -> None:
        """Let go of everything; a folder that has got its name is no longer where this looks."""
        self._executor.shutdown(cancel_futures=True)
        if self._file >= 0:
            os.close(self._file)
        for path in self._temporaries:
            remove(path)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = self._file = -1
        for path in reversed(self._made):
            with contextlib.suppress(OSError):  # what holds anything stays
                path.rmdir()
        self._made, self._temporaries = [], []

    def _cannot_write(self, error: OSError) -> SettingError:
        reason, advice = _why_not(self._directory, error)
        return SettingError(
            f"{self._because}--strip-cache cannot write to {shown_path(self._directory)}: {reason}; {advice}"
        )


def _why_not(directory: Path, error: OSError) -> tuple[str, str]:
    """Why the directory cannot be written, and what to do about it."""
    reason = error.strerror or str(error)
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return reason, "make room, or give another directory"
        case errno.EFBIG:
            return reason, "raise the limit on the size of a file (ulimit -f), or give another file system"
        case errno.EEXIST if directory.is_symlink():
            return "it is a link to a directory that does not exist", "make that directory, or give another"
        case errno.EEXIST | errno.ENOTDIR:
            return "it is not a directory, or below something that is none", "give a directory"
        case errno.EIO:
            return reason, "check the disk that it is on, or give another directory"
        case _:
            return reason, "give a directory that can be written"


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _sweep(directory: Path) -> None:
    """Remove what ended processes left unfinished; a live one holds the lock of its folder."""
    for path in [path for path in directory.iterdir() if is_temporary_folder(path.name)]:
        with contextlib.suppress(OSError):  # live, gone already, or not ours to remove
            folder = open_folder(path)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not foreign_names(folder):
                    remove(path)
            finally:
                os.close(folder)
