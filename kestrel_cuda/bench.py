"""What a residency window costs: one loaded checkpoint, many windows, rounds interleaved. Prints nothing.

The checkpoint is loaded once, with its host copy; each measurement lays another window over it. A round visits every
variant before any is visited again, so a drift of the machine falls on all alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median, stdev

import numpy as np

from kestrel_cuda.config import EngineConfig, Evict, Policy
from kestrel_cuda.engine import Engine
from kestrel_cuda.report import RunReport

WARMUP_TOKENS = 2
"""Decode steps dropped at the start of each measurement: buffers are allocated and launches captured in them."""


@dataclass(frozen=True)
class Variant:
    """One window to measure; `keep` 0 is everything resident."""

    keep: int
    policy: Policy
    evict: Evict
    prefetch: int


@dataclass(frozen=True)
class BenchRow:
    """A variant's figures over all rounds. Rates are in 10^9 bytes a second; None where there is no link."""

    model: str
    quant: str
    keep: int | str
    policy: str
    evict: str
    prefetch: int
    weights_resident_end: int
    peak_device_bytes: int
    ms_per_token_median: float
    ms_per_token_sd: float
    h2d_bytes_per_token: int
    h2d_gb_per_s: float
    link_share: float | None
    ids: tuple[int, ...]
    ids_hash: str
    logits_sha256: str


@dataclass(frozen=True)
class BenchReport:
    """Every row, the card they were measured on and its ceilings; `all_equal` says that no row's logits differ."""

    card: str
    backend: str
    prompt_tokens: int
    new_tokens: int
    rounds: int
    link_gb_per_s: float | None
    device_read_gb_per_s: float | None
    rows: tuple[BenchRow, ...]

    @property
    def all_equal(self) -> bool:
        return len({(row.ids, row.logits_sha256) for row in self.rows}) <= 1


def variants(
    num_layers: int, keeps: Sequence[int], policies: Sequence[Policy], evicts: Sequence[Evict], prefetch: int
) -> list[Variant]:
    """Every combination, each window once; keeps above the model's layers are the model's layers."""
    wanted: dict[Variant, None] = {}
    for keep in keeps:
        if keep == 0:
            wanted[Variant(0, policies[0], evicts[0], prefetch)] = None
            continue
        for policy in policies:
            for evict in evicts:
                wanted[Variant(min(keep, num_layers), policy, evict, prefetch)] = None
    return list(wanted)


def default_keeps(num_layers: int) -> list[int]:
    """Everything resident, then windows from nearly all layers down to one."""
    shares = (num_layers - 1, num_layers - 2, 5 * num_layers // 7, 3 * num_layers // 7, 2 * num_layers // 7)
    return [0, *sorted({keep for keep in (*shares, num_layers // 7, 2, 1) if 0 < keep < num_layers}, reverse=True)]


def measure(
    config: EngineConfig,
    keeps: Sequence[int] | None,
    policies: Sequence[Policy],
    evicts: Sequence[Evict],
    *,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> BenchReport:
    """Load once, then measure every variant `rounds` times; without `keeps`, windows of the default sizes that fit.

    Raises UserError when the checkpoint or a window does not fit.
    """
    engine = Engine.open(replace(config, lazy=True, keep=min(keeps, key=lambda keep: keep or 1) if keeps else None))
    try:
        num_layers = engine.checkpoint.config.text.num_layers
        load = engine.load(prompt_tokens + new_tokens, num_prompt=prompt_tokens, on_progress=on_progress)
        backend = engine.backend
        assert backend is not None
        fitting = [keep for keep in default_keeps(num_layers) if load.keep == 0 or 0 < keep <= load.keep]
        chosen = variants(num_layers, keeps or fitting, policies, evicts, config.prefetch)
        link = backend.link_rate_gb_per_s()
        prompt_ids = _prompt(engine, prompt_tokens)
        runs: dict[Variant, list[RunReport]] = {variant: [] for variant in chosen}
        for number, variant in enumerate(_rounds(chosen, rounds)):
            engine.set_window(variant.keep, variant.policy, variant.prefetch, variant.evict)
            generation = engine.generate(prompt_ids, new_tokens, ignore_eos=True, logits="hash")
            for _ in generation:
                pass
            runs[variant].append(generation.report())
            if on_progress:
                on_progress("bench", number + 1, len(chosen) * rounds)
        rows = tuple(_row(config, variant, runs[variant], link) for variant in chosen)
        reads = runs[chosen[0]][0].device_read_gb_per_s
        return BenchReport(load.device, load.backend, prompt_tokens, new_tokens, rounds, link, reads, rows)
    finally:
        engine.close()


def _rounds(chosen: Sequence[Variant], rounds: int) -> Iterator[Variant]:
    for _ in range(rounds):
        yield from chosen


def _prompt(engine: Engine, num_tokens: int) -> list[int]:
    """Ids drawn once and for all, so that runs can be compared; no image or video token among them."""
    config = engine.checkpoint.config
    usable = min(engine.tokenizer.size, config.text.vocab_size)
    drawn = np.random.default_rng(1).integers(0, usable, 2 * num_tokens + 8)
    banned = {config.image_token_id, config.video_token_id}
    return [int(token_id) for token_id in drawn if token_id not in banned][:num_tokens]


def _row(config: EngineConfig, variant: Variant, runs: Sequence[RunReport], link: float | None) -> BenchRow:
    steps_ms = [ms for run in runs for ms in run.timing.decode_ms[WARMUP_TOKENS:]]
    token_ms = median(steps_ms)
    last = runs[-1]
    h2d_bytes = last.residency.h2d_bytes_per_token
    rate = h2d_bytes / token_ms / 1e6
    return BenchRow(
        model=str(config.model),
        quant=config.quant.value,
        keep=variant.keep or "off",
        policy=variant.policy.value,
        evict=variant.evict.value,
        prefetch=variant.prefetch,
        weights_resident_end=last.residency.weights_resident_end,
        peak_device_bytes=max(run.residency.peak_device_bytes for run in runs),
        ms_per_token_median=token_ms,
        ms_per_token_sd=stdev(steps_ms) if len(steps_ms) > 1 else 0.0,
        h2d_bytes_per_token=h2d_bytes,
        h2d_gb_per_s=rate,
        link_share=rate / link if link and h2d_bytes else None,
        ids=last.ids,
        ids_hash=hashlib.sha256(np.array(last.ids, np.int32).tobytes()).hexdigest(),
        logits_sha256=last.logits_sha256 or "",
    )
