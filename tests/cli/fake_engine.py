"""A stand-in for the engine: the same interface, an answer from a list. Run as a program it is the whole command line
on that stand-in, for tests that need a process of their own."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kestrel_cuda.config import EngineConfig
from kestrel_cuda.inputs.visual_source import VisualSource
from kestrel_cuda.report import LoadReport, PlanReport, ResidencyReport, RunReport, TimingReport, Token

END_ID = 99
VOCAB_SIZE = 128


@dataclass
class FakeEngine:
    """Answers every prompt with `pieces`, one token each, ids from 10; then the end token unless `endless`."""

    config: EngineConfig
    pieces: tuple[str, ...] = ("Hello", ", ", "wörld")
    tail: str = ""
    endless: bool = False
    pause_s: float = 0.0
    fail_at_load: BaseException | None = None
    fail_at_step: int | None = None
    failure: BaseException | None = None
    max_positions: int = 4096
    backend: str = "cpu"
    device_read_gb_per_s: float | None = 3.0
    notes: tuple[str, ...] = ("no GPU here",)
    plan_warnings: tuple[str, ...] = ()
    calls: dict[str, Any] = field(default_factory=dict)
    closed: bool = False

    @property
    def checkpoint(self) -> Any:
        return SimpleNamespace(config=SimpleNamespace(text=SimpleNamespace(max_positions=self.max_positions)))

    def open_visuals(self, sources: Sequence[VisualSource], limits: Any) -> tuple[()]:
        """Takes note of what it is given, and finds no picture in it."""
        self.calls["visuals"], self.calls["limits"] = tuple(sources), limits
        return ()

    def encode_chat(self, messages: list[dict[str, object]], visuals: Sequence[object] = ()) -> list[int]:
        self.calls["chat"] = messages
        return [1, 2, 3]

    def encode_raw(self, text: str, visuals: Sequence[object] = ()) -> list[int]:
        self.calls["raw"] = text
        return [4, 5]

    def check_ids(self, ids: list[int], visuals: Sequence[object] = ()) -> list[int]:
        self.calls["ids"] = ids
        return ids

    def load(
        self,
        ctx: int,
        num_prompt: int | None = None,
        on_progress: Callable[[str, int, int], None] | None = None,
        *,
        on_plan: Callable[[PlanReport], None],
        collects_logits: bool = False,
    ) -> LoadReport:
        self.calls["ctx"] = ctx
        self.calls["collects_logits"] = collects_logits
        if self.fail_at_load is not None:
            raise self.fail_at_load
        keep = self.config.keep or 0
        plan = PlanReport(
            backend=self.backend, device="test device", num_layers=4, keep=keep, ctx=ctx, kv="f16",
            kv_bytes_per_slot=1024, prefill_chunk=64, embeddings_on="device", planned_device_bytes=1 << 20,
            host_copy_bytes=3 << 20 if keep else 0, warnings=self.plan_warnings,
        )  # fmt: skip
        on_plan(plan)
        if on_progress is not None:
            on_progress("quantizing", 1, 2)
        warnings = (*self.plan_warnings, "a stray file", "scales rounded to zero: 3")
        return LoadReport(
            **vars(plan) | {"notes": self.notes, "warnings": warnings}, model=str(self.config.model), num_weights=29,
            quant={"layers": "q8_0"}, dtypes={"bf16": 30}, tied=True, eos_ids=(END_ID,), template_source="test",
            load_ms=12.5,
        )  # fmt: skip

    def generate(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        ignore_eos: bool = False,
        logits: str = "none",
        encoded: object = None,
    ) -> FakeGeneration:
        self.calls["generate"] = (list(prompt_ids), max_new_tokens, ignore_eos, logits)
        return FakeGeneration(self, tuple(prompt_ids), max_new_tokens, logits)

    def close(self) -> None:
        self.closed = True


class FakeGeneration:
    """Yields the engine's pieces; its report agrees with what was yielded."""

    def __init__(self, engine: FakeEngine, prompt_ids: tuple[int, ...], max_new_tokens: int, logits: str) -> None:
        self._engine, self._prompt_ids, self._max, self._logits = engine, prompt_ids, max_new_tokens, logits
        self._tokens: list[Token] = []
        self._stop_reason = "length"
        self.prompt_logits = np.zeros((len(prompt_ids), VOCAB_SIZE), np.float32)

    @property
    def step_logits(self) -> np.ndarray:
        return np.ones((len(self._tokens), VOCAB_SIZE), np.float32)

    def __iter__(self) -> Iterator[Token]:
        engine = self._engine
        num_pieces = len(engine.pieces)
        for step in range(self._max):
            if step == engine.fail_at_step and engine.failure is not None:
                raise engine.failure
            time.sleep(engine.pause_s)
            at_end = step == num_pieces and not engine.endless
            token_id = END_ID if at_end else 10 + step % num_pieces
            token = Token(step, token_id, "" if at_end else engine.pieces[step % num_pieces], 1.0 + step)
            self._tokens.append(token)
            yield token
            if at_end:
                self._stop_reason = "eos"
                return

    def interrupt(self) -> None:
        self._stop_reason = "interrupt"

    def abandon(self) -> None:
        self._stop_reason = "error"

    def report(self) -> RunReport:
        times = tuple(token.time_ms for token in self._tokens[1:])
        return RunReport(
            prompt_ids=self._prompt_ids,
            ids=tuple(token.token_id for token in self._tokens),
            text="".join(token.text for token in self._tokens) + self._engine.tail,
            stop_reason=self._stop_reason,  # type: ignore[arg-type]
            residency=ResidencyReport(
                weights_resident_end=29, layers_resident_end=4, prefetched_layers=0, peak_layers=4,
                peak_weight_bytes=1 << 19, uploads_per_token=0.0, layer_uploads=(1, 1, 1, 1), h2d_bytes_per_token=0,
                evictions=0, cache_hits=5, cache_misses=29, pool_hits=0, pool_misses=29, host_pinned_bytes=0,
                embed_host_bytes=0, peak_device_bytes=1 << 20,
            ),
            timing=TimingReport(12.5, 3.0, 4.0, times, float(np.median(times[1:])) if times[1:] else None),
            bytes_read_per_token=1 << 19,
            read_gb_per_s=1.5,
            device_read_gb_per_s=self._engine.device_read_gb_per_s,
            logits_sha256=None if self._logits == "none" else hashlib.sha256(b"logits").hexdigest(),
            warnings=("a late warning",),
        )  # fmt: skip


def main() -> None:
    """`fake_engine.py '{"endless": true}' run ...`: the command line over a FakeEngine with these fields."""
    from kestrel_cli import app
    from kestrel_cli import run as run_command

    fields = json.loads(sys.argv.pop(1))
    run_command.open_engine = lambda config: FakeEngine(config, **fields)  # type: ignore[assignment, return-value]
    app.main()


if __name__ == "__main__":
    main()
