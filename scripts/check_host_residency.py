"""Host memory and speed of a window whose layers come from disk, against what it may hold and what the disk gives.

Loads a checkpoint with a window of one layer from its strip cache (saved first where there is none), holds --host-keep
layers in host memory, and answers. Prints one JSON object: what the process holds in memory beyond what it held once
its device was open, the embedding table apart (its file is mapped), the rate at which layers came, and that of a plain
read of the same file. Exit code 1 when the answer is not that of everything resident, or more is held than --most.

    PYTHONPATH=. python scripts/check_host_residency.py CHECKPOINT --strip-cache DIR [--host-keep 2] [--most 1500MB]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from kestrel_cuda.backends import open_backend, open_best_backend
from kestrel_cuda.config import EngineConfig, Quant
from kestrel_cuda.engine import Engine
from scripts import arguments as kinds

NEW_TOKENS = 8
PROMPT = tuple(range(100, 116))
READ_BYTES = 8 << 20


def resident_bytes() -> dict[str, int]:
    """Pages of this process in memory, by Linux's count: its own, and those of mapped files.

    Buffers that are pinned are shared maps of no file, and its own.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    own, shared, files = (int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem", "RssFile"))
    return {"own": own + shared, "mapped": files}


def plain_read_gb_per_s(path: Path) -> float:
    """One pass over a file whose pages the system was told to forget."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started, num_bytes, buffer = time.perf_counter(), 0, bytearray(READ_BYTES)
        while found := file.readinto(buffer):
            num_bytes += found
        return num_bytes / (time.perf_counter() - started) / 1e9


def answer(config: EngineConfig) -> tuple[str | None, dict[str, float], int]:
    """The digest of every logit, what the run held and took, and what it uploaded a token."""
    engine = Engine.open(config)
    engine.load(len(PROMPT) + NEW_TOKENS, len(PROMPT))
    generation = engine.generate(PROMPT, NEW_TOKENS, ignore_eos=True, logits="hash")
    for _ in generation:
        pass
    held = {name: float(num_bytes) for name, num_bytes in resident_bytes().items()}
    report = generation.report()
    held["ms_per_token"] = median(report.timing.decode_ms[1:])
    engine.close()
    return report.logits_sha256, held, report.residency.h2d_bytes_per_token


def main() -> int:
    parser = kinds.Parser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--strip-cache", type=Path, required=True, metavar="DIR")
    parser.add_argument("--host-keep", type=kinds.whole(1), default=2, metavar="N")
    parser.add_argument("--quant", type=kinds.quant, default=Quant.Q8_0)
    parser.add_argument("--backend", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--most", type=kinds.size, default="1500MB", help="bytes held, the embedding table apart")
    arguments = parser.parse_args()
    return kinds.finish(check, arguments)


def check(arguments: argparse.Namespace) -> int:
    """The object; 1 where it does not hold. Raises KestrelError where nothing can be measured."""
    whole = EngineConfig(
        model=arguments.checkpoint, backend=arguments.backend, quant=arguments.quant, keep=0,
        strip_cache=arguments.strip_cache,
    )  # fmt: skip
    if not list(arguments.strip_cache.glob("*/weights.safetensors")):
        answer(whole)
    # Of a device that is open nothing more is to be counted.
    opened = open_best_backend()[0] if arguments.backend == "auto" else open_backend(arguments.backend)
    before = resident_bytes()
    digest, held, uploaded_bytes = answer(replace(whole, keep=1, host_keep=arguments.host_keep))
    opened.close()
    (file, *_) = sorted(arguments.strip_cache.glob("*/weights.safetensors"), key=lambda path: -path.stat().st_mtime)
    expected, _, _ = answer(whole)
    own_bytes = int(held["own"]) - before["own"]
    line = {
        "equal": digest == expected,
        "held_bytes": own_bytes,
        "mapped_bytes": int(held["mapped"]) - before["mapped"],
        "uploaded_bytes_per_token": uploaded_bytes,
        "ms_per_token": round(held["ms_per_token"], 2),
        "layers_gb_per_s": round(uploaded_bytes / held["ms_per_token"] / 1e6, 3),
        "plain_read_gb_per_s": round(plain_read_gb_per_s(file), 3),
    }
    print(json.dumps(line))
    return int(digest != expected or own_bytes > arguments.most)


if __name__ == "__main__":
    sys.exit(main())
