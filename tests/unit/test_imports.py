"""What an import costs, and what it must not pull in: the rules that a static check cannot see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def loaded_by(statement: str) -> set[str]:
    """Top-level modules a fresh interpreter holds after `statement`."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")])}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_the_package_alone_is_cheap() -> None:
    assert not loaded_by("import kestrel_cuda") & {"numpy", "PIL", "cupy", "safetensors", "tokenizers", "typer", "rich"}


def test_the_command_line_starts_without_cupy() -> None:
    loaded = loaded_by("import kestrel_cli.program")
    assert "typer" in loaded
    assert "cupy" not in loaded


def test_the_engine_and_the_cpu_backend_load_no_cupy_and_no_terminal() -> None:
    loaded = loaded_by(
        "from kestrel_cuda import Engine\nfrom kestrel_cuda.backends import open_backend\nopen_backend('cpu')"
    )
    assert not loaded & {"cupy", "typer", "rich", "kestrel_cli"}


def test_the_root_offers_what_it_says() -> None:
    import kestrel_cuda

    for name in kestrel_cuda.__all__:
        assert getattr(kestrel_cuda, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'engines'"):
        _ = kestrel_cuda.engines
