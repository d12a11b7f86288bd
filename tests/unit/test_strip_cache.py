"""The packed form on disk: what is found, what is refused and why, and what crashes and rivals leave behind."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from kestrel_cuda.backends.base import SourceMatrix
from kestrel_cuda.backends.cpu import CpuBackend
from kestrel_cuda.checkpoint.reader import open_checkpoint
from kestrel_cuda.config import Quant
from kestrel_cuda.errors import CheckpointError, InternalError, SettingError
from kestrel_cuda.model.weights import plan_weights
from kestrel_cuda.quant import strip_manifest
from kestrel_cuda.quant.packed import Element
from kestrel_cuda.quant.strip_cache import DamagedStripCache, Miss, StripCache, find
from kestrel_cuda.quant.strip_cache_writer import StripCacheWriter
from kestrel_cuda.quant.strip_manifest import Fingerprint, fingerprint
from kestrel_cuda.weight_keys import LM_HEAD_LAYER, WeightKey
from tests import checkpoints

ROOT = Path(__file__).resolve().parents[2]
ELEMENTS = {"BF16": Element.BF16, "F16": Element.F16, "F32": Element.F32}


@dataclass(frozen=True)
class Packed:
    """A checkpoint packed without any cache: what a cache has to give back."""

    expected: Fingerprint
    slabs: dict[int, NDArray[np.uint8]]


def pack(model: Path, quant: Quant = Quant.Q8_0) -> Packed:
    checkpoint, backend = open_checkpoint(model), CpuBackend()
    weights = plan_weights(checkpoint.config, quant, lambda key: ELEMENTS[checkpoint.weight(key).dtype])
    slabs = {}
    for layout in weights.layouts:
        slab, packer = backend.allocate_slab(layout), backend.packer()
        for entry in layout.entries:
            tensors = [checkpoint.weight(WeightKey(entry.key.layer, p)) for p in entry.key.projection.members]
            packer.pack(slab, entry, [SourceMatrix(tensor.name, tensor.data) for tensor in tensors])
        slabs[layout.layer] = slab.raw
    return Packed(fingerprint(checkpoint, quant, list(weights.layouts)), slabs)


def save(directory: Path, packed: Packed, lost_groups: dict[str, int] | None = None) -> StripCache:
    with StripCacheWriter(directory, packed.expected) as writer:
        for layout in packed.expected.layouts:
            writer.add(layout, packed.slabs[layout.layer])
        return writer.commit(lost_groups or {})


def hit(directory: Path, packed: Packed) -> StripCache:
    found = find(directory, packed.expected)
    assert isinstance(found, StripCache), found
    return found


def missed(directory: Path, packed: Packed) -> str | None:
    found = find(directory, packed.expected)
    assert isinstance(found, Miss)
    return found.reason


def check_slabs(cache: StripCache, packed: Packed) -> None:
    for layout in packed.expected.layouts:
        host = np.full(layout.num_bytes, 0xA5, np.uint8)
        cache.read_into(layout, host)
        np.testing.assert_array_equal(host, packed.slabs[layout.layer])
        np.testing.assert_array_equal(cache.view(layout), packed.slabs[layout.layer])


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


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


@pytest.mark.parametrize("quant", list(Quant))
def test_what_is_saved_is_found(model: Path, tmp_path: Path, quant: Quant) -> None:
    packed = pack(model, quant)
    assert missed(tmp_path / "new" / "strips", packed) is None
    with save(tmp_path / "new" / "strips", packed, {"some.weight": 3}) as written:
        check_slabs(written, packed)
    with hit(tmp_path / "new" / "strips", packed) as found:
        check_slabs(found, packed)
        assert found.lost_groups == {"some.weight": 3}
        assert found.num_bytes == (found.path / "weights.safetensors").stat().st_size
    assert names_in(tmp_path / "new" / "strips") == {packed.expected.folder}
    assert packed.expected.folder.startswith(f"Tiny-VL-test-{quant}-")


def test_each_quant_has_a_folder_of_its_own(model: Path, saved: tuple[Path, Path], packed: Packed) -> None:
    other = pack(model, Quant.Q4_0)
    assert missed(saved[0], other) is None
    with save(saved[0], other) as cache, hit(saved[0], packed) as first:
        check_slabs(cache, other)
        check_slabs(first, packed)
    assert names_in(saved[0]) == {packed.expected.folder, other.expected.folder}


def test_the_file_is_plain_safetensors(saved: tuple[Path, Path], packed: Packed) -> None:
    with safe_open(saved[1] / "weights.safetensors", framework="np") as file:
        assert list(file.keys()) == ["layer.000", "layer.001", "layer.002", "layer.003", "lm_head"]
        assert file.metadata()["quant"] == "q8_0"
        np.testing.assert_array_equal(file.get_tensor("layer.002"), packed.slabs[2])
        np.testing.assert_array_equal(file.get_tensor("lm_head"), packed.slabs[LM_HEAD_LAYER])
    _, first_start = next(packed.expected.ranges())
    assert first_start % 4096 == 0


def test_the_manifest_says_what_it_is_of(saved: tuple[Path, Path], packed: Packed, model: Path) -> None:
    manifest = json.loads((saved[1] / "manifest.json").read_text())
    content = (model / "model.safetensors").read_bytes()
    status = (model / "model.safetensors").stat()
    assert manifest["sources"] == [
        {
            "name": "model.safetensors",
            "size": len(content),
            "mtime_ns": status.st_mtime_ns,
            "sha256": hashlib.sha256(hashlib.sha256(content).digest()).hexdigest(),
        }
    ]
    assert (manifest["format"], manifest["packing"], manifest["quant"]) == (1, 1, "q8_0")
    assert manifest["kestrel_cuda"]
    slab = manifest["slabs"][1]
    assert (slab["name"], slab["bytes"]) == ("layer.001", packed.slabs[1].nbytes)
    assert slab["sha256"] == hashlib.sha256(packed.slabs[1].data).hexdigest()
    assert [matrix["weight"] for matrix in slab["matrices"]] == ["qkv", "o", "gate_up", "down"]
    assert slab["matrices"][1] == {
        "weight": "o",
        "element": "int8",
        "num_inputs": 128,
        "num_outputs": 64,
        "group_size": 32,
        "codes_offset": packed.expected.layouts[1].entries[1].codes_offset,
        "scales_offset": packed.expected.layouts[1].entries[1].scales_offset,
    }


def test_slabs_are_added_and_read_by_several_threads(tmp_path: Path, packed: Packed) -> None:
    layouts = packed.expected.layouts
    with ThreadPoolExecutor(4) as executor, StripCacheWriter(tmp_path, packed.expected) as writer:
        list(executor.map(lambda layout: writer.add(layout, packed.slabs[layout.layer]), reversed(layouts)))
        with writer.commit({}) as cache:
            list(executor.map(lambda _: check_slabs(cache, packed), range(8)))


def test_a_tree_hash_is_over_the_hashes_of_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strip_manifest, "HASH_CHUNK_BYTES", 3000)
    monkeypatch.setattr(strip_manifest, "_READ_BYTES", 1024)
    content = np.random.default_rng(0).bytes(10_000)
    (tmp_path / "file").write_bytes(content)
    source = strip_manifest.Source.of(tmp_path, tmp_path / "file")
    pieces = [hashlib.sha256(content[start : start + 3000]).digest() for start in range(0, 10_000, 3000)]
    with strip_manifest.hash_executor() as executor:
        chunks = strip_manifest.start_hash(source, executor)
        assert strip_manifest.finish_hash(chunks) == hashlib.sha256(b"".join(pieces)).hexdigest()
        (tmp_path / "file").write_bytes(content[:5000])
        with pytest.raises(CheckpointError, match="became shorter while it was read"):
            strip_manifest.finish_hash(strip_manifest.start_hash(source, executor))


# What is stale


def test_an_untouched_source_is_not_hashed(
    saved: tuple[Path, Path], packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrel_cuda.quant.strip_manifest.start_hash", None)
    hit(saved[0], packed).close()


def test_a_touched_source_of_equal_content_is_a_hit(
    own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "strips", pack(own_model), {"a": 1}).close()
    os.utime(own_model / "model.safetensors", ns=(5, 5))
    touched = pack(own_model)
    with hit(tmp_path / "strips", touched) as cache:
        check_slabs(cache, touched)
        assert cache.lost_groups == {"a": 1}
        assert names_in(cache.path) == {"weights.safetensors", "manifest.json"}
    # The new time was recorded: nothing is hashed again.
    monkeypatch.setattr("kestrel_cuda.quant.strip_manifest.start_hash", None)
    hit(tmp_path / "strips", touched).close()


def test_new_times_need_no_writable_cache(own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "strips", pack(own_model)).close()
    os.utime(own_model / "model.safetensors", ns=(5, 5))

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", refuse)
    hit(tmp_path / "strips", pack(own_model)).close()


def test_a_changed_source_is_stale_and_replaced(own_model: Path, tmp_path: Path) -> None:
    tensors = checkpoints.read_tensors(own_model)
    checkpoints.write_tensors(own_model, tensors)
    before = pack(own_model)
    save(tmp_path / "strips", before).close()
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    stored = tensors[name]
    tensors[name] = stored._replace(data=stored.data[2:] + stored.data[:2])
    checkpoints.write_tensors(own_model, tensors)
    os.utime(own_model / "model.safetensors", ns=(5, 5))

    after = pack(own_model)
    assert not np.array_equal(after.slabs[1], before.slabs[1])
    folder = tmp_path / "strips" / after.expected.folder
    assert missed(tmp_path / "strips", after) == f"the strip cache {folder} is stale: model.safetensors has changed"
    with save(tmp_path / "strips", after) as written, hit(tmp_path / "strips", after) as found:
        check_slabs(written, after)
        check_slabs(found, after)
    assert names_in(tmp_path / "strips") == {after.expected.folder}


def test_sources_of_other_sizes_or_names_are_stale(own_model: Path, tmp_path: Path) -> None:
    size = (own_model / "model.safetensors").stat().st_size
    save(tmp_path / "strips", pack(own_model)).close()
    tensors = checkpoints.read_tensors(own_model)
    checkpoints.write_tensors(own_model, tensors | {"extra": checkpoints.Stored.zeros("F32", 4)})
    reason = missed(tmp_path / "strips", pack(own_model))
    assert reason is not None
    assert f"is stale: model.safetensors was {size} bytes, now " in reason
    checkpoints.write_tensors(own_model, tensors, num_files=2)
    sharded = pack(own_model)
    assert [source.name for source in sharded.expected.sources] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    reason = missed(tmp_path / "strips", sharded)
    assert reason is not None
    assert "is stale: model-00001-of-00002.safetensors was absent, now " in reason
    with save(tmp_path / "strips", sharded) as cache:
        check_slabs(cache, sharded)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("format", 2, "its format is 2, needed is 1"),
        ("packing", 0, "its packing is 0, needed is 1"),
        ("quant", "q4_0", "its quant is q4_0, needed is q8_0"),
        ("slabs", [], "it has 0 slabs, needed are 5"),
    ],
)
def test_other_versions_are_stale(
    saved: tuple[Path, Path], packed: Packed, key: str, value: object, reason: str
) -> None:
    checkpoints.edit_json(saved[1] / "manifest.json", {key: value})
    assert missed(saved[0], packed) == f"the strip cache {saved[1]} is stale: {reason}"


def test_the_version_of_the_program_does_not_matter(saved: tuple[Path, Path], packed: Packed) -> None:
    checkpoints.edit_json(saved[1] / "manifest.json", {"kestrel_cuda": "9.9"})
    hit(saved[0], packed).close()


def test_another_layout_is_stale(saved: tuple[Path, Path], packed: Packed) -> None:
    layouts = list(packed.expected.layouts)
    entries = layouts[2].entries
    geometry = replace(entries[0].geometry, group_size=64)
    layouts[2] = replace(layouts[2], entries=(replace(entries[0], geometry=geometry), *entries[1:]))
    other = replace(packed, expected=replace(packed.expected, layouts=tuple(layouts)))
    assert missed(saved[0], other) == f"the strip cache {saved[1]} is stale: layer.002 is laid out differently"


# What is damaged


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not a manifest"),
        (b"\xff\x00garbage", "is not a manifest"),
        (b"[1, 2]", "is not a manifest"),
        (b'{"format": 1}', "is not a manifest"),
        (b"[" * 100_000, "is not a manifest"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_damaged_manifest(saved: tuple[Path, Path], packed: Packed, content: bytes | None, reason: str) -> None:
    (saved[1] / "manifest.json").unlink()
    if content is not None:
        (saved[1] / "manifest.json").write_bytes(content)
    assert missed(saved[0], packed) == f"the strip cache {saved[1]} is damaged: manifest.json {reason}"
    with save(saved[0], packed) as cache:
        check_slabs(cache, packed)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sources", [{"name": "model.safetensors"}]),
        ("sources", [{"name": "model.safetensors", "size": float("inf")}]),
        ("sources", None),
        ("lost_groups", ["a"]),
        ("slabs", 3),
        ("slabs", [1, 2, 3, 4, 5]),
    ],
)
def test_a_manifest_of_other_kinds(saved: tuple[Path, Path], packed: Packed, key: str, value: object) -> None:
    checkpoints.edit_json(saved[1] / "manifest.json", {key: value})
    assert missed(saved[0], packed) == f"the strip cache {saved[1]} is damaged: manifest.json is not a manifest"


def test_weights_of_another_size_or_header(saved: tuple[Path, Path], packed: Packed) -> None:
    weights = saved[1] / "weights.safetensors"
    content = weights.read_bytes()
    size = len(content)
    for damaged, reason in (
        (content[:-1], f"is truncated: {size - 1} bytes, needed are {size}"),
        (b"", f"is truncated: 0 bytes, needed are {size}"),
        (content + b"\0", f"is too long: {size + 1} bytes, needed are {size}"),
    ):
        weights.write_bytes(damaged)
        assert missed(saved[0], packed) == f"the strip cache {saved[1]} is damaged: weights.safetensors {reason}"
    weights.write_bytes(content.replace(b"layer.001", b"layer.007", 1))
    reason_found = missed(saved[0], packed)
    assert reason_found is not None
    assert reason_found.endswith("is damaged: the header of weights.safetensors is not the one written")
    weights.unlink()
    assert missed(saved[0], packed) == (
        f"the strip cache {saved[1]} is damaged: weights.safetensors cannot be read: No such file or directory"
    )


@pytest.mark.parametrize("layer", [0, 3, LM_HEAD_LAYER])
def test_one_flipped_bit_is_noticed_and_the_form_rebuilt(saved: tuple[Path, Path], packed: Packed, layer: int) -> None:
    layout, start = next(pair for pair in packed.expected.ranges() if pair[0].layer == layer)
    with (saved[1] / "weights.safetensors").open("r+b") as file:
        file.seek(start + layout.num_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    name = "lm_head" if layer == LM_HEAD_LAYER else f"layer.{layer:03d}"
    with hit(saved[0], packed) as cache:
        for other in packed.expected.layouts:
            host = np.empty(other.num_bytes, np.uint8)
            if other.layer != layer:
                cache.read_into(other, host)
                continue
            with pytest.raises(DamagedStripCache) as raised:
                cache.read_into(other, host)
            reason = f"{name} is not what was written (its SHA-256 differs)"
            assert str(raised.value) == f"the strip cache {saved[1]} is damaged: {reason}"
            cache.read_into(other, host, verify=False)
            assert np.count_nonzero(host != packed.slabs[layer]) == 1
    with save(saved[0], packed) as rebuilt, hit(saved[0], packed) as found:
        check_slabs(rebuilt, packed)
        check_slabs(found, packed)


def test_a_file_cut_while_it_is_open(saved: tuple[Path, Path], packed: Packed) -> None:
    last = packed.expected.layouts[-1]
    with hit(saved[0], packed) as cache:
        os.truncate(saved[1] / "weights.safetensors", cache.num_bytes - 100)
        with pytest.raises(DamagedStripCache, match=rf"lm_head ends after {last.num_bytes - 100} of {last.num_bytes} "):
            cache.read_into(last, np.empty(last.num_bytes, np.uint8))


def test_a_buffer_of_another_size_is_our_fault(saved: tuple[Path, Path], packed: Packed) -> None:
    layout = packed.expected.layouts[0]
    with hit(saved[0], packed) as cache, pytest.raises(InternalError, match=r"layer\.000 is"):
        cache.read_into(layout, np.empty(layout.num_bytes + 1, np.uint8))


def test_advice_reaches_the_bytes_of_one_layer(
    saved: tuple[Path, Path], packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int]] = []
    advise = os.posix_fadvise

    def note(file: int, start: int, num_bytes: int, advice: int) -> None:
        asked.append((start, num_bytes, advice))
        advise(file, start, num_bytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", note)
    layout, start = list(packed.expected.ranges())[2]
    with hit(saved[0], packed) as cache:
        np.testing.assert_array_equal(cache.view(layout), packed.slabs[2])
        cache.advise_away(2)
        assert asked == [(start, layout.num_bytes, os.POSIX_FADV_DONTNEED)]
        asked.clear()
        monkeypatch.setattr("kestrel_cuda.quant.strip_cache._READ_AHEAD_BYTES", 10_000)
        cache.advise_ahead(2)
        ends = [begin + num_bytes for begin, num_bytes, _ in asked]
        assert [begin for begin, _, _ in asked] == [start, *ends[:-1]], "pieces follow one another"
        assert ends[-1] == start + layout.num_bytes
        assert {(num_bytes <= 10_000, advice) for _, num_bytes, advice in asked} == {(True, os.POSIX_FADV_WILLNEED)}
        check_slabs(cache, packed)


# Writing


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
    assert names_in(tmp_path / "strips") == set()


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


# Several processes

WORKER = """
import sys
from pathlib import Path
from kestrel_cuda.quant.strip_cache_writer import StripCacheWriter
from tests.unit.test_strip_cache import check_slabs, pack

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


def test_a_model_in_the_hugging_face_cache_is_called_by_its_name(tiny_model: Path, tmp_path: Path) -> None:
    snapshots = tmp_path / "models--Qwen--Tiny" / "snapshots"
    snapshots.mkdir(parents=True)
    folder = pack(checkpoints.copy(tiny_model, snapshots / "89abcdef")).expected.folder
    assert folder.startswith("Qwen--Tiny-q8_0-")
