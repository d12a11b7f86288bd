"""The packed form of a checkpoint on disk, saved once and found again. Knows neither how it is packed nor who uses it.

Under the user's directory there is one folder for each checkpoint and quant: `weights.safetensors`, one uint8 tensor
for each slab, and `manifest.json`, which says what they are of. A folder gets its name when it is whole, and every
slab is checked against its hash when it is first read: what a crash or a bad disk leaves is never taken for weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.checkpoint.files import NotAFileError, open_plain
from kestrel_cuda.errors import CheckpointError, InternalError
from kestrel_cuda.paths import shown_path
from kestrel_cuda.quant.packed import SlabLayout
from kestrel_cuda.quant.strip_folder import temporary_name
from kestrel_cuda.quant.strip_manifest import (
    MANIFEST_FILE,
    PIECE_BYTES,
    WEIGHTS_FILE,
    Fingerprint,
    Manifest,
    StaleError,
    slab_name,
)

_RUN_AGAIN = "run again, and what is damaged is rebuilt"
_MAX_MANIFEST_BYTES = 2**26  # thousands of layers take less


class DamagedStripCache(CheckpointError):
    """A saved form cannot be read or does not hold what was written; the message says which and why, in one line."""


@dataclass(frozen=True)
class Miss:
    """Nothing to use; `reason` says what is wrong with what was found, None when there is nothing at all."""

    reason: str | None = None


def find(directory: Path, expected: Fingerprint) -> StripCache | Miss:
    """The saved form of `expected` under `directory`, open for reading, or why there is none. Writes no weights.

    A source whose time has changed is hashed, and its new time recorded when the content is the same.
    Raises CheckpointError when a source cannot be read.
    """
    path = directory / expected.folder
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return Miss()
    except OSError as error:
        return Miss(f"the strip cache {shown_path(path)} cannot be read: {error.strerror}")
    try:
        # Both files through one handle: the folder may be replaced by another process meanwhile.
        manifest = _read_manifest(path, folder, expected)
        current = manifest.checked(expected)
        cache = StripCache(path, folder, expected, current)
        if current is not manifest:
            _write_times(folder, current, expected)
        return cache
    except StaleError as error:
        return Miss(f"the strip cache {shown_path(path)} is stale: {error}")
    except DamagedStripCache as error:
        return Miss(str(error))
    finally:
        os.close(folder)


class StripCache:
    """A saved form, open for reading; close it, or use it as a context. Made by `find` and `StripCacheWriter.commit`.

    `lost_groups` counts, by tensor, the groups too small for a float16 scale. Reading from several threads is safe.
    """

    def __init__(self, path: Path, folder: int, expected: Fingerprint, manifest: Manifest) -> None:
        """`folder` is a handle of the folder, used here alone. Raises DamagedStripCache when the file is not whole."""
        self.path = path
        self.num_bytes = expected.num_bytes
        self.lost_groups = dict(manifest.lost_groups)
        self._sha256 = {layout.layer: manifest.slab_sha256[slab_name(layout.layer)] for layout in expected.layouts}
        self._ranges = {layout.layer: (start, layout.num_bytes) for layout, start in expected.ranges()}
        try:
            with open_plain(WEIGHTS_FILE, dir_fd=folder) as file:
                self._file = os.dup(file.fileno())
        except OSError as error:
            raise _damaged(path, _unreadable(WEIGHTS_FILE, error)) from error
        try:
            size, header = os.fstat(self._file).st_size, expected.header
            self._written_at_ns = os.fstat(self._file).st_mtime_ns
            if size != self.num_bytes:
                kind = "truncated" if size < self.num_bytes else "too long"
                raise _damaged(path, f"{WEIGHTS_FILE} is {kind}: {size} bytes, needed are {self.num_bytes}")
            if os.pread(self._file, len(header), 0) != header:
                raise _damaged(path, f"the header of {WEIGHTS_FILE} is not the one written")
            self._memory = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            os.close(self._file)
            raise _damaged(path, _unreadable(WEIGHTS_FILE, error)) from error
        except BaseException:
            os.close(self._file)
            raise

    def read_into(self, layout: SlabLayout, host: NDArray[np.uint8], *, verify: bool = True) -> None:
        """Copy a slab into `host` [layout.num_bytes], and compare its hash.

        Without `verify`, for a slab that was compared before, only the time of the last write is looked at: hashing
        takes longer than reading. Raises DamagedStripCache; `host` then holds whatever was read.
        """
        start, num_bytes = self._ranges[layout.layer]
        if host.nbytes != num_bytes:
            raise InternalError(f"{slab_name(layout.layer)} is {num_bytes} bytes, the buffer {host.nbytes}")
        again = "" if verify else f"; {_RUN_AGAIN}"
        target, digest, done = host.data, hashlib.sha256(), 0
        while done < num_bytes:
            piece = target[done : done + PIECE_BYTES]
            try:
                num_read = os.preadv(self._file, [piece], start + done)
            except OSError as error:
                raise self._damaged_slab(layout, f"cannot be read: {error.strerror}{again}") from error
            if num_read == 0:
                raise self._damaged_slab(layout, f"ends after {done} of {num_bytes} bytes{again}")
            if verify:
                digest.update(piece[:num_read])
            done += num_read
        if verify and digest.hexdigest() != self._sha256[layout.layer]:
            raise self._damaged_slab(layout, "is not what was written (its SHA-256 differs)")
        if not verify and os.fstat(self._file).st_mtime_ns != self._written_at_ns:
            raise self._damaged_slab(layout, f"was read from a file that was written to meanwhile; {_RUN_AGAIN}")

    def verify(self, layout: SlabLayout) -> None:
        """Compare a slab's hash, holding a piece of it at a time. Raises DamagedStripCache."""
        start, num_bytes = self._ranges[layout.layer]
        piece, digest, done = memoryview(bytearray(PIECE_BYTES)), hashlib.sha256(), 0
        while done < num_bytes:
            try:
                num_read = os.preadv(self._file, [piece[: num_bytes - done]], start + done)
            except OSError as error:
                raise self._damaged_slab(layout, f"cannot be read: {error.strerror}") from error
            if num_read == 0:
                raise self._damaged_slab(layout, f"ends after {done} of {num_bytes} bytes")
            digest.update(piece[:num_read])
            done += num_read
        if digest.hexdigest() != self._sha256[layout.layer]:
            raise self._damaged_slab(layout, "is not what was written (its SHA-256 differs)")

    def view(self, layout: SlabLayout) -> NDArray[np.uint8]:
        """A slab [layout.num_bytes] as a read-only view of the mapped file, read when touched and not verified."""
        start, num_bytes = self._ranges[layout.layer]
        return np.frombuffer(self._memory, np.uint8, num_bytes, start)

    def advise_away(self, layer: int) -> None:
        """Let the system forget a layer that it keeps in memory, as far as whole pages go."""
        start, num_bytes = self._ranges[layer]
        first, last = -(-start // mmap.PAGESIZE), (start + num_bytes) // mmap.PAGESIZE
        if last > first:
            # A page that a view has touched stays until the mapping lets go of it.
            self._memory.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
        if hasattr(os, "posix_fadvise"):  # macOS lacks it, and it is only advice
            os.posix_fadvise(self._file, start, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Nothing is read after this, views apart: they hold the mapping until they are gone."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        with contextlib.suppress(BufferError):
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _damaged_slab(self, layout: SlabLayout, reason: str) -> DamagedStripCache:
        return _damaged(self.path, f"{slab_name(layout.layer)} {reason}")


def _damaged(path: Path, reason: str) -> DamagedStripCache:
    return DamagedStripCache(f"the strip cache {shown_path(path)} is damaged: {reason}")


def _unreadable(name: str, error: OSError) -> str:
    return (
        f"{name} {error.strerror}" if isinstance(error, NotAFileError) else f"{name} cannot be read: {error.strerror}"
    )


def _read_manifest(path: Path, folder: int, expected: Fingerprint) -> Manifest:
    try:
        with open_plain(MANIFEST_FILE, dir_fd=folder) as file:
            return Manifest.parse(file.read(_MAX_MANIFEST_BYTES), expected)
    except OSError as error:
        raise _damaged(path, _unreadable(MANIFEST_FILE, error)) from error
    except ValueError as error:
        raise _damaged(path, f"{MANIFEST_FILE} is not a manifest") from error


def _write_times(folder: int, manifest: Manifest, expected: Fingerprint) -> None:
    """Record new times of equal sources; where that cannot be written, they are hashed the next time too."""
    name = temporary_name()
    try:
        with open(name, "x", opener=lambda name, flags: os.open(name, flags, 0o666, dir_fd=folder)) as file:
            file.write(manifest.to_json(expected))
        os.replace(name, MANIFEST_FILE, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        if not isinstance(error, OSError):
            raise
