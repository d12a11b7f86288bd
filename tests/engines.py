"""Loads engines for tests and collects what a run says. Knows no expected value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.config import EngineConfig, Policy, Quant
from kestrel_cuda.engine import Engine
from kestrel_cuda.generate import Generation
from kestrel_cuda.report import LoadReport, ResidencyReport, RunReport

QUANTS = [Quant.Q8_0, Quant.Q4_0, Quant.G256, Quant.NONE]


@dataclass(frozen=True)
class Run:
    """One finished generation."""

    report: RunReport
    prompt_logits: NDArray[np.float32]
    step_logits: NDArray[np.float32]
    streamed: str

    @property
    def ids(self) -> list[int]:
        return list(self.report.ids)

    @property
    def residency(self) -> ResidencyReport:
        return self.report.residency

    @property
    def digest(self) -> str:
        assert self.report.logits_sha256 is not None
        return self.report.logits_sha256


class Engines:
    """Opens and loads engines, and closes all of them at the end."""

    def __init__(self) -> None:
        self._opened: list[Engine] = []

    def load(
        self, model: Path, backend: str, *, ctx: int = 64, num_prompt: int | None = None, **config: Any
    ) -> tuple[Engine, LoadReport]:
        # A bound spares each GPU engine the measurement of its read rate.
        # The counts that tests assert are those of the past-only rule.
        config = {"vram_bytes": 8 << 30, "policy": Policy.PAST_ONLY} | config
        engine = Engine.open(EngineConfig(model=model, backend=backend, **config))  # type: ignore[arg-type]
        self._opened.append(engine)
        return engine, engine.load(ctx, num_prompt)

    def close(self) -> None:
        for engine in self._opened:
            engine.close()
        self._opened.clear()


def generate(
    engine: Engine, prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = True, **options: Any
) -> Run:
    """Run to the end with every logit kept."""
    generation = engine.generate(prompt_ids, max_new_tokens, ignore_eos, "keep", **options)
    return finish(generation)


def finish(generation: Generation) -> Run:
    streamed = "".join(token.text for token in generation)
    assert generation.prompt_logits is not None
    assert generation.step_logits is not None
    return Run(generation.report(), generation.prompt_logits, generation.step_logits, streamed)


def random_ids(num_ids: int, seed: int = 0) -> list[int]:
    """Ids of ordinary tokens of the small tokenizer."""
    return [int(i) for i in np.random.default_rng(seed).integers(1, 600, num_ids)]


def assert_same_bits(run: Run, expected: Run) -> None:
    assert run.ids == expected.ids
    assert run.digest == expected.digest
    assert np.array_equal(run.step_logits, expected.step_logits)


def assert_bytes_moved(engine: Engine, run: Run) -> None:
    """A token uploads every layer that the window does not keep, once, and nothing else; `both-sides` uploads more."""
    assert engine.plan is not None
    num_layers, keep = engine.checkpoint.config.text.num_layers, engine.plan.keep
    uploads = num_layers - keep if 0 < keep < num_layers else 0
    if uploads and engine.config.policy is Policy.BOTH_SIDES:
        assert run.residency.uploads_per_token > uploads
        uploads = int(run.residency.uploads_per_token)
    assert run.residency.h2d_bytes_per_token == uploads * layer_bytes(engine)


def layer_bytes(engine: Engine) -> int:
    assert engine._weights is not None
    sizes = {layout.num_bytes for layout in engine._weights.layers}
    assert len(sizes) == 1
    return sizes.pop()


def head_bytes(engine: Engine) -> int:
    assert engine._weights is not None
    return engine._weights.lm_head.num_bytes
