"""Opening a checkpoint: every layout that loads, and every damage named in one line before anything is allocated."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kestrel_cuda.checkpoint.names import EMBEDDING, linear_name
from kestrel_cuda.checkpoint.reader import Checkpoint, open_checkpoint
from kestrel_cuda.checkpoint.tensor_file import widen
from kestrel_cuda.errors import CheckpointError
from kestrel_cuda.weight_keys import LM_HEAD, Projection, WeightKey
from tests import checkpoints
from tests.checkpoints import Stored, edit_json, read_tensors, write_file, write_tensors

K_NORM = "model.language_model.layers.2.self_attn.k_norm.weight"
Q_PROJ = "model.language_model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def tied(oracle: Path, tmp_path: Path) -> Path:
    """An editable copy of the tied checkpoint: BF16 in one file."""
    return checkpoints.copy(oracle / "checkpoints/tiny-dense-tied", tmp_path / "tied")


@pytest.fixture
def sharded(oracle: Path, tmp_path: Path) -> Path:
    """An editable copy of the untied checkpoint: BF16 in five files and an index."""
    return checkpoints.copy(oracle / "checkpoints/tiny-dense-untied-sharded", tmp_path / "sharded")


def error_of(path: Path) -> str:
    """What `open_checkpoint` complains of, in one line."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_same_values(checkpoint: Checkpoint, tensors: dict[str, Stored]) -> None:
    for name, stored in tensors.items():
        np.testing.assert_array_equal(widen(checkpoint.tensor(name)), stored.to_float32())


@pytest.mark.parametrize("name", ["tiny-dense-tied", "tiny-dense-untied-sharded", "tiny-28L"])
def test_every_tensor_of_the_reference_checkpoints(oracle: Path, name: str) -> None:
    directory = oracle / "checkpoints" / name
    checkpoint = open_checkpoint(directory)
    tensors = read_tensors(directory)
    assert_same_values(checkpoint, tensors)
    assert sum(checkpoint.dtypes.values()) == len(tensors)
    assert set(checkpoint.dtypes) == ({"F32"} if name == "tiny-28L" else {"BF16"})
    assert checkpoint.generation_eos_ids == (616, 614)
    assert not checkpoint.text_only
    assert checkpoint.warnings == []


def test_a_view_copies_nothing_and_cannot_be_written(tied: Path) -> None:
    raw = open_checkpoint(tied).tensor(Q_PROJ)
    assert (raw.name, raw.dtype, raw.shape, raw.data.shape) == (Q_PROJ, "BF16", (128, 128), (128, 128))
    assert raw.data.dtype == np.uint16
    assert not raw.data.flags.owndata
    assert not raw.data.flags.writeable


def test_threads_read_the_same(oracle: Path) -> None:
    checkpoint = open_checkpoint(oracle / "checkpoints/tiny-28L")
    names = [linear_name(WeightKey(layer, Projection.UP)) for layer in range(28)] * 8
    expected = [checkpoint.tensor(name).data.sum() for name in names]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda name: checkpoint.tensor(name).data.sum(), names)) == expected


def test_bf16_f16_and_f32_give_equal_values(tied: Path) -> None:
    tensors = read_tensors(tied)
    # Values that all three hold exactly: multiples of 1/64 of magnitude below 2.
    codes = (np.arange(128 * 128, dtype=np.float32).reshape(128, 128) % 255 - 127) / 64
    bf16 = (codes.view(np.uint32) >> 16).astype(np.uint16)
    stored = Stored("BF16", (128, 128), bf16.tobytes())
    for dtype, variant in [("BF16", stored), ("F16", stored.cast("F16")), ("F32", stored.cast("F32"))]:
        write_tensors(tied, tensors | {Q_PROJ: variant})
        checkpoint = open_checkpoint(tied)
        assert checkpoint.tensor(Q_PROJ).dtype == dtype
        np.testing.assert_array_equal(widen(checkpoint.tensor(Q_PROJ)), codes)
        assert checkpoint.dtypes == ({"BF16": 121} if dtype == "BF16" else {"BF16": 120, dtype: 1})


def test_widening_bf16_keeps_every_bit_pattern() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    np.testing.assert_array_equal(widen(patterns).view(np.uint32), patterns.astype(np.uint32) << 16)


def test_widening_f32_copies_nothing() -> None:
    values = np.ones(4, np.float32)
    assert widen(values) is values


# Tied and untied


def test_a_tied_lm_head_is_the_embedding(tied: Path) -> None:
    checkpoint = open_checkpoint(tied)
    assert (checkpoint.tied, checkpoint.lm_head_name) == (True, EMBEDDING)
    np.testing.assert_array_equal(checkpoint.weight(LM_HEAD).data, checkpoint.tensor(EMBEDDING).data)


@pytest.mark.parametrize("tie", [True, False])
def test_a_stored_lm_head_always_wins(tied: Path, tie: bool) -> None:
    tensors = read_tensors(tied)
    embedding = tensors[EMBEDDING]
    negated = (np.frombuffer(embedding.data, np.uint16) ^ 0x8000).astype(np.uint16)
    write_tensors(tied, tensors | {"lm_head.weight": embedding._replace(data=negated.tobytes())})
    edit_json(tied / "config.json", {"tie_word_embeddings": tie}, ("text_config.tie_word_embeddings",))
    checkpoint = open_checkpoint(tied)
    assert (checkpoint.tied, checkpoint.lm_head_name) == (False, "lm_head.weight")
    np.testing.assert_array_equal(widen(checkpoint.weight(LM_HEAD)), -embedding.to_float32())
    assert any("lm_head.weight is stored" in note for note in checkpoint.notes) == tie


def test_an_untied_model_needs_its_lm_head(sharded: Path) -> None:
    tensors = read_tensors(sharded)
    del tensors["lm_head.weight"]
    write_tensors(sharded, tensors)
    assert "lacks lm_head.weight" in error_of(sharded)


# Layouts


def test_one_file_and_shards_are_the_same(sharded: Path) -> None:
    tensors = read_tensors(sharded)
    for num_files in (1, 2, 7):
        write_tensors(sharded, tensors, num_files)
        assert_same_values(open_checkpoint(sharded), tensors)


def test_a_hub_snapshot_of_links(sharded: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in sharded.iterdir():
        (snapshot / file.name).symlink_to(Path("../..") / sharded.name / file.name)
    assert_same_values(open_checkpoint(snapshot), read_tensors(sharded))
    (sharded / "model-00003-of-00005.safetensors").unlink()
    assert "model-00003-of-00005.safetensors is a link to a file that does not exist" in error_of(snapshot)


def test_a_stray_single_file_beside_an_index_is_left_alone(sharded: Path) -> None:
    tensors = read_tensors(sharded)
    (sharded / "model.safetensors").write_bytes(b"not looked at")
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.warnings == ["model.safetensors is left alone: model.safetensors.index.json does not name it"]
    assert_same_values(checkpoint, tensors)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual."),
        lambda name: name.replace("model.language_model.", "language_model.model."),
    ],
)
@pytest.mark.parametrize("num_files", [1, 2])
def test_other_spellings_of_names(tied: Path, rename: Callable[[str], str], num_files: int) -> None:
    tensors = read_tensors(tied)
    write_tensors(tied, {rename(name): tensor for name, tensor in tensors.items()}, num_files)
    assert_same_values(open_checkpoint(tied), tensors)


def test_one_tensor_under_two_names_is_refused(tied: Path) -> None:
    tensors = read_tensors(tied)
    write_tensors(tied, tensors | {"model.norm.weight": tensors["model.language_model.norm.weight"]})
    assert "holds model.language_model.norm.weight twice" in error_of(tied)


def test_the_index_says_which_of_two_copies_counts(sharded: Path) -> None:
    tensors = read_tensors(sharded)
    write_tensors(sharded, tensors, num_files=2)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    stale = next(name for name in sorted(set(index.values())) if name != index[Q_PROJ])
    held = {name: tensors[name] for name, file in index.items() if file == stale}
    write_file(sharded / stale, held | {Q_PROJ: Stored.zeros("BF16", *tensors[Q_PROJ].shape)})
    assert_same_values(open_checkpoint(sharded), tensors)


# Missing and damaged files


def test_missing_shards_are_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00005.safetensors").unlink()
    assert "names (1): model-00002-of-00005.safetensors" in error_of(sharded)
    (sharded / "model-00005-of-00005.safetensors").unlink()
    assert "names (2): model-00002-of-00005.safetensors, model-00005-of-00005.safetensors" in error_of(sharded)


def test_shards_without_their_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in error_of(sharded)


def test_no_safetensors_at_all(tied: Path) -> None:
    (tied / "model.safetensors").rename(tied / "pytorch_model.bin")
    assert "lacks model.safetensors" in error_of(tied)


def test_a_truncated_file_is_named_with_both_sizes(tied: Path) -> None:
    file = tied / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    assert f"{file} is truncated: {len(content) - 100} bytes, its header needs {len(content)}" in error_of(tied)
    file.write_bytes(content[:1000])
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    assert f"{file} is truncated: 1000 bytes, its header alone needs {header_bytes}" in error_of(tied)
    file.write_bytes(content + b"more")
    assert f"{file} is too long: {len(content) + 4} bytes, its header needs {len(content)}" in error_of(tied)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "is 0 bytes"),
        (b"\x01\x00", "is 2 bytes"),
        (b"<!DOCTYPE html>\n<html>404</html>", "is not a safetensors file: 32 bytes that begin with '<!DOCTYPE html>'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not a safetensors file"),
        (bytes(64), "has a damaged header (64 bytes in all)"),
        (b"\x02\0\0\0\0\0\0\0[]", "has a damaged header"),
        (b"\x0a\0\0\0\0\0\0\0" + b'{"a": "b"}', "has a damaged header"),
    ],
)
def test_what_is_not_safetensors_is_named(tied: Path, content: bytes, named: str) -> None:
    file = tied / "model.safetensors"
    file.write_bytes(content)
    assert f"{file} {named}" in error_of(tied)


def test_overlapping_tensors_are_refused(tied: Path) -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in ("a", "b")}).encode()
    (tied / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert "is damaged" in error_of(tied)


# Missing, unexpected and wrong tensors


def test_missing_tensors_are_listed(tied: Path) -> None:
    tensors = read_tensors(tied)
    del tensors[K_NORM]
    write_tensors(tied, tensors)
    assert f"lacks needed tensors (1): {K_NORM};" in error_of(tied)
    kept = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name or "visual" in name}
    write_tensors(tied, kept)
    assert re.search(r"lacks needed tensors \(13\): \S+, \S+, \S+ and 10 more;", error_of(tied))


def test_unexpected_tensors_are_one_warning(tied: Path) -> None:
    tensors = read_tensors(tied)
    extra = {f"foo.bar{i}": Stored.zeros("F32", 2) for i in range(5)}
    write_tensors(tied, tensors | extra)
    checkpoint = open_checkpoint(tied)
    assert checkpoint.warnings == [
        "tensors that the model does not have are left alone (5): foo.bar0, foo.bar1, foo.bar2 and 2 more"
    ]
    assert checkpoint.dtypes == {"BF16": len(tensors)}


@pytest.mark.parametrize(
    ("name", "shape"),
    [(Q_PROJ, (96, 96)), (EMBEDDING, (655, 128)), (K_NORM, (128,)), ("model.visual.pos_embed.weight", (65, 64))],
)
def test_a_wrong_shape_is_named(tied: Path, name: str, shape: tuple[int, ...]) -> None:
    tensors = read_tensors(tied)
    right = list(tensors[name].shape)
    write_tensors(tied, tensors | {name: Stored.zeros("BF16", *shape)})
    assert f"{name} is {list(shape)}; config.json needs {right}" in error_of(tied)


def test_head_dim_of_the_config_decides_the_shapes(sharded: Path) -> None:
    assert open_checkpoint(sharded).tensor(Q_PROJ).shape == (256, 96)
    o_proj = "model.language_model.layers.0.self_attn.o_proj.weight"
    assert open_checkpoint(sharded).tensor(o_proj).shape == (96, 256)


@pytest.mark.parametrize("with_scale", [True, False])
def test_fp8_tensors_are_refused_by_name(tied: Path, with_scale: bool) -> None:
    tensors = read_tensors(tied) | {Q_PROJ: Stored.zeros("F8_E4M3", 128, 128)}
    if with_scale:
        tensors[Q_PROJ + "_scale_inv"] = Stored.zeros("F32", 1, 1)
    write_tensors(tied, tensors)
    assert f"stores tensors in F8_E4M3 (1): {Q_PROJ}; only BF16, F16, F32 are read" in error_of(tied)


def test_no_vision_tower_is_text_only(tied: Path) -> None:
    tensors = {name: tensor for name, tensor in read_tensors(tied).items() if ".visual." not in name}
    write_tensors(tied, tensors)
    checkpoint = open_checkpoint(tied)
    assert checkpoint.text_only
    assert sum("text only" in note for note in checkpoint.notes) == 1
    edit_json(tied / "config.json", {}, ("vision_config",))
    assert open_checkpoint(tied).text_only


def test_half_a_vision_tower_is_refused(tied: Path) -> None:
    tensors = read_tensors(tied)
    lost = "model.visual.deepstack_merger_list.1.linear_fc1.bias"
    del tensors[lost]
    write_tensors(tied, tensors)
    assert f"lacks needed tensors (1): {lost};" in error_of(tied)


def test_a_vision_tower_needs_its_config(tied: Path) -> None:
    edit_json(tied / "config.json", {}, ("vision_config",))
    assert "config.json lacks vision_config" in error_of(tied)


# What is not a checkpoint


def test_what_is_not_a_checkpoint_directory(tmp_path: Path) -> None:
    assert f"{tmp_path / 'nowhere'} does not exist" in error_of(tmp_path / "nowhere")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + bytes(20))
    assert f"{gguf} is a GGUF file, which is not read" in error_of(gguf)
    assert "holds model.gguf: GGUF files are not read" in error_of(tmp_path)
    gguf.unlink()
    (tmp_path / "model.safetensors").touch()
    assert "model.safetensors is a file; give a directory" in error_of(tmp_path / "model.safetensors")
    assert f"{tmp_path} holds no config.json" in error_of(tmp_path)


def test_the_architecture_is_refused_before_the_weights_are_looked_for(tied: Path) -> None:
    edit_json(tied / "config.json", {"architectures": ["Qwen3VLMoeForConditionalGeneration"]})
    (tied / "model.safetensors").unlink()
    assert "Qwen3VLMoeForConditionalGeneration is not supported" in error_of(tied)


# generation_config.json


def test_sampling_that_is_not_used_is_noted(tied: Path) -> None:
    note = "generation_config.json asks for sampling (temperature 0.7, top_k 20, top_p 0.8); decoding here is greedy"
    assert note in open_checkpoint(tied).notes
    generation = tied / "generation_config.json"
    edit_json(generation, {"do_sample": False, "repetition_penalty": 1.05})
    assert any("asks for repetition_penalty 1.05;" in note for note in open_checkpoint(tied).notes)
    edit_json(generation, {"repetition_penalty": 1.0})
    assert open_checkpoint(tied).notes == []
    generation.unlink()
    assert open_checkpoint(tied).notes == []


@pytest.mark.parametrize(("eos", "ids"), [(616, (616,)), ([616, 616, 614], (616, 614)), (None, ())])
def test_generation_end_ids(tied: Path, eos: object, ids: tuple[int, ...]) -> None:
    edit_json(tied / "generation_config.json", {"eos_token_id": eos})
    assert open_checkpoint(tied).generation_eos_ids == ids


def test_generation_end_ids_of_a_wrong_kind_are_named(tied: Path) -> None:
    edit_json(tied / "generation_config.json", {"eos_token_id": [616, "x"]})
    assert 'generation_config.json: eos_token_id is [616, "x"]' in error_of(tied)


def test_defaults_taken_are_noted(tied: Path) -> None:
    edit_json(tied / "config.json", {}, ("text_config.hidden_act",))
    assert "config.json does not give a value; taken: text_config.hidden_act = silu" in open_checkpoint(tied).notes
