"""The script that looks at a window from disk says what it held, and fails where that is too much."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import check_host_residency
from tests.conftest import DATA

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads Linux's own counts")


def test_a_window_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["check", str(DATA / "tiny-random"), "--strip-cache", str(tmp_path), "--backend", "cpu"]
    empty, held = {"own": 0, "mapped": 0}, {"own": 5 << 20, "mapped": 0}
    # The first run saves the packed weights before it begins.
    for most, counts, exit_code in (("1GiB", [held, empty, held, held], 0), ("1MiB", [empty, held, held], 1)):
        monkeypatch.setattr(check_host_residency, "resident_bytes", iter(counts).__next__)
        monkeypatch.setattr(sys, "argv", [*given, "--most", most])
        assert check_host_residency.main() == exit_code
        result = json.loads(capsys.readouterr().out)
        assert result["held_bytes"] == 5 << 20
        assert result["equal"] is True
        assert result["uploaded_bytes_per_token"] == 11 * 65280
        assert result["plain_read_gb_per_s"] > 0


def test_a_wrong_answer_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([("one", {"own": 0.0, "mapped": 0.0, "ms_per_token": 1.0}, 9)] * 2)
    whole = ("other", {"own": 0.0, "mapped": 0.0, "ms_per_token": 1.0}, 0)
    monkeypatch.setattr(check_host_residency, "answer", lambda config: whole if config.keep == 0 else next(answers))
    (tmp_path / "a").mkdir()
    (tmp_path / "a/weights.safetensors").write_bytes(b"x" * 100)
    monkeypatch.setattr(sys, "argv", ["check", "any", "--strip-cache", str(tmp_path), "--backend", "cpu"])
    assert check_host_residency.main() == 1
    assert json.loads(capsys.readouterr().out)["equal"] is False


def test_what_a_window_pins_is_counted() -> None:
    """Buffers as the GPU backend makes them, touched."""
    pytest.importorskip("cupy", exc_type=ImportError)
    from kestrel_cuda.backends.cuda_memory import page_aligned

    before = check_host_residency.resident_bytes()["own"]
    buffer = page_aligned(32 << 20)
    buffer[:] = 1
    assert check_host_residency.resident_bytes()["own"] - before > 30 << 20
