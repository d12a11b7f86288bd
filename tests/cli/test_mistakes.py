"""A user's mistake is one line on standard error, whatever a command would have said before it; real commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrel_cli import program

ON_THE_CPU = ("--backend", "cpu")
MISTAKES = {
    "no picture": ("inspect", "no-such.png"),
    "no checkpoint for pictures": ("inspect", "-m", "no-such", "x.png"),
    "no checkpoint to check": ("selftest", "-m", "no-such"),
    "no checkpoint to measure": ("bench", "-m", "no-such"),
    "too long": ("bench", "--prompt-tokens", "5000"),
    "too small": ("bench", "--vram", "1"),
    "no checkpoint to ask": ("run", "-m", "no-such", "hi"),
}


@pytest.mark.parametrize("arguments", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exit_code = program.execute((*arguments, *(() if arguments[0] == "inspect" else ON_THE_CPU)), {})
    out, err = capfd.readouterr()
    assert (exit_code, out) == (2, "")
    assert err.startswith("kestrel-cuda: ")
    assert err.count("\n") == 1


def test_a_warning_does_not_wait(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It may be what explains the mistake."""
    program.execute(("inspect", str(tmp_path / "none.png")), {"KESTREL_CUDA_MODLE": "x"})
    assert "warning: KESTREL_CUDA_MODLE is not read" in capfd.readouterr().err.splitlines()[0]


def test_settings_come_before_what_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    exit_code = program.execute(("selftest", *ON_THE_CPU), {})
    err = capfd.readouterr().err
    assert exit_code == 0
    assert err.index("settings ") < err.index("backend ")


def test_a_profile_that_a_variable_names(capfd: pytest.CaptureFixture[str]) -> None:
    assert program.execute(("run", "hi"), {"KESTREL_CUDA_PROFILE": "nope"}) == 2
    assert capfd.readouterr().err.startswith("kestrel-cuda: KESTREL_CUDA_PROFILE: no profile 'nope'; there are: ")
