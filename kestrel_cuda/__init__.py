"""Runs Qwen3-VL checkpoints on an NVIDIA GPU: what a user of the library may import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kestrel_cuda.config import EngineConfig
from kestrel_cuda.errors import KestrelError

if TYPE_CHECKING:
    from kestrel_cuda.engine import Engine

__version__ = "0.1.0"

__all__ = ["Engine", "EngineConfig", "KestrelError", "__version__"]


def __getattr__(name: str) -> object:
    # Engine brings NumPy and the model with it; `import kestrel_cuda` alone stays cheap.
    if name == "Engine":
        from kestrel_cuda.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
