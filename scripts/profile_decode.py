"""Where a token's time goes: the token in a launch a stretch, in one launch, and each kind of step alone.

Each is captured in one graph and replayed. A step alone is not its share of a token (neighbours overlap), but the sum
over the whole token tells how much overlap there is. Prints one JSON object a context length.

    PYTHONPATH=. python scripts/profile_decode.py CHECKPOINT [--quant q8_0] [--depths 64,512,8192]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from kestrel_cuda.backends.cuda import CudaBackend
from kestrel_cuda.config import EngineConfig, Quant
from kestrel_cuda.engine import Engine
from scripts import arguments as kinds

STEPS = ("embed", "norm_linear", "rope_attend", "linear", "norm_gate_up", "norm", "choose")
REPEATS = 30


def time_us(backend: CudaBackend, submit: Callable[[], None]) -> float:
    """Median microseconds of a captured submission."""
    submit()
    replay = backend.capture(submit)
    times = []
    for _ in range(REPEATS):
        start = backend.mark()
        replay()
        times.append(backend.elapsed_ms(start, backend.mark()) * 1e3)
    return median(times)


def only(backend: CudaBackend, kept: tuple[str, ...]) -> dict[str, object]:
    """Replace every step but the kept ones by nothing; returns what to restore."""
    saved = {name: getattr(backend, name) for name in STEPS}
    for name in STEPS:
        if name not in kept:
            setattr(backend, name, lambda *_, **__: None)
    return saved


def profile(engine: Engine, backend: CudaBackend, depth: int) -> dict[str, object]:
    """Microseconds of a whole token and of each kind of step with `depth` slots filled."""
    model = engine._model
    assert model is not None
    generation = engine.generate([1], 1)
    start = np.full(1, depth - 1, np.int32)
    model.wants_whole_token = True

    def submit() -> None:
        generation.submit_token(depth)

    def submit_in_place() -> None:
        submit()
        backend.advance(generation.state, -1)

    backend.write(generation.state.position, start)
    in_one_launch_us = time_us(backend, submit_in_place)
    served = model.has_whole_token
    model.wants_whole_token = False
    model.forget_captures()
    result: dict[str, object] = {"depth": depth, "token_us": time_us(backend, submit_in_place)}
    result["token_in_one_launch_us"] = in_one_launch_us if served else None
    for step in STEPS:
        saved = only(backend, (step,))
        result[f"{step}_us"] = time_us(backend, submit)
        for name, method in saved.items():
            setattr(backend, name, method)
        backend.write(generation.state.position, start)
    return result


def main() -> int:
    parser = kinds.Parser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--quant", type=kinds.quant, default=Quant.Q8_0)
    parser.add_argument(
        "--depths", type=kinds.lengths, default="64,512,8192", help="cache slots filled, comma-separated"
    )
    arguments = parser.parse_args()
    return kinds.finish(print_profiles, arguments)


def print_profiles(arguments: argparse.Namespace) -> None:
    """A line a depth. Raises KestrelError where nothing can be measured."""
    depths = arguments.depths
    engine = Engine.open(EngineConfig(model=arguments.checkpoint, backend="cuda", quant=arguments.quant))
    load = engine.load(max(depths) + 256, num_prompt=1)
    backend = engine.backend
    assert isinstance(backend, CudaBackend)
    for depth in depths:
        print(json.dumps({"device": load.device, "quant": arguments.quant, **profile(engine, backend, depth)}))
    engine.close()


if __name__ == "__main__":
    sys.exit(main())
