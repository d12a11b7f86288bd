"""What every test may ask for: the backends, the reference data, a tiny checkpoint; and the record of a GPU run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

# Before NumPy comes: the tests' matrices are so small that more threads only wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from scripts.make_tiny_model import make_tiny_checkpoint
from tests import gpu_report

if TYPE_CHECKING:
    from kestrel_cuda.backends.base import Backend

DATA = Path(__file__).resolve().parent / "data"
FIGURES = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cubins",
        metavar="DIR",
        type=Path,
        help="kernels built by scripts/build_cubins.py, for a machine whose NVRTC is missing or slow",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("cuda")]
    reason = gpu_report.why_no_gpu() if needs_gpu else None
    if reason is not None:
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, count in gpu_report.skips_by_reason(terminalreporter.stats):
        terminalreporter.write_line(f"{count} skipped: {reason}")
    whole_suite = config.option.markexpr == "cuda" and not config.option.keyword and config.args == ["tests"]
    if whole_suite and gpu_report.why_no_gpu() is None:
        path = gpu_report.write(
            terminalreporter.stats, config.stash[FIGURES], from_cubins=config.getoption("--cubins") is not None
        )
        terminalreporter.write_line(f"wrote {path}")


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own switches do not reach a test."""
    for name in os.environ:
        if name.startswith(("VLLM_", "KESTREL_CUDA_")):
            monkeypatch.delenv(name)


def _open(name: str, config: pytest.Config) -> Backend:
    from kestrel_cuda.backends import open_backend

    if name == "cuda":
        return open_backend("cuda", cubin_dir=config.getoption("--cubins"))
    return open_backend("cpu")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn: one test body holds both to the same bound."""
    return _open(request.param, request.config)


@pytest.fixture(scope="session")
def cpu_backend(pytestconfig: pytest.Config) -> Backend:
    """The reference, for a comparison."""
    return _open("cpu", pytestconfig)


@pytest.fixture(scope="session")
def cuda_backend(pytestconfig: pytest.Config) -> Backend:
    """The GPU, for a test that is itself marked `cuda`."""
    return _open("cuda", pytestconfig)


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> dict[str, float]:
    """Numbers for the GPU report: `figures["decode_ms_tiny_28l"] = 1.25`."""
    return pytestconfig.stash[FIGURES]


@pytest.fixture(scope="session")
def oracle() -> Path:
    """The reference checkpoints and goldens; read its README.md."""
    return DATA / "oracle"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of a few hundred kilobytes, without a vision tower."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny-model"), num_layers=4, with_vision=False)
