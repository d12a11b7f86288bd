"""An index and a config.json that say other things than the tensor files do. Damaged files are test_reader's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kestrel_cuda.checkpoint.names import LM_HEAD_WEIGHT
from kestrel_cuda.checkpoint.reader import open_checkpoint
from kestrel_cuda.errors import CheckpointError
from tests import checkpoints
from tests.checkpoints import edit_json, read_tensors, write_tensors

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
Q_PROJ = "model.language_model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def directory(oracle: Path, tmp_path: Path) -> Path:
    """An editable copy of the untied checkpoint in two files and an index."""
    path = checkpoints.copy(oracle / "checkpoints/tiny-dense-untied-sharded", tmp_path / "sharded")
    write_tensors(path, read_tensors(path), num_files=2)
    return path


def error_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert str(caught.value).isprintable()
    return str(caught.value)


def edit_index(directory: Path, change: Callable[[dict[str, object]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


# File names


@pytest.mark.parametrize("name", ["../sharded/" + FIRST, "/etc/passwd", "a/../../x.safetensors", ".."])
def test_a_file_outside_the_folder_is_refused(directory: Path, name: str) -> None:
    edit_index(directory, lambda weights: weights.update({Q_PROJ: name}))
    assert f"names {name}, which is outside {directory}; files beside it are needed" in error_of(directory)


@pytest.mark.parametrize("name", [7, None, "", ".", "a\0b", "a\nb", "\ud800", "x" * 5000, ["x"], {"a": [1]}])
def test_a_file_name_that_is_none_is_refused(directory: Path, name: object) -> None:
    edit_index(directory, lambda weights: weights.update({Q_PROJ: name}))
    assert "for a file; the name of one is needed" in error_of(directory)


@pytest.mark.parametrize("other", ["./" + FIRST, ".//./" + FIRST, "link.safetensors"])
def test_two_spellings_of_one_file_are_one_file(directory: Path, other: str) -> None:
    (directory / "link.safetensors").symlink_to(FIRST)
    expected = open_checkpoint(directory)
    held = [name for name, file in json.loads((directory / INDEX).read_text())["weight_map"].items() if file == FIRST]
    edit_index(directory, lambda weights: weights.update(dict.fromkeys(held[1:], other)))
    checkpoint = open_checkpoint(directory)
    assert checkpoint.dtypes == expected.dtypes
    assert [stamp.path for stamp in checkpoint.files] == [stamp.path for stamp in expected.files]


def test_the_files_are_those_that_were_opened(directory: Path) -> None:
    stamps = {stamp.path.name: stamp for stamp in open_checkpoint(directory).files}
    assert set(stamps) == {INDEX, FIRST, FIRST.replace("00001", "00002", 1)}
    for stamp in stamps.values():
        status = stamp.path.stat()
        assert (stamp.size, stamp.mtime_ns) == (status.st_size, status.st_mtime_ns)


# Tensor names


def test_a_tensor_that_the_file_lacks_is_named(directory: Path) -> None:
    edit_index(directory, lambda weights: weights.update({"model.extra": FIRST}))
    assert f"{FIRST} lacks tensors that {INDEX} places there (1): model.extra; fetch both again" in error_of(directory)


def test_a_needed_tensor_that_the_index_leaves_out_is_named(directory: Path) -> None:
    edit_index(directory, lambda weights: weights.pop(Q_PROJ))
    assert f"the index leaves out needed tensors (1): {Q_PROJ}, stored in model-0000" in error_of(directory)


def test_an_untied_lm_head_that_the_index_leaves_out_is_not_used(directory: Path) -> None:
    edit_index(directory, lambda weights: weights.pop(LM_HEAD_WEIGHT))
    assert f"the index leaves out needed tensors (1): {LM_HEAD_WEIGHT}" in error_of(directory)
    edit_json(directory / "config.json", {"tie_word_embeddings": True})
    checkpoint = open_checkpoint(directory)
    assert checkpoint.tied
    assert f"tensors that the index leaves out are left alone (1): {LM_HEAD_WEIGHT}" in checkpoint.warnings


def test_odd_tensor_names_are_shown_on_one_line(directory: Path) -> None:
    edit_index(directory, lambda weights: weights.update({"a\n\x1b[2J\ud800": FIRST}))
    assert r"a\n\x1b[2J\ud800" in error_of(directory)


# Numbers that config.json gives and nothing bears out


@pytest.mark.timeout(20)
@pytest.mark.parametrize("count", [5, 1000, 10**6, 2**31 - 1])
@pytest.mark.parametrize(
    ("key", "stored"),
    [("text_config.num_hidden_layers", "but 4 are stored"), ("vision_config.depth", "but 3 are stored")],
)
def test_more_layers_than_are_stored(directory: Path, key: str, stored: str, count: int) -> None:
    edit_json(directory / "config.json", {key: count})
    started = time.perf_counter()
    message = error_of(directory)
    assert time.perf_counter() - started < 2
    assert f"is {count}, {stored}" in message


def test_fewer_layers_than_are_stored(directory: Path) -> None:
    """An answer of half a model would look like one."""
    edit_json(directory / "config.json", {"text_config.num_hidden_layers": 2})
    assert "num_hidden_layers is 2, but 4 are stored" in error_of(directory)
    edit_json(directory / "config.json", {"text_config.num_hidden_layers": 4})
    edit_json(directory / "config.json", {"vision_config.depth": 2, "vision_config.deepstack_visual_indexes": [0, 1]})
    assert "depth is 2, but 3 are stored" in error_of(directory)


def test_more_mergers_than_are_stored(directory: Path) -> None:
    edit_json(directory / "config.json", {"vision_config.deepstack_visual_indexes": [0, 1, 2]})
    assert "deepstack_visual_indexes, counted, is 3, but 2 are stored" in error_of(directory)
    edit_json(directory / "config.json", {"vision_config.deepstack_visual_indexes": [0] * 1000})
    assert "it has to be different blocks below depth (3)" in error_of(directory)


@pytest.mark.parametrize("count", [10**18, 10**400])
@pytest.mark.parametrize("key", ["text_config.num_hidden_layers", "vision_config.depth", "text_config.vocab_size"])
def test_numbers_that_nothing_has(directory: Path, key: str, count: int) -> None:
    edit_json(directory / "config.json", {key: count})
    assert "it has to be a whole number of at least 1, at most 2147483647" in error_of(directory)


def test_layers_with_gaps_are_listed_unless_there_are_too_many(directory: Path) -> None:
    tensors = {name: tensor for name, tensor in read_tensors(directory).items() if ".layers.1." not in name}
    write_tensors(directory, tensors, num_files=2)
    assert "lacks needed tensors (11): model.language_model.layers.1." in error_of(directory)
    edit_json(directory / "config.json", {"text_config.num_hidden_layers": 10**9})
    assert "num_hidden_layers is 1000000000, but 3 are stored" in error_of(directory)
