"""Records a run of the GPU suite in tests/gpu_report.json: which card, which outcome, over which sources.

CI has no GPU. This file is its evidence, and `scripts/gpu_digest.py --check` says when it is out of date.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from scripts.gpu_digest import REPORT, gpu_digest

DRIVER = Path("/proc/driver/nvidia/version")


@cache
def why_no_gpu() -> str | None:
    """None where CuPy sees a GPU; else the reason in one line."""
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        return f"no GPU: {error}"
    try:
        return None if runtime.getDeviceCount() else "no GPU: the driver lists none"
    except runtime.CUDARuntimeError as error:
        # Without a driver CUDA's words are about one that is too old.
        return f"no GPU: {error}" if DRIVER.exists() else "no GPU: no NVIDIA driver is installed here"


def write(stats: dict[str, list[Any]], figures: dict[str, float], *, from_cubins: bool) -> Path:
    """Writes the report of the session that `stats` (pytest's outcomes) describes."""
    from cupy.cuda import nvrtc, runtime

    counts = {
        "passed": len(stats.get("passed", [])),
        "failed": len(stats.get("failed", [])) + len(stats.get("error", [])),
        "skipped": len(stats.get("skipped", [])),
    }
    report = {
        "card": runtime.getDeviceProperties(0)["name"].decode(),
        "driver": _driver_version(),
        "driver_cuda": _version(runtime.driverGetVersion()),
        "cuda_runtime": _version(runtime.runtimeGetVersion()),
        "nvrtc": ".".join(str(part) for part in nvrtc.getVersion()),
        "kernels": "compiled before, --cubins" if from_cubins else "compiled by this NVRTC",
        "date": datetime.now(UTC).date().isoformat(),
        "counts": counts,
        "skips": {report.nodeid: skip_reason(report) for report in stats.get("skipped", [])},
        "figures": dict(sorted(figures.items())),
        "digest": gpu_digest(),
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return REPORT


def skips_by_reason(stats: dict[str, list[Any]]) -> list[tuple[str, int]]:
    """Why tests were skipped and how many, the most first."""
    return Counter(skip_reason(report) for report in stats.get("skipped", [])).most_common()


def skip_reason(report: Any) -> str:
    """Why a test, or a file at collection, was skipped; pytest has it as (file, line, words)."""
    where = report.longrepr
    return where[2].removeprefix("Skipped: ") if isinstance(where, tuple) else str(where)


def _driver_version() -> str:
    # The CUDA runtime tells the driver's CUDA version alone; Linux has the driver's own here.
    match = re.search(r"\b\d+\.[\d.]+\b", DRIVER.read_text(encoding="utf-8")) if DRIVER.exists() else None
    return match[0] if match else "unknown"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
