"""The digest that says whether the GPU suite has seen the code as it stands."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import gpu_digest
from tests.gpu_report import skip_reason

GPU_CODE = (
    "kernels/gemv.cu",
    "kernels/library.py",
    "backends/cuda.py",
    "backends/cuda_copy_maps.py",
    "backends/token_cuts.py",
    "residency/pool.py",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in (*GPU_CODE, "backends/cpu.py"):
        path = tmp_path / "kestrel_cuda" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


@pytest.mark.parametrize("name", GPU_CODE)
def test_a_change_to_gpu_code_changes_it(checkout: Path, name: str) -> None:
    before = gpu_digest.gpu_digest(checkout)
    (checkout / "kestrel_cuda" / name).write_text("changed")
    assert gpu_digest.gpu_digest(checkout) != before


def test_a_new_kernel_file_changes_it(checkout: Path) -> None:
    before = gpu_digest.gpu_digest(checkout)
    (checkout / "kestrel_cuda" / "kernels" / "empty.cuh").touch()
    assert gpu_digest.gpu_digest(checkout) != before


def test_other_code_and_build_outputs_do_not(checkout: Path) -> None:
    before = gpu_digest.gpu_digest(checkout)
    (checkout / "kestrel_cuda" / "backends" / "cpu.py").write_text("changed")
    (checkout / "kestrel_cuda" / "kernels" / "gemv.cubin").write_text("built")
    assert gpu_digest.gpu_digest(checkout) == before


def test_check_says_when_the_report_is_missing_stale_or_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "gpu_report.json"
    monkeypatch.setattr(gpu_digest, "REPORT", report)
    monkeypatch.setattr("sys.argv", ["gpu_digest.py", "--check"])
    content = {"card": "a card", "date": "2026-11-29", "counts": {"passed": 3}, "digest": "old"}
    assert gpu_digest.main() == 1
    assert "NO GPU REPORT" in capsys.readouterr().out
    report.write_text(json.dumps(content))
    assert gpu_digest.main() == 1
    assert "STALE GPU REPORT" in capsys.readouterr().out
    report.write_text(json.dumps(content | {"digest": gpu_digest.gpu_digest()}))
    assert gpu_digest.main() == 0
    assert "current: a card, 2026-11-29" in capsys.readouterr().out


def test_a_skip_is_reported_with_its_reason() -> None:
    assert skip_reason(SimpleNamespace(longrepr=("tests/a.py", 3, "Skipped: no such card"))) == "no such card"
    assert skip_reason(SimpleNamespace(longrepr="in words")) == "in words"
