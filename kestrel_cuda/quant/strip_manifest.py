"""What a saved packed checkpoint is of, and what its manifest records of it. Knows no folder, writes no file.

Sources are recognised by name, size and time, or else by their content: a tree hash, the SHA-256 over the SHA-256 of
every 64 MiB, so that threads can share a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from kestrel_cuda.checkpoint.files import FileStamp, printable, unreadable
from kestrel_cuda.checkpoint.reader import Checkpoint
from kestrel_cuda.config import Quant
from kestrel_cuda.errors import CheckpointError
from kestrel_cuda.paths import shown_path
from kestrel_cuda.quant.packed import SlabLayout
from kestrel_cuda.weight_keys import LM_HEAD_LAYER

FORMAT_VERSION = 1
"""Raised when the manifest or the file of weights is laid out anew."""

PACKING_VERSION = 1
"""Raised when the same checkpoint packs to other bytes: quantization, packed form, order in a slab."""

WEIGHTS_FILE, MANIFEST_FILE = "weights.safetensors", "manifest.json"
TEMPORARY_PREFIX = ".incomplete-"

PIECE_BYTES = 2**22
"""What is read or written at once: small enough to be in the processor's cache still when it is hashed."""

DATA_ALIGNMENT_BYTES = 4096
HASH_CHUNK_BYTES = 64 * 2**20
_READ_BYTES = 2**20
_MAX_HASH_THREADS = 16


class StaleError(Exception):
    """A saved form is whole but of something else; the message is a clause that says what differs."""


@dataclass(frozen=True)
class Source:
    """A file of the checkpoint: its name there, its size in bytes and its time when it was looked at."""

    path: Path
    name: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, checkpoint: Path, stamp: FileStamp) -> Source:
        return cls(stamp.path, stamp.path.relative_to(checkpoint).as_posix(), stamp.size, stamp.mtime_ns)

    def check_unchanged(self) -> None:
        """Raise CheckpointError when the file is another one now, or gone."""
        if FileStamp.of(self.path)[1:] != (self.size, self.mtime_ns):
            raise CheckpointError(f"{shown_path(self.path)} changed while it was loaded; load it again")


@dataclass(frozen=True)
class Fingerprint:
    """What a saved form has to be of. `folder` is the name of its folder: one for each checkpoint path and quant."""

    folder: str
    checkpoint: Path
    quant: Quant
    sources: tuple[Source, ...]
    layouts: tuple[SlabLayout, ...]

    @property
    def header(self) -> bytes:
        """The start of the safetensors file, length included: it follows from the layouts, to the byte."""
        about = {"kestrel-cuda": f"strips, format {FORMAT_VERSION}, packing {PACKING_VERSION}", "quant": self.quant}
        tensors: dict[str, object] = {"__metadata__": about}
        start = 0
        for layout in self.layouts:
            stop = start + layout.num_bytes
            tensors[slab_name(layout.layer)] = {
                "dtype": "U8",
                "shape": [layout.num_bytes],
                "data_offsets": [start, stop],
            }
            start = stop
        text = json.dumps(tensors).encode()
        # Padded so that slabs begin with a page: a page of two layers could not be dropped with one of them.
        text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT_BYTES)
        return len(text).to_bytes(8, "little") + text

    @property
    def num_bytes(self) -> int:
        """Size of the safetensors file."""
        return len(self.header) + sum(layout.num_bytes for layout in self.layouts)

    def ranges(self) -> Iterator[tuple[SlabLayout, int]]:
        """Every slab with the offset in bytes at which it begins in the safetensors file."""
        start = len(self.header)
        for layout in self.layouts:
            yield layout, start
            start += layout.num_bytes


def fingerprint(checkpoint: Checkpoint, quant: Quant, layouts: Sequence[SlabLayout]) -> Fingerprint:
    """What `checkpoint`, packed by `quant` into `layouts` (lm_head among them), is recognised by; hashes nothing.

    Raises CheckpointError when a file of the checkpoint is not the one any more that was opened.
    """
    path = checkpoint.path.resolve()
    # The index is one of them: of a tensor in two shards it says which one counts.
    sources = tuple(Source.of(checkpoint.path, stamp) for stamp in checkpoint.files)
    for source in sources:
        source.check_unchanged()
    digest = hashlib.sha256(os.fsencode(path) + b"\0" + quant.encode()).hexdigest()
    return Fingerprint(f"{_readable(path)}-{quant}-{digest[:12]}", path, quant, sources, tuple(layouts))


def slab_name(layer: int) -> str:
    """The tensor that holds a layer's slab."""
    return "lm_head" if layer == LM_HEAD_LAYER else f"layer.{layer:03d}"


@dataclass(frozen=True)
class Manifest:
    """What is known of a saved form beyond its fingerprint: hashes by file and by slab name, lost groups by tensor."""

    version: str
    times_ns: Mapping[str, int]
    source_sha256: Mapping[str, str]
    slab_sha256: Mapping[str, str]
    lost_groups: Mapping[str, int]

    @classmethod
    def new(
        cls,
        expected: Fingerprint,
        source_sha256: Mapping[str, str],
        slab_sha256: Mapping[str, str],
        lost_groups: Mapping[str, int],
    ) -> Manifest:
        try:
            version = metadata.version("kestrel-cuda")
        except metadata.PackageNotFoundError:
            version = "not installed"
        times_ns = {source.name: source.mtime_ns for source in expected.sources}
        return cls(version, times_ns, source_sha256, slab_sha256, lost_groups)

    def to_json(self, expected: Fingerprint) -> str:
        sources = [
            {
                "name": source.name,
                "size": source.size,
                "mtime_ns": self.times_ns[source.name],
                "sha256": self.source_sha256[source.name],
            }
            for source in expected.sources
        ]
        slabs = [_slab_record(layout) for layout in expected.layouts]
        manifest = {
            "format": FORMAT_VERSION,
            "packing": PACKING_VERSION,
            "kestrel_cuda": self.version,
            "quant": expected.quant,
            "checkpoint": os.fsencode(expected.checkpoint).decode(errors="replace"),
            "sources": sources,
            "slabs": [slab | {"sha256": self.slab_sha256[slab["name"]]} for slab in slabs],
            "lost_groups": dict(self.lost_groups),
        }
        return json.dumps(manifest, indent=1) + "\n"

    @classmethod
    def parse(cls, text: bytes, expected: Fingerprint) -> Manifest:
        """The manifest of a saved form of `expected`; times and contents of sources are not compared.

        Raises StaleError when it is of something else, ValueError when it is not a manifest.
        """
        try:
            found = json.loads(text)
            for key, needed in (("format", FORMAT_VERSION), ("packing", PACKING_VERSION), ("quant", expected.quant)):
                if found[key] != needed:
                    raise StaleError(f"its {key} is {printable(str(found[key]), 40)}, needed is {needed}")
            _compare_slabs(found["slabs"], expected)
            _compare_sources({source["name"]: int(source["size"]) for source in found["sources"]}, expected)
            return cls(
                version=str(found["kestrel_cuda"]),
                times_ns={source["name"]: int(source["mtime_ns"]) for source in found["sources"]},
                source_sha256={source["name"]: str(source["sha256"]) for source in found["sources"]},
                slab_sha256={slab["name"]: str(slab["sha256"]) for slab in found["slabs"]},
                lost_groups=_lost_groups(found["lost_groups"], expected),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__} {error}") from error

    def checked(self, expected: Fingerprint) -> Manifest:
        """Itself when every source has the time recorded; a source that has not is hashed, and its new time taken.

        Raises StaleError when the content is another, CheckpointError when it cannot be read.
        """
        touched = [source for source in expected.sources if source.mtime_ns != self.times_ns[source.name]]
        if not touched:
            return self
        executor = hash_executor()
        try:
            for source, chunks in [(source, start_hash(source, executor)) for source in touched]:
                if finish_hash(chunks) != self.source_sha256[source.name]:
                    raise StaleError(f"{source.name} has changed")
        finally:
            executor.shutdown(cancel_futures=True)
        return replace(self, times_ns={source.name: source.mtime_ns for source in expected.sources})


def hash_executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_HASH_THREADS, os.cpu_count() or 1), thread_name_prefix="source-hash")


def start_hash(source: Source, executor: ThreadPoolExecutor) -> list[Future[bytes]]:
    """Begin the tree hash of a file; `finish_hash` waits for it."""
    return [executor.submit(_hash_chunk, source, start) for start in range(0, source.size, HASH_CHUNK_BYTES)]


def finish_hash(chunks: Sequence[Future[bytes]]) -> str:
    """The tree hash in hexadecimal. Raises CheckpointError when the file cannot be read."""
    return hashlib.sha256(b"".join(chunk.result() for chunk in chunks)).hexdigest()


def _hash_chunk(source: Source, start: int) -> bytes:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    left = min(HASH_CHUNK_BYTES, source.size - start)
    try:
        with source.path.open("rb", buffering=0) as file:
            file.seek(start)
            while left:
                num_read = file.readinto(buffer[: min(left, _READ_BYTES)])
                if not num_read:
                    raise CheckpointError(f"{shown_path(source.path)} became shorter while it was read; load it again")
                digest.update(buffer[:num_read])
                left -= num_read
    except OSError as error:
        raise unreadable(source.path, error) from error
    return digest.digest()


def _slab_record(layout: SlabLayout) -> dict[str, Any]:
    matrices = [
        {
            "weight": entry.key.projection.name.lower(),
            **asdict(entry.geometry),
            "codes_offset": entry.codes_offset,
            "scales_offset": entry.scales_offset,
        }
        for entry in layout.entries
    ]
    return {"name": slab_name(layout.layer), "bytes": layout.num_bytes, "matrices": matrices}


def _lost_groups(found: Mapping[str, Any], expected: Fingerprint) -> dict[str, int]:
    """Lost groups by tensor. Raises ValueError for a name or a number that no packing gives."""
    for name, count in found.items():
        if not name.isprintable() or type(count) is not int or not 0 < count <= expected.num_bytes:
            raise ValueError(f"lost_groups has {count} for {name}")
    return dict(found)


def _compare_slabs(found: Sequence[Mapping[str, Any]], expected: Fingerprint) -> None:
    if len(found) != len(expected.layouts):
        raise StaleError(f"it has {len(found)} slabs, needed are {len(expected.layouts)}")
    for layout, slab in zip(expected.layouts, found, strict=True):
        if {key: value for key, value in slab.items() if key != "sha256"} != _slab_record(layout):
            raise StaleError(f"{slab_name(layout.layer)} is laid out differently")


def _compare_sources(found: Mapping[str, int], expected: Fingerprint) -> None:
    sizes = {source.name: source.size for source in expected.sources}
    for name in sorted(found.keys() | sizes.keys()):
        if found.get(name) != sizes.get(name):
            before, now = (
                f"{size} bytes" if size is not None else "absent" for size in (found.get(name), sizes.get(name))
            )
            raise StaleError(f"{printable(name)} was {before}, now {now}")


def _readable(path: Path) -> str:
    """A checkpoint's name for a folder; in the Hugging Face cache that of the model, not the revision."""
    name = path.parent.parent.name.removeprefix("models--") if path.parent.name == "snapshots" else path.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:64].strip(".-") or "checkpoint"
