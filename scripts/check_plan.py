"""Compare the plan with the driver: peak device memory of a run against what was planned, for several settings.

Each setting runs in a process of its own, so that the driver's figure before it is that of an idle card. Prints one
JSON object a line; exit code 1 when a peak is outside max(3 %, 64 MiB) of its plan or over --vram, 2 where nothing can
be measured. Needs a GPU that nothing else uses.

    PYTHONPATH=. python scripts/check_plan.py CHECKPOINT [CHECKPOINT ...] [--vram none,3GiB,1600MiB]
    PYTHONPATH=. python scripts/check_plan.py CHECKPOINT --picture 256x256   # patches; the prompt is its tokens
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from kestrel_cuda.backends import open_backend
from kestrel_cuda.config import EngineConfig, Quant, VisionConfig
from kestrel_cuda.engine import Engine
from kestrel_cuda.errors import DeviceError, InputError, SettingError, UserError
from kestrel_cuda.model.prompt_positions import Visual
from kestrel_cuda.paths import shown_path
from kestrel_cuda.sizes import parse_size
from scripts import arguments as kinds

TOLERANCE_SHARE, TOLERANCE_BYTES = 0.03, 64 << 20
NO_BUDGET = "none"


def settings(budgets: list[str], picture: list[int] | None, picture_tokens: int) -> list[dict[str, Any]]:
    # A picture's tokens, and room for what is written.
    lengths = (512, 8192) if picture is None else (picture_tokens + 64,)
    return [
        {"quant": quant, "ctx": ctx, "vram": None if vram == NO_BUDGET else vram, "picture": picture}
        for quant, ctx, vram in product(("q8_0", "q4_0"), lengths, budgets)
    ]


def patches(text: str) -> list[int]:
    sides = re.fullmatch("([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", text)
    if not sides:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxCOLUMNS of patches, like 256x256")
    return [int(side) for side in sides.groups()]


def budgets(text: str) -> list[str]:
    listed = text.split(",")
    for budget in listed:
        if budget != NO_BUDGET:
            kinds.size(budget)
    return listed


def picture_tokens(checkpoint: Path, vision: VisionConfig | None, picture: list[int] | None) -> int:
    """How many tokens a picture of so many patches is. Raises InputError for one that the tower does not take."""
    if picture is None:
        return 0
    if vision is None:
        raise InputError(f"{shown_path(checkpoint)} has no vision tower for --picture; give a checkpoint with one")
    rows, columns = picture
    if rows % vision.merge_size or columns % vision.merge_size:
        raise InputError(
            f"--picture {rows}x{columns}: sides have to be multiples of the merge size, {vision.merge_size}"
        )
    return vision.num_tokens((1, rows, columns))


def find_gpu() -> None:
    """Raise DeviceError where there is no GPU, or none whose memory the driver tells of."""
    open_backend("cuda")
    from cupy.cuda import runtime

    from kestrel_cuda.backends.driver_memory import used_bytes

    if used_bytes(runtime.deviceGetPCIBusId(0)) is None:
        raise DeviceError("the driver cannot be asked for a GPU's memory (NVML); look at nvidia-smi")


def measure(checkpoint: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """Load and run one setting in this process while another thread watches the driver's figure."""
    from cupy.cuda import runtime

    from kestrel_cuda.backends.driver_memory import used_bytes
    from kestrel_cuda.backends.vision import PixelCodes

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
    except (DeviceError, SettingError) as error:
        return {"refused": str(error)}
    finally:
        done.set()
        watcher.join()
    measured = peak - before
    close = abs(measured - planned) <= max(TOLERANCE_SHARE * planned, TOLERANCE_BYTES)
    within = vram is None or measured <= vram
    return {"keep": keep, "planned": planned, "measured": measured, "close": close, "within_vram": within}


def main() -> int:
    parser = kinds.Parser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--vram", type=budgets, default=f"{NO_BUDGET},3GiB,1600MiB", help="budgets, comma-separated")
    parser.add_argument("--picture", type=patches, metavar="ROWSxCOLUMNS", help="encode a picture of so many patches")
    parser.add_argument("--setting", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    asked = []
    try:
        if arguments.setting:
            print(json.dumps(measure(arguments.checkpoints[0], arguments.setting)))
            return 0
        for checkpoint in arguments.checkpoints:
            vision = Engine.open(EngineConfig(model=checkpoint)).checkpoint.config.vision
            num_tokens = picture_tokens(checkpoint, vision, arguments.picture)
            asked += [(checkpoint, setting) for setting in settings(arguments.vram, arguments.picture, num_tokens)]
        # In a process of its own too: what this one held would count as use of the card.
        with ProcessPoolExecutor(1, get_context("spawn")) as one:
            one.submit(find_gpu).result()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    failed = 0
    for checkpoint, setting in asked:
        command = [sys.executable, __file__, str(checkpoint), "--setting", json.dumps(setting)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        result = json.loads(ran.stdout) if ran.returncode == 0 else {"error": ran.stderr.strip().splitlines()[-1:]}
        failed += "error" in result or not (result.get("close", True) and result.get("within_vram", True))
        print(json.dumps({"checkpoint": checkpoint.name, **setting, **result}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
