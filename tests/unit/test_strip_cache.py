"""The packed form on disk: what is found, and what is refused and why."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from kestrel_cuda.checkpoint.files import FileStamp
from kestrel_cuda.config import Quant
from kestrel_cuda.errors import CheckpointError, InternalError
from kestrel_cuda.quant import strip_manifest
from kestrel_cuda.quant.strip_cache import DamagedStripCache
from kestrel_cuda.quant.strip_cache_writer import StripCacheWriter
from kestrel_cuda.weight_keys import LM_HEAD_LAYER
from tests import checkpoints
from tests.strips import Packed, check_slabs, hit, missed, names_in, pack, save


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
    source = strip_manifest.Source.of(tmp_path, FileStamp.of(tmp_path / "file"))
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
        check_slabs(cache, packed)


def test_a_model_in_the_hugging_face_cache_is_called_by_its_name(tiny_model: Path, tmp_path: Path) -> None:
    snapshots = tmp_path / "models--Qwen--Tiny" / "snapshots"
    snapshots.mkdir(parents=True)
    folder = pack(checkpoints.copy(tiny_model, snapshots / "89abcdef")).expected.folder
    assert folder.startswith("Qwen--Tiny-q8_0-")
