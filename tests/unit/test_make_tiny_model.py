"""The script that writes the tests' checkpoints: read back through safetensors, by shape, dtype and design."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import deserialize, safe_open

from scripts.make_tiny_model import T0, main, make_chain, make_t0, make_tiny_checkpoint

TINY_RANDOM = Path(__file__).resolve().parents[1] / "data" / "tiny-random"
HEAD, EMBED = "lm_head.weight", "model.language_model.embed_tokens.weight"


def read(path: Path) -> dict[str, np.ndarray]:
    """Tensors as float32, whatever the stored dtype."""
    widths = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
    tensors = {}
    for name, entry in deserialize(path.read_bytes()):
        stored = np.frombuffer(entry["data"], widths[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            tensors[name] = (stored.astype(np.uint32) << 16).view(np.float32)
        else:
            tensors[name] = stored.astype(np.float32)
    return tensors


def test_the_random_checkpoint_is_what_its_readme_says(tmp_path: Path) -> None:
    written = make_tiny_checkpoint(tmp_path)
    assert {path.name for path in TINY_RANDOM.iterdir()} == {path.name for path in written.iterdir()} | {"README.md"}
    for path in written.iterdir():
        assert path.read_bytes() == (TINY_RANDOM / path.name).read_bytes(), path.name


def test_the_layout_is_the_reference_checkpoints(oracle: Path, tmp_path: Path) -> None:
    sizes = {"num_layers": 4, "hidden_size": 128, "intermediate_size": 256, "vision_hidden_size": 64}
    made = make_tiny_checkpoint(tmp_path, **sizes, vision_intermediate_size=128)
    reference = oracle / "checkpoints" / "tiny-dense-tied"
    shapes = [
        {name: entry["shape"] for name, entry in deserialize((folder / "model.safetensors").read_bytes())}
        for folder in (made, reference)
    ]
    assert shapes[0] == shapes[1]
    configs = [json.loads((folder / "config.json").read_text()) for folder in (made, reference)]
    assert configs[0] == configs[1]


def test_every_dtype_holds_the_same_model(tmp_path: Path) -> None:
    tensors = []
    for dtype in ("bfloat16", "float16", "float32"):
        folder = make_tiny_checkpoint(tmp_path / dtype, num_layers=1, dtype=dtype)
        assert json.loads((folder / "config.json").read_text())["text_config"]["dtype"] == dtype
        tensors.append(read(folder / "model.safetensors"))
    for other in tensors[1:]:
        for name, values in tensors[0].items():
            assert np.array_equal(values, other[name]), name


def test_shards_hold_every_tensor_once(tmp_path: Path) -> None:
    whole = read(make_tiny_checkpoint(tmp_path / "whole", num_layers=2) / "model.safetensors")
    folder = make_tiny_checkpoint(tmp_path / "shards", num_layers=2, num_shards=3)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == set(whole)
    for file_name in set(weight_map.values()):
        for name, values in read(folder / file_name).items():
            assert weight_map[name] == file_name
            assert np.array_equal(values, whole[name])


def test_a_folder_that_holds_a_checkpoint_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An index would go on naming shards that nobody wrote this time, and the shards may be somebody's."""
    make_tiny_checkpoint(tmp_path, seed=1, num_shards=3)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(sys, "argv", ["make", str(tmp_path), "--seed", "2"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path} holds a checkpoint already; name another folder, or ")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_edit_sees_the_tensors_before_they_are_written(tmp_path: Path) -> None:
    def drop_and_zero(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.language_model.layers.2.self_attn.k_norm.weight"]
        tensors[HEAD][3] = 0

    tensors = read(make_t0(tmp_path, edit=drop_and_zero) / "model.safetensors")
    assert "model.language_model.layers.2.self_attn.k_norm.weight" not in tensors
    assert not tensors[HEAD][3].any()


def test_t0_has_the_shapes_that_catch_mistakes(tmp_path: Path) -> None:
    folder = make_t0(tmp_path)
    with safe_open(folder / "model.safetensors", framework="np") as file:
        q_proj = file.get_slice("model.language_model.layers.0.self_attn.q_proj.weight").get_shape()
        head = file.get_slice(HEAD).get_shape()
    assert q_proj == [2 * T0.hidden_size, T0.hidden_size]
    assert head[0] % 4 == 1


def test_a_chain_answers_its_sequence_and_begins_again(tmp_path: Path) -> None:
    sequence = [72, 616, 33, 614]
    newline_id = json.loads((TINY_RANDOM / "tokenizer.json").read_text())["model"]["vocab"]["Ċ"]
    tensors = read(make_chain(tmp_path, sequence) / "model.safetensors")
    for name, values in tensors.items():
        assert values.any() != name.endswith(("o_proj.weight", "down_proj.weight"))
    answered, token_id = [], newline_id
    for _ in range(2 * len(sequence)):
        logits = tensors[HEAD] @ (tensors[EMBED][token_id] * tensors["model.language_model.norm.weight"])
        token_id = int(logits.argmax())
        answered.append(token_id)
    assert answered == sequence + sequence


def test_a_chain_refuses_what_it_cannot_answer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must differ"):
        make_chain(tmp_path, [5, 6, 5])
    with pytest.raises(ValueError, match="must differ"):
        make_chain(tmp_path, [5, 6], start_id=6)
    with pytest.raises(ValueError, match="257 ids"):
        make_chain(tmp_path, range(1, 257), start_id=0)


def test_a_checkpoint_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "m"))

    monkeypatch.setattr(sys, "argv", ["make", str(tmp_path / "m"), "--layers", "1"])
    monkeypatch.setattr("scripts.make_tiny_model.write_json", full)
    assert main() == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["make", str(tmp_path / "m"), "--layers", "1"])
    assert main() == 0
    assert (tmp_path / "m" / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
