"""Which GPU code the last GPU report stands for: one digest over every source that runs on or feeds the device."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "tests" / "gpu_report.json"
SOURCES = ("kernels/**/*", "backends/cuda*.py", "backends/token_cuts.py", "residency/**/*")


def gpu_digest(root: Path = ROOT) -> str:
    """sha256 over the names and bytes of the sources, in sorted order."""
    package = root / "kestrel_cuda"
    paths = {
        path
        for pattern in SOURCES
        for path in package.glob(pattern)
        if path.is_file() and path.suffix in {".py", ".cu", ".cuh"}
    }
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        content = path.read_bytes()
        # The length keeps bytes from moving between files unseen.
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with tests/gpu_report.json; exit 1 when stale")
    if not parser.parse_args().check:
        print(gpu_digest())
        return 0
    if not REPORT.exists():
        print("!!! NO GPU REPORT: the GPU suite has never been recorded. Run `python -m pytest -m cuda` on a GPU. !!!")
        return 1
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    ran_on = f"{report['card']}, {report['date']}, {report['counts']}"
    if report["digest"] != gpu_digest():
        print(f"!!! STALE GPU REPORT: GPU code changed since the suite ran ({ran_on}). Run it again on a GPU. !!!")
        return 1
    print(f"GPU report is current: {ran_on}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
