"""Compiles the kernels on a core of its own, beside the tests that run before those that look at the result; the module
of the CUDA backend."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from kestrel_cuda.kernels import library

Compiled = dict[tuple[str, int], "Future[tuple[bytes, str]]"]

EXECUTOR = pytest.StashKey[ThreadPoolExecutor]()
COMPILED = pytest.StashKey[Compiled]()


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = any("compiled" in getattr(item, "fixturenames", ()) for item in session.items)
    # Of several processes each collects all tests, and one will run these.
    if wanted and not session.config.option.collectonly and "PYTEST_XDIST_WORKER" not in os.environ:
        _start(session.config)


def _start(config: pytest.Config) -> None:
    executor = config.stash[EXECUTOR] = ThreadPoolExecutor(1)
    pairs = [(name, arch) for name in library.kernel_files() for arch in library.architectures(name)]
    config.stash[COMPILED] = {pair: executor.submit(library.compile_cubin, *pair) for pair in pairs}


def pytest_sessionfinish(session: pytest.Session) -> None:
    executor = session.config.stash.get(EXECUTOR, None)
    if executor is not None:
        executor.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config) -> Compiled:
    """Machine code and log of every file for every card; skips where NVRTC cannot be loaded (macOS has none)."""
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="no NVRTC: CuPy is not installed", exc_type=ImportError)
    from cupy_backends.cuda.libs import nvrtc

    try:
        nvrtc.getVersion()
    except RuntimeError as error:
        pytest.skip(f"no NVRTC: {error}")
    if COMPILED not in pytestconfig.stash:
        _start(pytestconfig)
    return pytestconfig.stash[COMPILED]


@pytest.fixture(scope="module")
def cuda() -> Any:
    """The module of the CUDA backend; skips where CuPy is missing."""
    pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
    from kestrel_cuda.backends import cuda

    return cuda
