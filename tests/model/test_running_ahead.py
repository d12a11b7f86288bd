"""The next token submitted before the last one's id is read: nothing that a user sees depends on it.

The backends are of the CPU: one whose steps are done when they return, others that count them as unfinished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kestrel_cuda.generate
from kestrel_cuda.backends.cpu import CpuBackend
from kestrel_cuda.backends.operands import CHOSEN_SLOTS
from kestrel_cuda.checkpoint.reader import Checkpoint
from kestrel_cuda.engine import Engine
from kestrel_cuda.errors import CheckpointError
from kestrel_cuda.generate import Generation, LogitsWish
from kestrel_cuda.report import RunReport
from scripts.make_tiny_model import make_chain, make_t0
from tests.ahead_backend import AheadBackend, Event
from tests.engines import Engines, random_ids

END = 616
PROMPT = random_ids(6)
LONG = 3 * CHOSEN_SLOTS + 1


class Load:
    """Engines on backends of this test's choice, loaded; closed at the end."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []

    def __call__(self, model: Path, backend: CpuBackend, **config: Any) -> Engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kestrel_cuda.engine.open_backend", lambda name, device: backend)
            engine, _ = Engines().load(model, "cpu", **config)
        self.engines.append(engine)
        return engine


@pytest.fixture
def load() -> Iterator[Load]:
    load = Load()
    yield load
    for engine in load.engines:
        engine.close()


@pytest.fixture(scope="module")
def t0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_t0(tmp_path_factory.mktemp("t0") / "m")


@pytest.fixture(params=["slow", "fast", "captures"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AheadBackend:
    monkeypatch.setattr(kestrel_cuda.generate, "CAPTURE_SLOTS", 5)
    return AheadBackend(is_fast=request.param == "fast", captures=request.param == "captures")


def tokens_of(events: Sequence[Event], what: str = "submit read") -> list[Event]:
    return [event for event in events if event.what in what.split()]


def seen(run: RunReport) -> dict[str, Any]:
    """What a run says, but for its times; of those how many."""
    fields = vars(run) | {"timing": len(run.timing.decode_ms), "has_median": run.timing.tpot_ms_median is not None}
    del fields["read_gb_per_s"]
    return fields


def answer(engine: Engine, prompt: Sequence[int], num_tokens: int, **options: Any) -> tuple[RunReport, list[Any]]:
    """The report, and the tokens as they came."""
    generation = engine.generate(prompt, num_tokens, **options)
    tokens = [(token.step, token.token_id, token.text) for token in generation]
    return generation.report(), tokens


def assert_as_fresh(engine: Engine, model: Path, load: Load, prompt: Sequence[int] = PROMPT) -> None:
    """Another prompt, and this one, are answered as by an engine that has done nothing else."""
    for one in (random_ids(9, seed=3), prompt):
        report, tokens = answer(engine, one, LONG)
        expected, expected_tokens = answer(load(model, CpuBackend()), one, LONG)
        assert seen(report) == seen(expected)
        assert tokens == expected_tokens


class TestTheOrder:
    def test_a_token_is_submitted_before_the_last_id_is_read(
        self, load: Load, t0: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = AheadBackend()
        engine = load(t0, backend)
        backend.events.clear()
        checks: list[int] = []
        monkeypatch.setattr(Checkpoint, "check_unchanged", lambda self: checks.append(len(tokens_of(backend.events))))
        answer(engine, PROMPT, LONG, ignore_eos=True)
        first, last = len(PROMPT), len(PROMPT) + LONG - 1
        expected = [Event("submit", first)]
        for slot in range(first, last):
            expected += [Event("submit", slot + 1), Event("read", slot)]
        assert tokens_of(backend.events) == [*expected, Event("read", last)]
        before_submissions = [at for at, event in enumerate(expected) if event.what == "submit"][1:]
        assert checks == [*before_submissions, len(expected) + 1], "and the source is looked at before each"

    def test_a_token_is_handed_on_before_another_is_submitted(self, load: Load, t0: Path) -> None:
        backend = AheadBackend()
        tokens = iter(load(t0, backend).generate(PROMPT, LONG, ignore_eos=True))
        for token in tokens:
            slot = len(PROMPT) + token.step
            assert backend.events[-1] == Event("read", slot)
            submitted = tokens_of(backend.events, "submit")[-1].slot
            assert submitted == min(slot + 1, len(PROMPT) + LONG - 1)

    def test_an_id_does_not_wait_for_a_capture(self, load: Load, t0: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kestrel_cuda.generate, "CAPTURE_SLOTS", 5)
        backend = AheadBackend(captures=True)
        answer(load(t0, backend), PROMPT, 8, ignore_eos=True)
        found = [f"{event.what} {event.slot}" for event in tokens_of(backend.events, "submit read capture")]
        assert found == [
            *("submit 6", "read 6"),
            *("submit 7", "capture 7", "submit 8", "read 7", "submit 9", "read 8", "submit 10", "read 9", "read 10"),
            *("submit 11", "capture 11", "submit 12", "read 11", "submit 13", "read 12", "read 13"),
        ]

    def test_nothing_is_ahead_of_steps_that_are_done_when_they_return(
        self, load: Load, t0: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert not CpuBackend.runs_ahead
        monkeypatch.setattr(AheadBackend, "runs_ahead", CpuBackend.runs_ahead)
        backend = AheadBackend()
        self.assert_in_turn(backend, load(t0, backend).generate(PROMPT, 6, ignore_eos=True))

    @pytest.mark.parametrize("logits", ["hash", "keep"])
    def test_nothing_is_ahead_when_logits_are_read(self, load: Load, t0: Path, logits: LogitsWish) -> None:
        backend = AheadBackend()
        self.assert_in_turn(backend, load(t0, backend).generate(PROMPT, 6, ignore_eos=True, logits=logits))

    def test_nothing_is_ahead_in_a_window(self, load: Load, t0: Path) -> None:
        backend = AheadBackend()
        self.assert_in_turn(backend, load(t0, backend, keep=2).generate(PROMPT, 6, ignore_eos=True))

    def test_nothing_is_ahead_when_layers_are_observed(self, load: Load, t0: Path) -> None:
        backend = AheadBackend()
        engine = load(t0, backend)
        self.assert_in_turn(backend, engine.generate(PROMPT, 6, ignore_eos=True, observe=lambda name, rows_mk: None))

    @staticmethod
    def assert_in_turn(backend: AheadBackend, generation: Generation) -> None:
        backend.events.clear()
        assert len(list(generation)) == 6
        slots = range(len(PROMPT), len(PROMPT) + 6)
        expected = [Event(what, slot) for slot in slots for what in ("submit", "read")]
        assert tokens_of(backend.events) == expected


class TestTheSameAnswer:
    @pytest.mark.parametrize("lazy", [False, True])
    @pytest.mark.parametrize("num_tokens", [1, 2, 3, CHOSEN_SLOTS + 1, LONG])
    def test_ended_by_length(self, load: Load, t0: Path, ahead: AheadBackend, num_tokens: int, lazy: bool) -> None:
        engine = load(t0, ahead, lazy=lazy)
        expected = answer(load(t0, CpuBackend(), lazy=lazy), PROMPT, num_tokens, ignore_eos=True)
        report, tokens = answer(engine, PROMPT, num_tokens, ignore_eos=True)
        assert (seen(report), tokens) == (seen(expected[0]), expected[1])
        assert (report.stop_reason, len(report.timing.decode_ms)) == ("length", num_tokens - 1)
        assert tokens_of(ahead.events, "submit")[-1].slot == len(PROMPT) + num_tokens - 1, "no further"
        assert engine._store is not None
        num_warm_passes = num_tokens - lazy
        assert report.residency.cache_hits == num_warm_passes * engine._store.num_weights, "the prompt's pass too"
        assert_as_fresh(engine, t0, load)

    @pytest.mark.parametrize("max_tokens_more", [0, 1, 9])
    @pytest.mark.parametrize("num_before", [0, 1, 4, 9])
    def test_ended_by_an_end_id(
        self, load: Load, tmp_path: Path, ahead: AheadBackend, num_before: int, max_tokens_more: int
    ) -> None:
        chain = [*range(100, 100 + num_before), END, 300, 301]
        model = make_chain(tmp_path / "m", chain)
        engine, plain = load(model, ahead), load(model, CpuBackend())
        prompt = engine.encode_chat([{"role": "user", "content": "hi"}])
        num_tokens = num_before + 1 + max_tokens_more
        expected = answer(plain, prompt, num_tokens)
        report, tokens = answer(engine, prompt, num_tokens)
        assert (seen(report), tokens) == (seen(expected[0]), expected[1])
        assert (list(report.ids), report.stop_reason) == (chain[: num_before + 1], "eos")
        assert len(report.timing.decode_ms) == num_before
        if max_tokens_more and not ahead.can_capture:
            assert tokens_of(ahead.events, "submit")[-1].slot == len(prompt) + num_before + 1, "one was dropped"
        assert_as_fresh(engine, model, load, prompt)

    def test_a_full_context(self, load: Load, t0: Path, ahead: AheadBackend) -> None:
        expected = answer(load(t0, CpuBackend(), ctx=16), PROMPT, 99, ignore_eos=True)
        report, tokens = answer(load(t0, ahead, ctx=16), PROMPT, 99, ignore_eos=True)
        assert (seen(report), tokens) == (seen(expected[0]), expected[1])
        assert len(report.ids) == 10


class TestBrokenOff:
    """A token is in flight each time."""

    NUM_TAKEN = 3

    def assert_report(self, report: RunReport, stop_reason: str, load: Load, model: Path) -> None:
        """All but the reason is as if the answer had ended by its length."""
        expected, _ = answer(load(model, CpuBackend()), PROMPT, self.NUM_TAKEN, ignore_eos=True)
        assert seen(report) == seen(expected) | {"stop_reason": stop_reason}

    @pytest.fixture
    def broken_off(self, load: Load, t0: Path) -> tuple[AheadBackend, Engine, Generation, Iterator[Any]]:
        backend = AheadBackend()
        engine = load(t0, backend)
        generation = engine.generate(PROMPT, LONG, ignore_eos=True)
        tokens = iter(generation)
        for _ in range(self.NUM_TAKEN):
            next(tokens)
        last_read = len(PROMPT) + self.NUM_TAKEN - 1
        assert tokens_of(backend.events)[-2:] == [Event("submit", last_read + 1), Event("read", last_read)]
        backend.events.clear()
        return backend, engine, generation, tokens

    def test_interrupted_between_tokens(
        self, broken_off: tuple[AheadBackend, Engine, Generation, Iterator[Any]], load: Load, t0: Path
    ) -> None:
        backend, engine, generation, tokens = broken_off
        generation.interrupt()
        assert backend.events == [Event("wait for everything", len(PROMPT) + self.NUM_TAKEN)]
        self.assert_report(generation.report(), "interrupt", load, t0)
        assert list(tokens) == []
        assert_as_fresh(engine, t0, load)

    def test_interrupted_while_an_id_is_waited_for(
        self, broken_off: tuple[AheadBackend, Engine, Generation, Iterator[Any]], load: Load, t0: Path
    ) -> None:
        backend, engine, generation, tokens = broken_off
        backend.interrupted_slot = len(PROMPT) + self.NUM_TAKEN
        with pytest.raises(KeyboardInterrupt):
            next(tokens)
        backend.interrupted_slot = None
        generation.interrupt()
        self.assert_report(generation.report(), "interrupt", load, t0)
        assert_as_fresh(engine, t0, load)

    def test_abandoned(
        self, broken_off: tuple[AheadBackend, Engine, Generation, Iterator[Any]], load: Load, t0: Path
    ) -> None:
        backend, engine, generation, tokens = broken_off
        generation.abandon()
        self.assert_report(generation.report(), "error", load, t0)
        assert list(tokens) == []
        assert backend.events == [], "nothing is submitted, and nothing waited for"
        assert_as_fresh(engine, t0, load)

    def test_iterated_no_further(
        self, broken_off: tuple[AheadBackend, Engine, Generation, Iterator[Any]], load: Load, t0: Path
    ) -> None:
        _, engine, _, tokens = broken_off
        tokens.close()  # type: ignore[attr-defined]
        assert_as_fresh(engine, t0, load)

    def test_a_checkpoint_that_changes(
        self, broken_off: tuple[AheadBackend, Engine, Generation, Iterator[Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was submitted before it changed is still handed on, as without a token ahead; nothing is submitted."""
        backend, _, generation, tokens = broken_off

        def changed(self: Checkpoint) -> None:
            raise CheckpointError("changed while it was in use")

        monkeypatch.setattr(Checkpoint, "check_unchanged", changed)
        assert next(tokens).step == self.NUM_TAKEN
        with pytest.raises(CheckpointError, match="changed while it was in use"):
            next(tokens)
        assert not tokens_of(backend.events, "submit")
        generation.abandon()
        assert len(generation.report().ids) == self.NUM_TAKEN + 1

    @pytest.mark.parametrize("step", [0, 1, CHOSEN_SLOTS, CHOSEN_SLOTS + 2])
    def test_logits_that_are_no_numbers(self, load: Load, t0: Path, ahead: AheadBackend, step: int) -> None:
        engine = load(t0, ahead)
        generation = engine.generate(PROMPT, LONG, ignore_eos=True)
        tokens, taken = iter(generation), list[int]()
        ahead.nan_slot = len(PROMPT) + step
        with pytest.raises(CheckpointError, match=f"no logit is a number at step {step}:"):
            taken.extend(token.token_id for token in tokens)
        assert len(generation._ids) == step
        in_flight = tokens_of(ahead.events, "submit")[-1].slot - (len(PROMPT) + step)
        # The slots 6, 10 and 12 are the last of a capture, or of the prompt.
        assert in_flight == (0 if ahead.can_capture and step in (0, CHOSEN_SLOTS) else 1)
        ahead.nan_slot = None
        generation.abandon()
        expected, _ = answer(load(t0, CpuBackend()), PROMPT, LONG, ignore_eos=True)
        report = generation.report()
        assert (report.stop_reason, report.ids, len(report.timing.decode_ms)) == (
            "error",
            expected.ids[:step],
            max(0, step - 1),
        )
        assert_as_fresh(engine, t0, load)
