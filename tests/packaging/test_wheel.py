"""The wheel: exactly two packages, with configs, kernels and the embedded model inside, and a command that starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The current interpreter with `command`, as a terminal-less caller would start it."""
    full = [sys.executable, *command]
    return subprocess.run(full, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """Built from the checkout, without a network: hatchling is already here."""
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT, check=True)
    (path,) = folder.glob("*.whl")
    return ZipFile(path)


def in_checkout(*patterns: str) -> set[str]:
    """Files of the checkout, by the path a wheel gives them."""
    paths = (path.relative_to(ROOT) for pattern in patterns for path in ROOT.glob(pattern) if path.is_file())
    return {path.as_posix().replace("configs/", "kestrel_cuda/configs/").removeprefix("cli/") for path in paths}


def test_top_level_is_the_two_packages(wheel: ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"kestrel_cuda", "kestrel_cli"}
    assert len(top) == 3


def test_every_source_and_data_file_is_inside(wheel: ZipFile) -> None:
    wanted = in_checkout(
        "kestrel_cuda/**/*.py",
        "kestrel_cuda/**/*.cu",
        "kestrel_cuda/**/*.cuh",
        "kestrel_cuda/**/py.typed",
        "kestrel_cuda/data/**/*",
        "cli/kestrel_cli/**/*.py",
        "cli/kestrel_cli/py.typed",
        "configs/*.toml",
    )
    assert {"kestrel_cuda/configs/default.toml", "kestrel_cuda/data/kestrel-tiny/model.safetensors"} <= wanted
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == wanted


def test_console_script_and_license(wheel: ZipFile) -> None:
    def read(name: str) -> str:
        (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
        return wheel.read(path).decode()

    assert "kestrel-cuda = kestrel_cli.app:main" in read("entry_points.txt").splitlines()
    assert "Apache License" in read("licenses/LICENSE")


def test_runs_unpacked(wheel: ZipFile, tmp_path: Path) -> None:
    site = tmp_path / "site"
    wheel.extractall(site)
    environment = os.environ | {"PYTHONPATH": str(site), "NO_COLOR": "1"}
    result = run("-m", "kestrel_cuda", "--help", cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert "run" in result.stdout
    assert "selftest" in result.stdout


def test_the_sdist_builds_the_same_wheel(wheel: ZipFile, tmp_path: Path) -> None:
    # `build` makes the sdist first, then the wheel from what it unpacks.
    run("-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT), check=True)
    assert len(list(tmp_path.glob("*.tar.gz"))) == 1
    (again,) = tmp_path.glob("*.whl")
    assert sorted(ZipFile(again).namelist()) == sorted(wheel.namelist())
