"""The wheel: exactly two packages, with configs, kernels and the embedded model inside, and a command that starts."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> ZipFile:
    (path,) = built.glob("*.whl")
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
    assert {"kestrel_cuda/configs/default.toml", "kestrel_cuda/data/tiny-random/model.safetensors"} <= wanted
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
    command = [sys.executable, "-m", "kestrel_cuda", "--help"]
    environment = os.environ | {"PYTHONPATH": str(site), "NO_COLOR": "1"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "run" in result.stdout
    assert "selftest" in result.stdout


def test_sdist_builds_the_same_wheel(built: Path, wheel: ZipFile, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")]
    subprocess.run(command, cwd=source, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    (again,) = (tmp_path / "again").glob("*.whl")
    assert sorted(ZipFile(again).namelist()) == sorted(wheel.namelist())
