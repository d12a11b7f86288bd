"""What is put in place of the packed form's files, and directories it cannot be saved to for reasons of their own."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel_cuda.checkpoint.reader import open_checkpoint
from kestrel_cuda.config import Quant
from kestrel_cuda.errors import CheckpointError, SettingError
from kestrel_cuda.quant.strip_cache_writer import StripCacheWriter
from kestrel_cuda.quant.strip_manifest import fingerprint
from tests import checkpoints
from tests.strips import Packed, check_slabs, hit, missed, names_in, pack, save


@pytest.fixture(scope="module")
def packed(tiny_model: Path) -> Packed:
    return pack(tiny_model)


@pytest.fixture
def saved(tmp_path: Path, packed: Packed) -> tuple[Path, Path]:
    """A directory with one saved form, and its folder."""
    save(tmp_path / "strips", packed).close()
    return tmp_path / "strips", tmp_path / "strips" / packed.expected.folder


def refused(directory: Path, packed: Packed, because: str | None = None) -> str:
    def write() -> None:
        with StripCacheWriter(directory, packed.expected, because) as writer:
            for layout in packed.expected.layouts:
                writer.add(layout, packed.slabs[layout.layer])

    with pytest.raises(SettingError) as caught:
        write()
    assert str(caught.value).isprintable()
    return str(caught.value)


# What is no file


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors"])
@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (os.mkfifo, "is a named pipe, not a file"),
        (Path.mkdir, "is a directory, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
        (lambda path: path.symlink_to("gone"), "cannot be read: No such file or directory"),
        (lambda path: path.symlink_to(path.name), "cannot be read: Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file_is_damaged_and_replaced(
    saved: tuple[Path, Path], packed: Packed, name: str, put: Callable[[Path], object], reason: str
) -> None:
    (saved[1] / name).unlink()
    put(saved[1] / name)
    assert missed(saved[0], packed) == f"the strip cache {saved[1]} is damaged: {name} {reason}"
    with save(saved[0], packed) as cache:
        check_slabs(cache, packed)


@pytest.mark.timeout(20)
def test_a_pipe_for_the_folder(tmp_path: Path, packed: Packed) -> None:
    os.mkfifo(tmp_path / packed.expected.folder)
    assert missed(tmp_path, packed) is None
    assert "is not a directory; remove it" in refused(tmp_path, packed)


# What the manifest says


@pytest.mark.parametrize(
    "lost",
    [
        {"a": -1},
        {"a": 0},
        {"a": 10**30},
        {"a": 1.5},
        {"a": True},
        {"a": "1"},
        {"a": None},
        {"a\nb": 1},
        {"\ud800": 1},
    ],
)
def test_lost_groups_that_cannot_be_are_damage(saved: tuple[Path, Path], packed: Packed, lost: object) -> None:
    checkpoints.edit_json(saved[1] / "manifest.json", {"lost_groups": lost})
    assert missed(saved[0], packed) == f"the strip cache {saved[1]} is damaged: manifest.json is not a manifest"


@pytest.mark.parametrize("quant", ["a\nb", "\ud800", "x" * 1000, ["q8_0"], None])
def test_odd_values_are_shown_on_one_line(saved: tuple[Path, Path], packed: Packed, quant: object) -> None:
    checkpoints.edit_json(saved[1] / "manifest.json", {"quant": quant})
    reason = missed(saved[0], packed)
    assert reason is not None
    assert reason.isprintable()
    assert "is stale: its quant is " in reason


# Directories


def test_a_link_to_no_directory(tmp_path: Path, packed: Packed) -> None:
    (tmp_path / "strips").symlink_to("gone")
    assert missed(tmp_path / "strips", packed) is None
    expected = "it is a link to a directory that does not exist; make that directory, or give another"
    assert refused(tmp_path / "strips", packed) == f"--strip-cache cannot write to {tmp_path / 'strips'}: {expected}"


def test_a_link_to_a_directory_is_one(tmp_path: Path, packed: Packed) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "strips").symlink_to("real")
    save(tmp_path / "strips", packed).close()
    hit(tmp_path / "strips", packed).close()


def test_a_file_for_the_directory(tmp_path: Path, packed: Packed) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "it is not a directory, or below something that is none; give" in refused(directory, packed)


@pytest.fixture
def small_files() -> Iterator[None]:
    """A limit on the size of a file, below the packed form's."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_limit_on_the_size_of_files(tmp_path: Path, packed: Packed) -> None:
    message = refused(tmp_path, packed)
    assert message.endswith(
        "File too large; raise the limit on the size of a file (ulimit -f), or give another file system"
    )
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "No space left on device; make room, or give another directory"),
        (errno.EDQUOT, "Disk quota exceeded; make room, or give another directory"),
        (errno.EIO, "Input/output error; check the disk that it is on, or give another directory"),
        (errno.EROFS, "Read-only file system; give a directory that can be written"),
    ],
)
def test_each_failure_has_its_advice(
    tmp_path: Path, packed: Packed, code: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", refuse)
    assert refused(tmp_path, packed).endswith(advice)


def test_why_it_was_to_be_written_is_said(saved: tuple[Path, Path], packed: Packed) -> None:
    (saved[1] / "manifest.json").write_text("{}")
    reason = missed(saved[0], packed)
    place = saved[0] / "below" / "file"
    place.parent.mkdir()
    place.touch()
    assert refused(place, packed, because=reason) == (
        f"{reason}; --strip-cache cannot write to {place}: it is not a directory, or below something that is none; "
        "give a directory"
    )


# Sources


def test_a_file_replaced_after_it_was_opened_is_noticed(tiny_model: Path, tmp_path: Path) -> None:
    model = checkpoints.copy(tiny_model, tmp_path / "own")
    checkpoint = open_checkpoint(model)
    fingerprint(checkpoint, Quant.Q8_0, [])
    file = model / "model.safetensors"
    file.rename(model / "old")
    file.write_bytes((model / "old").read_bytes()[::-1])
    os.utime(file, ns=(5, 5))
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed while it was loaded; load it again"):
        fingerprint(checkpoint, Quant.Q8_0, [])
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist; fetch it"):
        fingerprint(checkpoint, Quant.Q8_0, [])


# What changes while it is in use


def test_a_file_that_is_written_to_after_it_was_checked(saved: tuple[Path, Path], packed: Packed) -> None:
    directory, folder = saved
    layout = packed.expected.layouts[0]
    host = np.empty(layout.num_bytes, np.uint8)
    with hit(directory, packed) as cache:
        cache.read_into(layout, host)
        cache.read_into(layout, host, verify=False)
        weights = folder / "weights.safetensors"
        with weights.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))  # whatever the clock's step
        with pytest.raises(CheckpointError, match=r"layer\.000 was read from a file that was written to .*; run again"):
            cache.read_into(layout, host, verify=False)
        os.truncate(weights, 0)
        with pytest.raises(CheckpointError, match=r"layer\.000 ends after 0 of \d+ bytes; run again"):
            cache.read_into(layout, host, verify=False)
