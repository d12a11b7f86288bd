"""Engines of either backend, loaded for a test or shared by a module, and a model for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kestrel_cuda.engine
from kestrel_cuda.engine import Engine
from scripts.make_tiny_model import make_tiny_checkpoint
from tests.engines import Engines

Load = Callable[..., Engine]


@pytest.fixture(scope="session", autouse=True)
def _kernels(pytestconfig: pytest.Config) -> Iterator[None]:
    """An engine opens its own backend; `--cubins` has to reach it."""
    folder = pytestconfig.getoption("--cubins")
    with pytest.MonkeyPatch.context() as patch:
        if folder is not None:
            patch.setattr(
                kestrel_cuda.engine, "open_backend", partial(kestrel_cuda.engine.open_backend, cubin_dir=folder)
            )
        yield


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def backend_name(request: pytest.FixtureRequest) -> str:
    """Each backend in turn."""
    return str(request.param)


@pytest.fixture
def load(backend_name: str) -> Iterator[Load]:
    """`load(model, quant=..., keep=..., ctx=...)`: a loaded engine, closed after the test."""
    engines = Engines()
    yield lambda model, **config: engines.load(model, backend_name, **config)[0]
    engines.close()


@pytest.fixture
def load_on_gpu() -> Iterator[Load]:
    """As `load`, for a test that is itself marked `cuda`."""
    engines = Engines()
    yield lambda model, **config: engines.load(model, "cuda", **config)[0]
    engines.close()


@pytest.fixture(scope="module")
def shared(backend_name: str) -> Iterator[Load]:
    """As `load`, but the same arguments give the same engine throughout a module."""
    engines, held = Engines(), dict[Any, Engine]()

    def get(model: Path, **config: Any) -> Engine:
        key = (model, *sorted(config.items()))
        if key not in held:
            held[key] = engines.load(model, backend_name, **config)[0]
        return held[key]

    yield get
    engines.close()


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that divide by 256, so that g256 is g256."""
    sizes = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 256}
    return make_tiny_checkpoint(tmp_path_factory.mktemp("wide"), num_layers=5, with_vision=False, **sizes)
