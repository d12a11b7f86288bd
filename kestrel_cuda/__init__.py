"""Runs Qwen3-VL checkpoints on an NVIDIA GPU: what a user of the library may import."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kestrel_cuda.config import EngineConfig
    from kestrel_cuda.engine import Engine
    from kestrel_cuda.errors import KestrelError

__version__ = "0.1.0"

__all__ = ["Engine", "EngineConfig", "KestrelError", "__version__"]


def __getattr__(name: str) -> object:
    # `python -m kestrel_cuda` comes through here before it can see to signals: nothing is imported until it is asked
    # for, and Engine brings NumPy and the model with it.
    if name == "Engine":
        from kestrel_cuda.engine import Engine

        return Engine
    if name == "EngineConfig":
        from kestrel_cuda.config import EngineConfig

        return EngineConfig
    if name == "KestrelError":
        from kestrel_cuda.errors import KestrelError

        return KestrelError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
