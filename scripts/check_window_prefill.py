"""What a prompt costs through a window, against the larger of its sums alone and one pass of uploads over the link.

For prompts of several lengths and budgets of device memory the program chooses window and passes by itself. The sums
alone are those of everything resident without a budget, whose passes are the longest. Prints one JSON object a line;
exit code 1 when a prompt through a window that could be cut as the program wished costs more than --most times the
bound. Needs a GPU that nothing else uses and that holds the whole model.

    PYTHONPATH=. python scripts/check_window_prefill.py CHECKPOINT [--vram 1500MiB,2GiB] [--prompts 512,2048,8192]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from kestrel_cuda.config import EngineConfig, Quant
from kestrel_cuda.engine import Engine
from kestrel_cuda.errors import DeviceError
from kestrel_cuda.report import LoadReport, ResidencyReport
from scripts import arguments as kinds

ROUNDS, NEW_TOKENS = 5, 4


def prefill(config: EngineConfig, num_prompt: int) -> tuple[LoadReport, ResidencyReport, list[float], float]:
    """What a load says, a run's residency, the milliseconds of warm prompts, and of plain copies over the link GB/s."""
    engine = Engine.open(config)
    load = engine.load(num_prompt + NEW_TOKENS, num_prompt)
    prompt = [100 + i % 1000 for i in range(num_prompt)]
    assert engine.backend is not None
    times_ms = []
    for _ in range(ROUNDS + 1):
        generation = engine.generate(prompt, NEW_TOKENS, ignore_eos=True)
        for _ in generation:
            pass
        report = generation.report()
        times_ms.append(report.timing.prefill_ms)
    rate = engine.backend.link_rate_gb_per_s()
    engine.close()
    assert rate is not None
    return load, report.residency, times_ms[1:], rate


def budgets(text: str) -> dict[str, int]:
    return {size: kinds.size(size) for size in text.split(",")}


def main() -> int:
    parser = kinds.Parser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--vram", type=budgets, default="1500MiB,2GiB", help="budgets, comma-separated")
    parser.add_argument("--prompts", type=kinds.lengths, default="512,2048,8192", help="in tokens, comma-separated")
    parser.add_argument("--quant", type=kinds.quant, default=Quant.Q8_0)
    parser.add_argument(
        "--most", type=kinds.number(1, 100, "a number from 1 to 100"), default=1.1, help="times the bound"
    )
    arguments = parser.parse_args()
    return kinds.finish(check, arguments)


def check(arguments: argparse.Namespace) -> int:
    """The lines; 1 where a prompt cost too much. Raises KestrelError where nothing can be measured."""
    config = EngineConfig(model=arguments.checkpoint, backend="cuda", quant=arguments.quant)
    failed = False
    for num_prompt in arguments.prompts:
        resident, _, resident_ms, _ = prefill(replace(config, keep=0), num_prompt)
        for vram, vram_bytes in arguments.vram.items():
            line: dict[str, Any] = {
                "prompt": num_prompt,
                "vram": vram,
                "resident_ms": round(median(resident_ms), 2),
                "resident_rows_a_pass": resident.prefill_chunk,
            }
            try:
                load, residency, times_ms, rate = prefill(replace(config, vram_bytes=vram_bytes), num_prompt)
            except DeviceError as error:
                print(json.dumps(line | {"refused": str(error)}), flush=True)
                continue
            pass_ms = residency.h2d_bytes_per_token / rate / 1e6
            bound_ms = max(median(resident_ms), pass_ms)
            ratio = median(times_ms) / bound_ms
            # Everything resident is no window, and a window of one layer has whatever passes the budget allows.
            as_wished = load.keep > 1
            failed |= as_wished and ratio > arguments.most
            line |= {
                "keep": load.keep,
                "rows_a_pass": load.prefill_chunk,
                "pass_ms": round(pass_ms, 2),
                "link_gb_per_s": round(rate, 2),
                "prefill_ms": round(median(times_ms), 2),
                "spread_ms": round(max(times_ms) - min(times_ms), 2),
                "times_the_bound": round(ratio, 3),
                "as_wished": as_wished,
            }
            print(json.dumps(line), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
