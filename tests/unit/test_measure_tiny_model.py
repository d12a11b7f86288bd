"""The script that asks a trained model: prompts as in training, answers counted and paired, on an untrained folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from kestrel_cuda.config import EngineConfig, Quant
from kestrel_cuda.engine import Engine
from kestrel_cuda.errors import DeviceError
from kestrel_cuda.inputs.pixels import image_patches
from kestrel_cuda.model.prompt_positions import Visual, find_spans
from scripts.make_tiny_model import TinyModel
from scripts.measure_tiny_model import ask_kestrel, main, questions, summary, table
from scripts.tiny_model.batches import RowEncoder, scaled_values
from scripts.tiny_model.checkpoint import RULES, num_rows, random_tensors, the_tokenizer, write_checkpoint

SMALL = TinyModel(num_layers=2, num_positions=100, vision_depth=4, deepstack=(0, 1, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untrained one."""
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, random_tensors(SMALL, num_rows(the_tokenizer())), SMALL)
    return path


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Untrained models do not stop by themselves."""
    monkeypatch.setattr("scripts.measure_tiny_model.MOST_NEW_TOKENS", 4)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.open(EngineConfig(model=folder, backend="cpu", quant=Quant.NONE))


def test_rows_are_what_the_product_makes_of_an_item(folder: Path, engine: Engine) -> None:
    """Ids, positions and pixels of training, against the product's own way from messages and pictures."""
    encoder = RowEncoder()
    for question in questions(engine, 26):
        row = encoder.row(question.item)
        assert row.ids[: row.num_prompt] == question.ids
        answer = engine.tokenizer.decode(row.ids[row.num_prompt :])
        assert answer == question.item.answer
        assert row.ids[-1] == engine.end_ids[0]
        visuals = [Visual("image", picture.size.grid_thw) for picture in question.pictures]
        assert row.spans == find_spans(question.ids, visuals, engine.checkpoint.config)
        for cut, picture in zip(row.cuts, question.pictures, strict=True):
            frame = scaled_values()[cut.values_u8].reshape(-1, 3, 1, 256)
            both = np.broadcast_to(frame, (len(frame), 3, 2, 256)).reshape(len(frame), -1)
            assert np.array_equal(both, image_patches(picture.picture, RULES).pixel_values)


def test_an_untrained_folder_is_measured_on_the_cpu(folder: Path, engine: Engine) -> None:
    asked = questions(engine, 13)
    answers = ask_kestrel(folder, "cpu", Quant.Q8_0, asked)
    assert len(answers) == 13
    right = [question.item.answer for question in asked]
    found = summary(asked, {"perfect": right, "q8_0": answers, "half": [*right[:6], *[""] * 7]})
    assert found["paired with perfect"] == {
        "q8_0": {"gained": 0, "lost": 13, "same_text": 0},
        "half": {"gained": 0, "lost": 7, "same_text": 6},
    }
    overall = found["accuracy"][-1]
    assert (overall["task"], overall["items"], overall["perfect"], overall["half"]) == (
        "all",
        13,
        1.0,
        round(6 / 13, 4),
    )
    assert table(found).splitlines()[0] == "| task | items | perfect | q8_0 | half |"


def test_the_script_prints_a_table_and_one_object(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.jsonl"
    words = [str(folder), "--no-transformers", "--backend", "cpu", "--items", "13", "--quants", "none", "q4_0"]
    monkeypatch.setattr(sys, "argv", ["measure", *words, "--wrong", str(wrong)])
    assert main() == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["items"] == 13
    assert found["seconds"].keys() == {"none", "q4_0"}
    assert found["accuracy"][-1]["none"] * 13 + len(wrong.read_text().splitlines()) == 13
    assert captured.err.startswith("| task | items | none | q4_0 |")


def test_a_folder_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["measure", str(tmp_path / "nothing"), "--no-transformers"])
    assert main() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "does not exist; give a directory" in captured.err


def refusal(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """The one line on standard error."""
    monkeypatch.setattr(sys, "argv", ["measure", str(folder), "--no-transformers", *words])
    try:
        code: object = main()
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)
    return captured.err.rstrip()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quants"], "argument --quants: expected at least one argument"),
        (["--quants", "bad"], "argument --quants: 'bad' is none of q8_0, q4_0, g256, none"),
        (["--quants", "q8_0", "none", "q8_0"], "--quants names q8_0 2 times; name each once"),
        (["--items", "0"], "argument --items: '0' is not a whole number of at least 1"),
        (["--wrong", "/"], "argument --wrong: / is a folder; give the path of a file"),
        (
            ["--wrong", "/no/such/place"],
            "argument --wrong: /no/such/place cannot be written (No such file or directory); give another path",
        ),
    ],
)
def test_arguments_are_refused_before_anything_is_asked(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert refusal(words, monkeypatch, capsys, folder) == message


def test_without_a_gpu_nothing_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    def none_here(name: str) -> None:
        raise DeviceError("no usable GPU here")

    monkeypatch.setattr("scripts.measure_tiny_model.open_backend", none_here)
    words = ["--quants", "q8_0", "--backend", "cuda", "--wrong", str(tmp_path / "wrong.jsonl")]
    assert refusal(words, monkeypatch, capsys, folder) == "no usable GPU here"
    assert not list(tmp_path.iterdir())
