"""Compare the plan with the driver: peak device memory of a run against what was planned, for several settings.

Each setting runs in a process of its own, so that the driver's figure before it is that of an idle card. Prints one
JSON object a line; exit code 1 when a peak is outside max(3 %, 64 MiB) of its plan or over --vram. Needs a GPU that
nothing else uses.

    PYTHONPATH=. python scripts/check_plan.py CHECKPOINT [CHECKPOINT ...] [--vram none,3GiB,1600MiB]
    PYTHONPATH=. python scripts/check_plan.py CHECKPOINT --picture 256x256   # patches; the prompt is its tokens
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import threading
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kestrel_cuda.sizes import parse_size

TOLERANCE_SHARE, TOLERANCE_BYTES = 0.03, 64 << 20
NO_BUDGET = "none"


def settings(budgets: list[str], picture: list[int] | None) -> list[dict[str, Any]]:
    # A picture's tokens, each of four patches, and room for what is written.
    lengths = (512, 8192) if picture is None else (picture[0] * picture[1] // 4 + 64,)
    return [
        {"quant": quant, "ctx": ctx, "vram": None if vram == NO_BUDGET else vram, "picture": picture}
        for quant, ctx, vram in product(("q8_0", "q4_0"), lengths, budgets)
    ]


def patches(text: str) -> list[int]:
    rows, columns = (int(side) for side in text.split("x"))
    return [rows, columns]


def measure(checkpoint: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """Load and run one setting in this process while another thread watches the driver's figure."""
    from cupy.cuda import runtime

    from kestrel_cuda.backends.driver_memory import used_bytes
    from kestrel_cuda.backends.vision import PixelCodes
    from kestrel_cuda.config import EngineConfig, Quant
    from kestrel_cuda.engine import Engine
    from kestrel_cuda.errors import DeviceError
    from kestrel_cuda.model.prompt_positions import Visual

    bus = runtime.deviceGetPCIBusId(0)
    before = used_bytes(bus)
    assert before is not None, "the driver cannot be asked"
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, used_bytes(bus) or 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    vram = parse_size(setting["vram"]) if setting["vram"] else None
    config = EngineConfig(model=checkpoint, backend="cuda", quant=Quant(setting["quant"]), vram_bytes=vram)
    try:
        engine = Engine.open(config)
        prompt = [100 + i % 1000 for i in range(setting["ctx"] - 32)]
        encoded = None
        if setting["picture"]:
            model = engine.checkpoint.config
            assert model.vision is not None
            assert model.image_token_id is not None
            grid = (1, *setting["picture"])
            num_inputs = model.vision.patch_inputs
            codes_mk = np.random.default_rng(0).integers(0, 256, (math.prod(grid), num_inputs), np.uint8)
            values_cv = np.tile(np.linspace(-1, 1, 256, dtype=np.float32), (3, 1))
            encoded = engine.encode_visuals([Visual("image", grid)], [PixelCodes(codes_mk, values_cv, num_inputs)])
            tokens = model.vision.num_tokens(grid)
            prompt[1 : 1 + tokens] = [model.image_token_id] * tokens
        load = engine.load(setting["ctx"], len(prompt))
        generation = engine.generate(prompt, 24, ignore_eos=True, encoded=encoded)
        for _ in generation:
            pass
        planned, keep = load.planned_device_bytes, load.keep
        engine.close()
    except DeviceError as error:
        return {"refused": str(error)}
    finally:
        done.set()
        watcher.join()
    measured = peak - before
    close = abs(measured - planned) <= max(TOLERANCE_SHARE * planned, TOLERANCE_BYTES)
    within = vram is None or measured <= vram
    return {"keep": keep, "planned": planned, "measured": measured, "close": close, "within_vram": within}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--vram", default=f"{NO_BUDGET},3GiB,1600MiB", help="budgets, comma-separated")
    parser.add_argument("--picture", type=patches, metavar="ROWSxCOLUMNS", help="encode a picture of so many patches")
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.setting:
        print(json.dumps(measure(arguments.checkpoints[0], json.loads(arguments.setting))))
        return 0
    failed = 0
    for checkpoint, setting in product(arguments.checkpoints, settings(arguments.vram.split(","), arguments.picture)):
        command = [sys.executable, __file__, str(checkpoint), "--setting", json.dumps(setting)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        result = json.loads(ran.stdout) if ran.returncode == 0 else {"error": ran.stderr.strip().splitlines()[-1:]}
        failed += "error" in result or not (result.get("close", True) and result.get("within_vram", True))
        print(json.dumps({"checkpoint": checkpoint.name, **setting, **result}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
