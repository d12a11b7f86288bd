"""Checks a user can run: every step against float64, and a checkpoint's answer over windows. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from kestrel_cuda.attention_checks import attention_checks
from kestrel_cuda.backends import open_backend, open_best_backend
from kestrel_cuda.config import EngineConfig
from kestrel_cuda.engine import Engine
from kestrel_cuda.plan import Flags
from kestrel_cuda.report import RunReport
from kestrel_cuda.step_checks import Check as Check
from kestrel_cuda.step_checks import step_checks
from kestrel_cuda.stretch_checks import stretch_checks
from kestrel_cuda.vision_checks import vision_checks

OnOpen = Callable[[str, str, str | None], None]

PROMPT_TOKENS = 24
NEW_TOKENS = 16

_FLAGS = Flags(None, ("--prefill-chunk",))


@dataclass(frozen=True)
class SelftestReport:
    """Every check in order, and what they ran on."""

    checks: tuple[Check, ...]
    backend: str
    device: str

    @property
    def passed(self) -> bool:
        return all(check.passed or check.skipped for check in self.checks)


def run_selftest(config: EngineConfig, on_open: OnOpen, on_check: Callable[[Check], None]) -> SelftestReport:
    """Run every check on the configured backend and checkpoint; `on_check` is told of each as it ends.

    `on_open` is told first of the backend and its device, and why it is the CPU where nobody asked for that.

    Raises UserError when the checkpoint or the device cannot be used at all.
    """
    engine = Engine.open(config)
    if config.backend == "auto":
        backend, reason = open_best_backend(config.device)
    else:
        backend, reason = open_backend(config.backend, config.device), None
    on_open(backend.name, backend.device_name, reason)
    checks = []
    try:
        every = chain(step_checks(backend), attention_checks(backend), stretch_checks(backend), vision_checks(backend))
        for check in every:
            on_check(check)
            checks.append(check)
    finally:
        backend.close()
    for check in _checkpoint_checks(engine, config):
        on_check(check)
        checks.append(check)
    return SelftestReport(tuple(checks), backend.name, backend.device_name)


def _checkpoint_checks(engine: Engine, config: EngineConfig) -> Iterator[Check]:
    """The same answer, bit for bit, whatever the window; and a different one when a weight is damaged."""
    try:
        num_layers = engine.checkpoint.config.text.num_layers
        baseline = _run(engine, replace(config, keep=0, lazy=False))
        yield Check(
            "everything resident",
            baseline.residency.layers_resident_end == num_layers,
            f"ids {' '.join(map(str, baseline.ids[:6]))} ..., logits {str(baseline.logits_sha256)[:12]}",
        )
        lazy = _run(engine, replace(config, keep=0, lazy=True))
        yield _same("everything resident, uploaded on first use", baseline, lazy, 0)
        for keep in sorted({num_layers - 1, num_layers // 2, 1} - {0}, reverse=True):
            yield _same(f"--keep {keep}", baseline, _run(engine, replace(config, keep=keep)), num_layers - keep)
        damaged = _run(engine, replace(config, keep=1), damage_layer=num_layers // 2)
        yield Check(
            "a damaged weight is noticed",
            damaged.logits_sha256 != baseline.logits_sha256,
            "one bit of a layer's host copy was flipped and the logits "
            + ("differ" if damaged.logits_sha256 != baseline.logits_sha256 else "did not change"),
        )
    finally:
        engine.close()


def _run(engine: Engine, config: EngineConfig, damage_layer: int | None = None) -> RunReport:
    engine.config = config
    text = engine.checkpoint.config.text
    rng = np.random.default_rng(1)
    banned = {engine.checkpoint.config.image_token_id, engine.checkpoint.config.video_token_id}
    usable = [
        i for i in rng.integers(0, min(engine.tokenizer.size, text.vocab_size), 4 * PROMPT_TOKENS) if i not in banned
    ]
    prompt_ids = [int(i) for i in usable[:PROMPT_TOKENS]]
    engine.load(PROMPT_TOKENS + NEW_TOKENS, collects_logits=True, flags=_FLAGS)
    if damage_layer is not None:
        engine.flip_host_bit(damage_layer)
    generation = engine.generate(prompt_ids, NEW_TOKENS, ignore_eos=True, logits="hash")
    for _ in generation:
        pass
    return generation.report()


def _same(name: str, baseline: RunReport, other: RunReport, uploads_per_token: int) -> Check:
    same = other.ids == baseline.ids and other.logits_sha256 == baseline.logits_sha256
    uploads = other.residency.uploads_per_token
    return Check(
        name,
        same and uploads == uploads_per_token,
        f"logits {'equal to the bit' if same else 'DIFFER'}, {uploads:g} layers uploaded a token "
        f"({uploads_per_token} expected), {other.residency.weights_resident_end} weights resident at the end",
    )
