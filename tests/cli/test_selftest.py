"""The command `selftest` over checks from a list: what it prints, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kestrel_cli import program
from kestrel_cli import selftest as selftest_command
from kestrel_cuda.config import EngineConfig
from kestrel_cuda.errors import DeviceError


@dataclass(frozen=True)
class FakeCheck:
    name: str
    passed: bool
    detail: str
    skipped: bool = False


@dataclass(frozen=True)
class FakeReport:
    checks: tuple[FakeCheck, ...]
    backend: str = "cpu"
    device: str = "a processor"

    @property
    def passed(self) -> bool:
        return all(check.passed or check.skipped for check in self.checks)


GOOD = (FakeCheck("gemm 4x32", True, "nmse 1e-12"), FakeCheck("window 1", False, "no GPU", skipped=True))
BAD = (*GOOD, FakeCheck("gemv\n1x32", False, "nmse 0.3"))

Selftest = Callable[..., tuple[int, str, str]]


@pytest.fixture
def selftest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Selftest:
    """Run `selftest` with the given checks; exit code, standard output, standard error."""

    def call(checks: tuple[FakeCheck, ...], *arguments: str, **variables: str) -> tuple[int, str, str]:
        def run_checks(
            config: EngineConfig,
            on_open: Callable[[str, str, str | None], None],
            on_check: Callable[[FakeCheck], None],
        ) -> FakeReport:
            if config.device == 9:
                raise DeviceError("no device 9")
            on_open("cpu", "a processor", None if config.backend == "cpu" else "no GPU here")
            for check in checks:
                on_check(check)
            return FakeReport(checks)

        monkeypatch.setattr(selftest_command, "run_checks", run_checks)
        exit_code = program.execute(["selftest", *arguments], variables)
        return (int(exit_code), *capsys.readouterr())

    return call


def test_one_line_a_check(selftest: Selftest) -> None:
    exit_code, out, err = selftest(GOOD)
    assert exit_code == 0
    assert out == "ok   gemm 4x32: nmse 1e-12\nskip window 1: no GPU\n1 checks passed, 1 skipped (cpu, a processor)\n"
    assert err.startswith("settings")
    assert "backend      cpu, a processor\nwarning: running on the CPU: no GPU here\n" in err
    assert "running on the CPU" not in selftest(GOOD, "--backend", "cpu")[2]


def test_a_failed_check_is_exit_code_1(selftest: Selftest) -> None:
    exit_code, out, err = selftest(BAD, "--quiet")
    assert exit_code == 1
    assert out.endswith("FAIL gemv\\n1x32: nmse 0.3\n")
    assert err == "kestrel-cuda: 1 of 3 checks failed: gemv; 1x32\n"


@pytest.mark.parametrize(("checks", "passed"), [(GOOD, True), (BAD, False)])
def test_json_is_one_object(selftest: Selftest, checks: tuple[FakeCheck, ...], passed: bool) -> None:
    exit_code, out, _ = selftest(checks, "--json", "--quant", "q4_0")
    assert exit_code == (0 if passed else 1)
    assert out.count("\n") == 1
    result = json.loads(out)
    assert result["passed"] is passed
    assert [check["name"] for check in result["checks"]] == [check.name for check in checks]
    assert result["checks"][1] == {"name": "window 1", "passed": False, "detail": "no GPU", "skipped": True}
    assert (result["backend"], result["device"]) == ("cpu", "a processor")
    assert result["warnings"] == ["running on the CPU: no GPU here"]
    assert result["settings"]["quant"] == {"value": "q4_0", "source": "flag"}
    assert ("error" in result) is not passed


def test_what_it_cannot_do_is_refused(selftest: Selftest) -> None:
    assert selftest(GOOD, "--keep", "4")[0] == 2
    assert selftest(GOOD, "a prompt")[0] == 2
    exit_code, out, err = selftest(GOOD, "--device", "9", "--quiet")
    assert (exit_code, out, err) == (2, "", "kestrel-cuda: no device 9\n")
    exit_code, out, _ = selftest(GOOD, "--json", VLLM_CUDA_INFER="yes")
    assert exit_code == 2
    assert json.loads(out)["error"]["message"].startswith("VLLM_CUDA_INFER holds 'yes'; it takes 0 ")


def test_the_switches_of_the_window_are_not_its_own(selftest: Selftest) -> None:
    assert selftest(GOOD, VLLM_CUDA_STREAM="garbage")[0] == 0


def test_the_embedded_model_passes_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code = program.execute(["selftest", "--json", "--quiet"], {"VLLM_CUDA_INFER": "0"})
    out, err = capsys.readouterr()
    assert (exit_code, err) == (0, "")
    result = json.loads(out)
    assert result["passed"] is True
    assert result["backend"] == "cpu"
    assert len(result["checks"]) > 10
