"""The script that compares plans with the driver, where there is no GPU: what it refuses, at once and in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kestrel_cuda.backends.cpu import CpuBackend
from kestrel_cuda.config import VisionConfig
from kestrel_cuda.engine import Engine
from kestrel_cuda.errors import InputError
from scripts import check_plan

ROOT = Path(__file__).resolve().parents[2]


def refusal(*words: str) -> str:
    """The one line on standard error, of a machine whose GPUs are hidden."""
    command = [sys.executable, "scripts/check_plan.py", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr.rstrip()


@pytest.fixture
def checkpoint(oracle: Path) -> Path:
    return oracle / "checkpoints/tiny-dense-tied"


def test_without_a_gpu_one_line_says_so(checkpoint: Path) -> None:
    line = refusal(str(checkpoint), "--picture", "4x4")
    assert any(said in line for said in ("no NVIDIA driver", "no usable NVIDIA GPU", "CuPy cannot be imported")), line


def test_a_checkpoint_that_is_not_there() -> None:
    assert refusal("/no/where").startswith("/no/where does not exist; give a directory")


def test_sides_that_are_no_whole_tokens(checkpoint: Path) -> None:
    assert (
        refusal(str(checkpoint), "--picture", "4x3") == "--picture 4x3: sides have to be multiples of the merge size, 2"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--vram", "foo"), "argument --vram: 'foo' is not a size; write a number with a unit, like 6GiB or 500MB"),
        (("--vram", "none,"), "argument --vram: '' is not a size; write a number with a unit, like 6GiB or 500MB"),
        (("--picture", "0x0"), "argument --picture: '0x0' is not ROWSxCOLUMNS of patches, like 256x256"),
        (("--picture", "256"), "argument --picture: '256' is not ROWSxCOLUMNS of patches, like 256x256"),
        (("--picture", "-2x2"), "argument --picture: '-2x2' is not ROWSxCOLUMNS of patches, like 256x256"),
    ],
)
def test_arguments_that_are_refused(
    words: tuple[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check_plan", "checkpoint", f"{words[0]}={words[1]}"])
    with pytest.raises(SystemExit) as caught:
        check_plan.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"{message}\n"


def test_settings_of_a_picture(checkpoint: Path) -> None:
    vision = Engine.open(check_plan.EngineConfig(model=checkpoint)).checkpoint.config.vision
    assert isinstance(vision, VisionConfig)
    assert check_plan.picture_tokens(checkpoint, vision, None) == 0
    assert check_plan.picture_tokens(checkpoint, vision, [8, 6]) == 12
    with pytest.raises(InputError, match="has no vision tower for --picture; give a checkpoint with one"):
        check_plan.picture_tokens(checkpoint, None, [8, 6])
    assert [setting["ctx"] for setting in check_plan.settings(["none"], [8, 6], 12)] == [76, 76]
    assert [setting["ctx"] for setting in check_plan.settings(["none"], None, 0)] == [512, 8192] * 2


def test_a_context_over_the_model_s_positions_is_a_refusal(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for the GPU, which is not reached."""
    runtime = SimpleNamespace(deviceGetPCIBusId=lambda device: "0000:00:00.0")
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr("kestrel_cuda.backends.driver_memory.used_bytes", lambda bus: 0)
    monkeypatch.setattr("kestrel_cuda.engine.open_backend", lambda name, device: CpuBackend())
    setting = {"quant": "q8_0", "ctx": 10_000_000, "vram": None, "picture": None}
    found = check_plan.measure(checkpoint, setting)
    assert found.keys() == {"refused"}
    assert "--ctx 10000000 is over the" in found["refused"]
