"""Saving the packed form: what failures, crashes and rival processes leave behind."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrel_cuda.errors import CheckpointError, InternalError, SettingError
from kestrel_cuda.quant.strip_cache_writer import StripCacheWriter
from tests import checkpoints
from tests.strips import Packed, check_slabs, hit, missed, names_in, pack, save

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.copy(tiny_model, tmp_path_factory.mktemp("strips") / "Tiny VL (test)")


@pytest.fixture(scope="module")
def packed(model: Path) -> Packed:
    return pack(model)


@pytest.fixture
def own_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    return checkpoints.copy(tiny_model, tmp_path / "own")


@pytest.fixture
def saved(tmp_path: Path, packed: Packed) -> Iterator[tuple[Path, Path]]:
    """A directory with one saved form, and its folder."""
    directory = tmp_path / "strips"
    save(directory, packed).close()
    yield directory, directory / packed.expected.folder
    assert not [name for name in names_in(directory) if name.startswith(".")], "nothing temporary stays"


def save_and_fail(directory: Path, packed: Packed, error: BaseException, others: frozenset[str] = frozenset()) -> None:
    with StripCacheWriter(directory, packed.expected) as writer:
        writer.add(packed.expected.layouts[0], packed.slabs[0])
        assert len(names_in(directory) - others) == 1
        assert others < names_in(directory)
        assert missed(directory, packed) is None
        raise error


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_an_exception_leaves_nothing(tmp_path: Path, packed: Packed, error: BaseException) -> None:
    with pytest.raises(type(error)):
        save_and_fail(tmp_path, packed, error)
    assert names_in(tmp_path) == set()


def test_a_writer_that_is_not_committed_changes_nothing(saved: tuple[Path, Path], packed: Packed) -> None:
    with StripCacheWriter(saved[0], packed.expected) as writer:
        writer.add(packed.expected.layouts[0], packed.slabs[0])
        with pytest.raises(InternalError, match=r"without layer\.001 \(4 slabs lack\)"):
            writer.commit({})
    with hit(saved[0], packed) as cache:
        check_slabs(cache, packed)


def test_a_source_changed_under_way_is_not_saved(own_model: Path, tmp_path: Path) -> None:
    packed = pack(own_model)
    with StripCacheWriter(tmp_path / "strips", packed.expected) as writer:
        for layout in packed.expected.layouts:
            writer.add(layout, packed.slabs[layout.layer])
        os.utime(own_model / "model.safetensors", ns=(5, 5))
        with pytest.raises(CheckpointError, match="changed while it was loaded; load it again"):
            writer.commit({})
    assert names_in(tmp_path) == {"own"}


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/strips"])
def test_a_directory_that_cannot_be_written(tmp_path: Path, packed: Packed, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    directory = tmp_path / place
    assert missed(directory, packed) is None
    with pytest.raises(SettingError) as raised, StripCacheWriter(directory, packed.expected):
        pytest.fail("entered")
    assert str(raised.value).startswith(f"--strip-cache cannot write to {directory}: ")
    assert "\n" not in str(raised.value)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_read(saved: tuple[Path, Path], packed: Packed) -> None:
    saved[0].chmod(0o555)
    try:
        hit(saved[0], packed).close()
        with pytest.raises(SettingError, match="Permission denied"), StripCacheWriter(saved[0], packed.expected):
            pytest.fail("entered")
    finally:
        saved[0].chmod(0o755)


def test_too_little_room_is_said_first(tmp_path: Path, packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1024)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with (
        pytest.raises(SettingError, match=r"1\.00 KiB free; .* are needed"),
        StripCacheWriter(tmp_path, packed.expected),
    ):
        pytest.fail("entered")
    assert names_in(tmp_path) == set()


def test_a_disk_that_fills_up_is_said(tmp_path: Path, packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with StripCacheWriter(tmp_path, packed.expected) as writer:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(SettingError, match="No space left on device"):
            writer.add(packed.expected.layouts[0], packed.slabs[0])
    assert names_in(tmp_path) == set()


def test_a_file_in_the_way_is_left_alone(tmp_path: Path, packed: Packed) -> None:
    (tmp_path / packed.expected.folder).write_text("mine")
    assert missed(tmp_path, packed) is None
    with (
        pytest.raises(SettingError, match="is not a directory; remove it"),
        StripCacheWriter(tmp_path, packed.expected),
    ):
        pytest.fail("entered")
    assert names_in(tmp_path) == {packed.expected.folder}


@pytest.mark.parametrize("had_directory", [True, False])
@pytest.mark.parametrize("call", ["mkdir", "open", "flock"])
def test_an_interrupt_as_it_begins_leaves_nothing(
    tmp_path: Path, packed: Packed, monkeypatch: pytest.MonkeyPatch, call: str, had_directory: bool
) -> None:
    place: Any = {"mkdir": Path, "open": os, "flock": fcntl}[call]
    do, interrupted = getattr(place, call), []

    def interrupt_after(subject: Any, *rest: Any, **options: Any) -> None:
        found = do(subject, *rest, **options)
        is_temporary = call == "flock" or ".incomplete-" in str(subject)
        if is_temporary and not interrupted:
            interrupted.append(subject)
            raise KeyboardInterrupt
        return found  # type: ignore[no-any-return]

    directory = tmp_path / "a" / "b"
    if had_directory:
        directory.mkdir(parents=True)
    monkeypatch.setattr(place, call, interrupt_after)
    with pytest.raises(KeyboardInterrupt), StripCacheWriter(directory, packed.expected):
        pytest.fail("entered")
    assert interrupted
    assert names_in(tmp_path) == ({"a"} if had_directory else set())
    assert not had_directory or names_in(directory) == set()


@pytest.mark.parametrize("had", ["", "a", "a/b"])
def test_directories_made_for_a_cache_that_is_refused_go_again(
    tmp_path: Path, packed: Packed, monkeypatch: pytest.MonkeyPatch, had: str
) -> None:
    (tmp_path / had).mkdir(parents=True, exist_ok=True)
    usage = shutil.disk_usage(tmp_path)._replace(free=1024)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(SettingError, match="free"), StripCacheWriter(tmp_path / "a" / "b", packed.expected):
            pytest.fail("entered")
    with pytest.raises(RuntimeError), StripCacheWriter(tmp_path / "a" / "b", packed.expected):
        raise RuntimeError("stop")
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == [path for path in ("a", "a/b") if f"{had}/".startswith(f"{path}/")]
    save(tmp_path / "a" / "b", packed).close()
    hit(tmp_path / "a" / "b", packed).close()


# Several processes

WORKER = """
import sys
from pathlib import Path
from kestrel_cuda.quant.strip_cache_writer import StripCacheWriter
from tests.strips import check_slabs, pack

directory, packed, num_slabs = Path(sys.argv[1]), pack(Path(sys.argv[2])), int(sys.argv[3])
with StripCacheWriter(directory, packed.expected) as writer:
    for layout in packed.expected.layouts[:num_slabs]:
        writer.add(layout, packed.slabs[layout.layer])
    print("ready", flush=True)
    sys.stdin.readline()
    with writer.commit({}) as cache:
        check_slabs(cache, packed)
        print(cache.path, flush=True)
"""


def worker(directory: Path, model: Path, num_slabs: int = 5) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")])}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, directory, model, str(num_slabs)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def test_two_processes_at_once(tmp_path: Path, model: Path, packed: Packed) -> None:
    directory = tmp_path / "strips"
    workers = [worker(directory, model), worker(directory, model)]
    for process in workers:
        wait_until_ready(process)
    assert len(names_in(directory)) == 2
    assert missed(directory, packed) is None
    for process in workers:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in workers:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert output == f"{directory / packed.expected.folder}\n"
    assert names_in(directory) == {packed.expected.folder}
    with hit(directory, packed) as cache:
        check_slabs(cache, packed)


@pytest.mark.parametrize("had_damaged", [False, True])
def test_the_loser_of_a_race_uses_the_winners(tmp_path: Path, packed: Packed, had_damaged: bool) -> None:
    if had_damaged:
        save(tmp_path, packed).close()
        (tmp_path / packed.expected.folder / "manifest.json").write_text("{}")
    with StripCacheWriter(tmp_path, packed.expected) as writer:
        for layout in packed.expected.layouts:
            writer.add(layout, packed.slabs[layout.layer])
        save(tmp_path, packed, {"the winner's": 1}).close()
        with writer.commit({"the loser's": 1}) as cache:
            assert cache.lost_groups == {"the winner's": 1}
            check_slabs(cache, packed)
    assert names_in(tmp_path) == {packed.expected.folder}


def test_a_reader_keeps_what_is_replaced(saved: tuple[Path, Path], packed: Packed) -> None:
    with hit(saved[0], packed) as cache:
        save(saved[0], packed).close()
        shutil.rmtree(saved[1])
        check_slabs(cache, packed)


def test_a_killed_process_leaves_nothing_that_is_found(tmp_path: Path, model: Path, packed: Packed) -> None:
    process = worker(tmp_path, model, num_slabs=2)
    wait_until_ready(process)
    left = frozenset(names_in(tmp_path))
    with pytest.raises(RuntimeError):
        save_and_fail(tmp_path, packed, RuntimeError("stop"), left)
    assert names_in(tmp_path) == left, "what a live process writes is not swept"

    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert names_in(tmp_path) == left
    assert missed(tmp_path, packed) is None
    with save(tmp_path, packed) as cache:
        check_slabs(cache, packed)
    assert names_in(tmp_path) == {packed.expected.folder}


def test_a_folder_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, calls = fcntl.flock, []

    def swept_first(lock: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            (path,) = tmp_path.iterdir()
            path.rmdir()
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", swept_first)
    with save(tmp_path, packed) as cache:
        check_slabs(cache, packed)
    assert len(calls) == 2


# What is not ours


def test_folders_of_others_are_not_swept(tmp_path: Path, packed: Packed) -> None:
    entry = packed.expected.folder
    left, others = f".incomplete-{entry}-00c0ffee", f".incomplete-{entry}-0badcafe"
    kept = [".incomplete-mydocs", f".incomplete-{entry}", f".incomplete-{entry}-00c0ffee-old", others]
    for name in (left, *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.safetensors").touch()
    (tmp_path / others / "notes.txt").write_text("mine")
    (tmp_path / f".incomplete-{entry}-0ddba115").symlink_to(kept[0])
    save(tmp_path, packed).close()
    assert names_in(tmp_path) == {entry, *kept, f".incomplete-{entry}-0ddba115"}
    assert all((tmp_path / name / "weights.safetensors").exists() for name in kept)


@pytest.mark.parametrize("name", ["notes.txt", "folder/file", "manifest.json/file", ".incomplete-mine"])
def test_a_folder_with_files_of_others_is_not_replaced(saved: tuple[Path, Path], packed: Packed, name: str) -> None:
    (saved[1] / "manifest.json").unlink()
    (saved[1] / name).parent.mkdir(exist_ok=True)
    (saved[1] / name).write_text("mine")
    with pytest.raises(SettingError) as raised, StripCacheWriter(saved[0], packed.expected, "it is old"):
        pytest.fail("entered")
    assert str(raised.value) == (
        f"it is old; --strip-cache: {saved[1]} is to be replaced, but holds what this program did not put there "
        f"({name.split('/')[0]}); move that elsewhere, or give another directory"
    )
    assert (saved[1] / name).read_text() == "mine"
    assert (saved[1] / "weights.safetensors").exists()


def test_files_of_others_that_come_while_it_is_written_stay(saved: tuple[Path, Path], packed: Packed) -> None:
    with StripCacheWriter(saved[0], packed.expected) as writer:
        for layout in packed.expected.layouts:
            writer.add(layout, packed.slabs[layout.layer])
        (saved[1] / "notes.txt").write_text("mine")
        with pytest.raises(SettingError, match=r"\(notes\.txt\); move that elsewhere"):
            writer.commit({})
    assert (saved[1] / "notes.txt").read_text() == "mine"
    hit(saved[0], packed).close()
