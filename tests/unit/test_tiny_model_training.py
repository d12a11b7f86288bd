"""Training: what it computes is what transformers computes, it goes on from its state, and it ends with a checkpoint.

All but the schedule and the messages need PyTorch and transformers, which this project does not install.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import measure_tiny_model, train_tiny_model
from scripts.make_tiny_model import TinyModel
from scripts.tiny_model import network, state
from scripts.tiny_model.batches import RowEncoder, collate
from scripts.tiny_model.checkpoint import num_rows, the_tokenizer
from scripts.tiny_model.split import Split
from scripts.tiny_model.stream import item
from scripts.train_tiny_model import DECAY_SHARE, WARM_UP_STEPS, DivergedError, Schedule, run

ROOT = Path(__file__).resolve().parents[2]
SMALL = TinyModel(num_layers=3, num_positions=100, vision_depth=4, deepstack=(0, 1, 3))


def test_the_rate_rises_stays_and_falls_to_zero() -> None:
    schedule = Schedule(peak=2e-3, total_steps=10_000)
    rates = [schedule.rate(step) for step in range(10_001)]
    assert rates[0] == pytest.approx(2e-3 / WARM_UP_STEPS)
    fall = round(10_000 * (1 - DECAY_SHARE))
    assert set(rates[WARM_UP_STEPS:fall]) == {2e-3}
    assert rates[fall + 1500] == pytest.approx(1e-3)
    assert rates[-1] == 0
    # Until the fall, a longer run is the same run.
    assert rates[:fall] == [Schedule(2e-3, 20_000).rate(step) for step in range(fall)]


@pytest.mark.parametrize("script", [train_tiny_model, measure_tiny_model])
def test_without_pytorch_one_line_says_so(
    script: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"{script.__name__}.missing_packages", lambda: "torch")  # type: ignore[attr-defined]
    target = tmp_path / "out"
    words = ["--out", str(target)] if script is train_tiny_model else [str(target)]
    monkeypatch.setattr(sys, "argv", ["script", *words])
    assert script.main() == 2  # type: ignore[attr-defined]
    captured = capsys.readouterr()
    assert captured.err.startswith("torch is not installed; ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not target.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--log-every", "0"], "argument --log-every: '0' is not a whole number of at least 1"),
        (["--eval-every", "0"], "argument --eval-every: '0' is not a whole number of at least 1"),
        (["--eval-items", "0"], "argument --eval-items: '0' is not a whole number of at least 1"),
        (["--total-steps", "0"], "argument --total-steps: '0' is not a whole number of at least 1"),
        (["--batch-size", "-1"], "argument --batch-size: '-1' is not a whole number of at least 1"),
        (["--workers", "-1"], "argument --workers: '-1' is not a whole number of at least 0"),
        (["--seed", "-1"], "argument --seed: '-1' is not a whole number of at least 0"),
        (["--minutes", "nan"], "argument --minutes: 'nan' is not a number of minutes, of at least 0"),
        (["--minutes", "-1"], "argument --minutes: '-1' is not a number of minutes, of at least 0"),
        (["--rate", "nan"], "argument --rate: 'nan' is not a learning rate from 1e-06 to 1"),
        (["--out", "FILE"], "argument --out: FILE cannot be written (Not a directory); give another path"),
        (["--export", "FILE/a"], "argument --export: FILE/a cannot be written (Not a directory); give another path"),
    ],
)
def test_arguments_are_refused_before_anything_is_trained(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("kept")
    monkeypatch.setattr(sys, "argv", ["train", "--out", "out", *words])
    with pytest.raises(SystemExit) as caught:
        train_tiny_model.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"{message}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]


def test_a_state_that_is_not_there_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Resuming:
        def __init__(self, *_: object) -> None: ...

        def resume(self, folder: Path) -> None:
            state.read_progress(folder)

    monkeypatch.setattr(train_tiny_model, "missing_packages", lambda: None)
    monkeypatch.setattr(train_tiny_model, "Trainer", Resuming)
    words = ["--out", str(tmp_path / "out"), "--resume", str(tmp_path / "none")]
    monkeypatch.setattr(sys, "argv", ["train", *words])
    assert train_tiny_model.main() == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.endswith("; give the folder of an earlier run\n")
    assert not list(tmp_path.iterdir())


def test_a_state_of_another_kind_is_refused(tmp_path: Path) -> None:
    assert not state.exists(tmp_path)
    (tmp_path / "state.json").write_text('{"step": 1}')
    assert state.exists(tmp_path)
    with pytest.raises(state.StateError, match=r"state\.json cannot be read .*; give the folder of an earlier run"):
        state.read_progress(tmp_path)


@pytest.fixture(scope="module")
def torch() -> Any:
    pytest.importorskip("transformers", reason="training needs transformers, which is not installed")
    return pytest.importorskip("torch", reason="training needs PyTorch, which is not installed")


def test_training_computes_what_transformers_computes(torch: Any) -> None:
    built = network.build(SMALL, seed=1)
    shapes = {name: tuple(p.shape) for name, p in built.named_parameters()}
    assert shapes["model.language_model.embed_tokens.weight"][0] == num_rows(the_tokenizer())
    encoder = RowEncoder()
    rows = [encoder.row(item(0, Split.TRAIN, index)) for index in range(10)]
    arrays = network.to_tensors(collate(rows, SMALL))
    grids = [cut.grid for row in rows for cut in row.cuts]
    assert network.largest_difference(built, arrays, grids) < 2e-5
    text_only = network.to_tensors(collate([encoder.row(item(0, Split.TRAIN, 0, "sum"))], SMALL))
    assert network.largest_difference(built, text_only, []) < 2e-5
    with torch.no_grad():
        built.model.visual.deepstack_merger_list[1].linear_fc2.bias += 1.0
        assert network.largest_difference(built, arrays, grids) < 2e-5


def test_a_run_goes_on_where_it_stopped_and_exports(torch: Any, tmp_path: Path) -> None:
    """Two steps at once, and one after the other from a state: the same weights but for moments in bfloat16."""

    def train(out: Path, *more: str) -> list[dict[str, object]]:
        command = [sys.executable, "scripts/train_tiny_model.py", "--out", str(out), "--batch-size", "3"]
        command += ["--workers", "0", "--log-every", "1", "--eval-items", "1", "--minutes", "5", *more]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    whole = train(tmp_path / "whole", "--total-steps", "2")
    train(tmp_path / "parts", "--total-steps", "1")
    second = train(tmp_path / "parts", "--total-steps", "2", "--export", str(tmp_path / "export"))
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (whole, second)]
    assert losses[1] == losses[0][1:]
    assert state.read_progress(tmp_path / "parts")[0] == state.Progress(step=2, seed=0, num_items=6)
    assert all(path.stat().st_size < 2**24 for path in (tmp_path / "parts").iterdir())
    assert (tmp_path / "export" / "model.safetensors").is_file()


class DivergingTrainer:
    """A trainer whose loss is no number from its second step on."""

    device, seed, batch_size, step, num_items, saved = "cpu", 0, 2, 0, 0, False

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def train_step(self, arrays: object, rate: float) -> object:
        self.step += 1
        return self._torch.tensor(1.0 if self.step == 1 else float("nan"))

    def save(self, folder: Path) -> None:
        self.saved = True


@pytest.mark.parametrize(("log_every", "logged"), [(1, [1.0]), (1000, [])])
def test_a_loss_that_is_no_number_ends_the_run_without_a_state(
    torch: Any, tmp_path: Path, log_every: int, logged: list[float]
) -> None:
    trainer, lines = DivergingTrainer(torch), []
    arguments = argparse.Namespace(
        rate=1e-3, total_steps=9, workers=0, minutes=1, log_every=log_every, eval_every=2, out=tmp_path
    )
    with pytest.raises(DivergedError, match="the loss is nan at step 2; go on from an earlier state, lower --rate"):
        run(trainer, arguments, lambda **values: lines.append(values))
    assert [line["loss"] for line in lines] == logged
    assert not trainer.saved


def test_a_step_of_muon_is_along_a_nearly_orthogonal_matrix(torch: Any) -> None:
    """Singular values around 1, whatever those of the momentum, in either orientation and for several at once."""
    from scripts.tiny_model.optimizer import orthogonal

    momenta = torch.randn(3, 64, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 1, 24)
    for matrices in (momenta, momenta.mT):
        along = orthogonal(matrices)
        assert along.shape == matrices.shape
        values = torch.linalg.svdvals(along)
        assert values.max() < 1.3
        assert values.median() > 0.6
        assert (along * matrices).sum() > 0
