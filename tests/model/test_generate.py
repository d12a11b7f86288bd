"""Decoding: which id is chosen, when it stops, and what text comes out; cases by their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kestrel_cuda.config import Evict, Policy, Quant
from kestrel_cuda.engine import Engine
from kestrel_cuda.errors import CheckpointError, InputError, UserError
from kestrel_cuda.report import Token
from scripts.make_tiny_model import TEXT, Tensors, make_chain, make_t0
from tests.checkpoints import edit_json
from tests.engines import generate, layer_bytes, random_ids

Load = Callable[..., Engine]

CTX = 64
EMBED, HEAD = TEXT + "embed_tokens.weight", "lm_head.weight"
CHAT = [{"role": "user", "content": "hi"}]
FIRST_END, SECOND_END = 616, 614


@pytest.fixture(scope="module")
def t0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_t0(tmp_path_factory.mktemp("t0") / "m")


@pytest.fixture
def t0_engine(load: Load, t0: Path) -> Engine:
    return load(t0, lazy=True)


class TestStopping:
    @pytest.mark.parametrize("end", [FIRST_END, SECOND_END])
    def test_d35_any_of_several_end_ids(self, load: Load, tmp_path: Path, end: int) -> None:
        engine = load(make_chain(tmp_path / "m", [100, 200, end, 300]))
        assert {FIRST_END, SECOND_END} <= set(engine.end_ids)
        run = generate(engine, engine.encode_chat(CHAT), 10, ignore_eos=False)
        assert run.ids == [100, 200, end]
        assert run.report.stop_reason == "eos"
        assert run.report.text == run.streamed == engine.tokenizer.decode([100, 200])
        assert len(run.report.timing.decode_ms) == 2

    def test_d35_an_end_id_is_passed_over_on_request(self, load: Load, tmp_path: Path) -> None:
        engine = load(make_chain(tmp_path / "m", [100, 200, SECOND_END, 300]))
        run = generate(engine, engine.encode_chat(CHAT), 6, ignore_eos=True)
        assert run.ids == [100, 200, SECOND_END, 300, 100, 200]
        assert run.report.stop_reason == "length"
        assert run.report.text == engine.tokenizer.decode(run.ids)

    @pytest.mark.parametrize("ids", [[300, 300, 301], 301, [301]])
    def test_d35_lists_with_repeats_and_single_ids(self, load: Load, tmp_path: Path, ids: object) -> None:
        model = make_chain(tmp_path / "m", [100, 301, 200])
        edit_json(model / "generation_config.json", {"eos_token_id": ids})
        engine = load(model)
        assert len(set(engine.end_ids)) == len(engine.end_ids)
        assert set(engine.end_ids) == {301, FIRST_END} | ({300} if ids == [300, 300, 301] else set())
        assert generate(engine, engine.encode_chat(CHAT), 10, ignore_eos=False).ids == [100, 301]

    @pytest.mark.parametrize("num_tokens", [1, 2, 5])
    def test_length(self, load: Load, t0: Path, num_tokens: int) -> None:
        report = generate(load(t0), random_ids(6), num_tokens).report
        assert len(report.ids) == num_tokens
        assert report.stop_reason == "length"
        timing = report.timing
        assert len(timing.decode_ms) == num_tokens - 1
        assert (timing.tpot_ms_median is None) == (num_tokens == 1)
        assert 0 < timing.prefill_ms <= timing.ttft_ms
        assert timing.load_ms > 0

    def test_d33_a_prompt_longer_than_the_context(self, load: Load, t0: Path) -> None:
        engine = load(t0, ctx=64)
        for num_tokens in (64, 100):
            with pytest.raises(InputError, match=rf"{num_tokens} tokens.*--ctx is 64.*{num_tokens + 1} are needed"):
                engine.generate(random_ids(num_tokens), 1)

    @pytest.mark.parametrize(("num_prompt", "room"), [(63, 1), (60, 4)])
    def test_d33_an_answer_longer_than_the_context(self, load: Load, t0: Path, num_prompt: int, room: int) -> None:
        run = generate(load(t0, ctx=64), random_ids(num_prompt), 10)
        assert len(run.ids) == room
        assert run.report.stop_reason == "length"

    def test_d34_an_empty_prompt(self, load: Load, t0: Path) -> None:
        engine = load(t0)
        assert engine.encode_raw("") == []
        with pytest.raises(InputError, match="prompt is empty"):
            engine.generate([], 5)
        assert generate(engine, engine.encode_chat([{"role": "user", "content": ""}]), 2).ids

    def test_interrupted(self, load: Load, t0: Path) -> None:
        engine = load(t0)
        expected = generate(engine, random_ids(6), 9)
        generation = engine.generate(random_ids(6), 9, ignore_eos=True, logits="keep")
        tokens = iter(generation)
        taken = [next(tokens).token_id for _ in range(3)]
        with pytest.raises(UserError, match="before the run had stopped"):
            generation.report()
        generation.interrupt()
        report = generation.report()
        assert report.stop_reason == "interrupt"
        assert list(report.ids) == taken == expected.ids[:3]
        assert report.text == engine.tokenizer.decode(taken)
        assert list(tokens) == [], "nothing more is chosen"
        assert np.array_equal(generation.step_logits, expected.step_logits[:3])
        assert generate(engine, random_ids(6), 9).digest == expected.digest, "and the engine is as before"

    def test_abandoned(self, load: Load, t0: Path) -> None:
        generation = load(t0).generate(random_ids(6), 9, ignore_eos=True)
        tokens = iter(generation)
        taken = [next(tokens).token_id for _ in range(3)]
        generation.abandon()
        report = generation.report()
        assert (report.stop_reason, list(report.ids)) == ("error", taken)
        assert list(tokens) == []

    def test_answers_after_answers_that_were_broken_off(self, load: Load, t0: Path) -> None:
        """Without logits, so that a GPU has the next token under way each time; the launches change after 256 slots."""
        engine, prompt = load(t0, ctx=300), random_ids(250)
        expected = generate(engine, prompt, 16).ids
        for num_taken in (1, 2, 6, 8, 16):
            tokens = iter(engine.generate(prompt, 16, ignore_eos=True))
            assert [next(tokens).token_id for _ in range(num_taken)] == expected[:num_taken]
        shorter = generate(load(t0, ctx=300), random_ids(5), 16).ids
        assert [token.token_id for token in engine.generate(random_ids(5), 16, ignore_eos=True)] == shorter

    def test_what_comes_after_an_end_id_is_not_counted(self, load: Load, tmp_path: Path) -> None:
        engine = load(make_chain(tmp_path / "m", [100, 200, FIRST_END, 300]))
        prompt = engine.encode_chat(CHAT)
        reports = []
        for num_tokens in (10, 3, 10):
            generation = engine.generate(prompt, num_tokens)
            assert [token.token_id for token in generation] == [100, 200, FIRST_END]
            reports.append(generation.report())
        assert {(report.stop_reason, len(report.timing.decode_ms)) for report in reports} == {("eos", 2)}
        assert len({report.residency.cache_hits for report in reports}) == 1

    def test_interrupted_before_the_first_id(self, load: Load, t0: Path) -> None:
        generation = load(t0).generate(random_ids(6), 9)
        generation.interrupt()
        report = generation.report()
        assert (report.stop_reason, report.ids, report.text) == ("interrupt", (), "")
        assert report.residency.uploads_per_token == 0

    def test_an_interrupt_after_the_end_changes_nothing(self, load: Load, t0: Path) -> None:
        generation = load(t0).generate(random_ids(6), 2, ignore_eos=True)
        list(generation)
        generation.interrupt()
        assert generation.report().stop_reason == "length"

    def test_interrupted_at_the_first_id(self, load: Load, t0: Path) -> None:
        engine = load(t0)
        assert engine.backend is not None
        held = engine.backend.memory().allocated_bytes
        generation = engine.generate(random_ids(6), 9, logits="keep")
        next(iter(generation))
        generation.interrupt()
        assert generation.prompt_logits is not None
        assert len(generation.prompt_logits) == 6
        assert engine.backend.memory().allocated_bytes == held
        assert generation.step_logits is not None
        assert len(generation.step_logits) == len(generation.report().ids) == 1

    @pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.NONE])
    def test_logits_that_are_no_numbers(self, load: Load, t0: Path, quant: Quant) -> None:
        engine = load(t0, quant=quant)
        assert engine._model is not None
        assert engine.backend is not None
        weight_k = engine._model._fixed.final_k
        engine.backend.write(weight_k, np.full(weight_k.shape, np.nan, np.float32))
        with pytest.raises(CheckpointError, match="no logit is a number at step 0"):
            list(engine.generate(random_ids(6), 3))


class TestChoosing:
    @pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0, Quant.NONE])
    @pytest.mark.parametrize("seed", [0, 1])
    def test_d40_the_lowest_of_equal_logits(self, load: Load, tmp_path: Path, quant: Quant, seed: int) -> None:
        """64 steps, each between two ids with the same row of lm_head."""
        drawn = np.random.default_rng(seed).permutation(np.arange(300, 614))[:128].tolist()
        chain, twins = drawn[:64], drawn[64:]

        def duplicate(tensors: Tensors) -> None:
            for one, other in zip(chain, twins, strict=True):
                tensors[HEAD][other] = tensors[HEAD][one]
                tensors[EMBED][other] = tensors[EMBED][one]

        engine = load(make_chain(tmp_path / "m", chain, edit=duplicate), quant=quant, ctx=128)
        run = generate(engine, engine.encode_chat(CHAT), 64)
        assert run.ids == [min(pair) for pair in zip(chain, twins, strict=True)]
        steps = np.arange(64)
        assert np.array_equal(run.step_logits[steps, chain], run.step_logits[steps, twins])
        assert np.array_equal(run.step_logits[steps, chain], run.step_logits.max(-1))

    @pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.NONE])
    def test_ids_above_the_tokenizer_are_never_chosen(self, load: Load, tmp_path: Path, quant: Quant) -> None:
        sequence = [100, 200, 639, 150]

        def enlarge(tensors: Tensors) -> None:
            for padding in (640, 652):
                tensors[HEAD][padding] = 5 * np.abs(tensors[HEAD][sequence]).sum(0)

        engine = load(make_chain(tmp_path / "m", sequence, edit=enlarge), quant=quant)
        assert engine.tokenizer.size == 640
        run = generate(engine, engine.encode_chat(CHAT), 8)
        assert run.ids == sequence * 2
        assert set(run.step_logits.argmax(-1).tolist()) <= {640, 652}, "though their logits are the largest"

    @pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0])
    def test_d37_the_same_ids_for_every_keep(self, load: Load, t0: Path, quant: Quant) -> None:
        prompt = random_ids(40)
        expected = generate(load(t0, quant=quant, keep=0, ctx=80), prompt, 32)
        assert len(set(expected.ids)) > 8
        for keep in (1, 2, 3, 4, 99):
            engine = load(t0, quant=quant, keep=keep, ctx=80)
            run = generate(engine, prompt, 32)
            assert run.ids == expected.ids, keep
            assert run.digest == expected.digest, keep
            assert run.residency.uploads_per_token == max(0, 4 - keep)
            assert run.residency.h2d_bytes_per_token == max(0, 4 - keep) * layer_bytes(engine)

    def test_row_i_of_the_step_logits_chose_id_i(self, load: Load, t0: Path) -> None:
        run = generate(load(t0), random_ids(9), 12)
        assert run.prompt_logits.shape == (9, 653)
        assert run.step_logits.shape == (12, 653)
        assert run.step_logits[:, :640].argmax(-1).tolist() == run.ids
        assert np.array_equal(run.prompt_logits[-1], run.step_logits[0])

    def test_asking_for_logits_changes_no_id(self, load: Load, t0: Path) -> None:
        engine = load(t0)
        kept = generate(engine, random_ids(20), 6)
        plain, hashed = (engine.generate(random_ids(20), 6, True, wish) for wish in ("none", "hash"))
        for generation in (plain, hashed):
            assert [token.token_id for token in generation] == kept.ids
            assert generation.step_logits is None
            assert generation.prompt_logits is None
        assert plain.report().logits_sha256 is None
        assert hashed.report().logits_sha256 == kept.digest


class TestText:
    def test_d36_characters_are_never_split(self, load: Load, tmp_path: Path) -> None:
        text = "你👍é"
        engine = load(make_chain(tmp_path / "m", byte_ids(text)))
        generation = engine.generate(engine.encode_chat(CHAT), 9)
        pieces = [token.text for token in generation]
        assert pieces == ["", "", "你", "", "", "", "👍", "", "é"]
        report = generation.report()
        assert list(report.ids) == byte_ids(text)
        assert "".join(pieces) == report.text == engine.tokenizer.decode(report.ids) == text

    def test_d36_a_character_that_is_never_completed(self, load: Load, tmp_path: Path) -> None:
        engine = load(make_chain(tmp_path / "m", byte_ids("你👍é")))
        for num_tokens in range(1, 9):
            run = generate(engine, engine.encode_chat(CHAT), num_tokens)
            assert run.report.text == engine.tokenizer.decode(run.ids)
            assert run.report.text.startswith(run.streamed)
            assert "\ufffd" not in run.streamed


def byte_ids(text: str) -> list[int]:
    """The tokens of single bytes: printable ones stand for themselves, the others from U+0100 on."""
    from scripts.make_tiny_model import read_reference

    vocabulary = read_reference("tokenizer.json")["model"]["vocab"]
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return [vocabulary[chr(b) if b in plain else chr(0x100 + others.index(b))] for b in text.encode()]


class TestWhoseTurnItIs:
    """An engine has one cache: an answer that was begun goes on only while nothing else was."""

    @pytest.fixture
    def begun(self, t0_engine: Engine) -> tuple[Engine, Iterator[Token]]:
        tokens = iter(t0_engine.generate(random_ids(5), 8, ignore_eos=True))
        next(tokens)
        return t0_engine, tokens

    @pytest.mark.parametrize(
        "meanwhile",
        [
            lambda engine: next(iter(engine.generate(random_ids(7), 3))),
            lambda engine: engine.set_window(1, Policy.PINNED, 0, Evict.POOL),
            lambda engine: engine.load(40),
            lambda engine: engine.close(),
        ],
        ids=["another", "window", "load", "close"],
    )
    def test_an_answer_does_not_go_on_after(
        self, begun: tuple[Engine, Iterator[Token]], meanwhile: Callable[[Engine], object]
    ) -> None:
        engine, tokens = begun
        meanwhile(engine)
        with pytest.raises(UserError, match="cannot go on"):
            next(tokens)

    @pytest.mark.parametrize(
        "meanwhile",
        [
            lambda engine: engine.set_window(1, Policy.PINNED, 0, Evict.FREE),
            lambda engine: engine.load(40),
            lambda engine: engine.close(),
        ],
        ids=["window", "load", "close"],
    )
    def test_an_answer_does_not_begin_after(self, t0_engine: Engine, meanwhile: Callable[[Engine], object]) -> None:
        """It was asked for before, and would run on what is no more."""
        generation = t0_engine.generate(random_ids(5), 3)
        meanwhile(t0_engine)
        with pytest.raises(UserError, match="cannot begin"):
            next(iter(generation))

    def test_one_that_is_stopped_before_it_begins(self, t0_engine: Engine) -> None:
        generation = t0_engine.generate(random_ids(5), 3)
        generation.interrupt()
        assert list(generation) == []
        assert generation.report().ids == ()

    def test_an_answer_that_was_only_asked_for_changes_nothing(self, begun: tuple[Engine, Iterator[Token]]) -> None:
        engine, tokens = begun
        engine.generate(random_ids(7), 3)
        assert len(list(tokens)) == 7

    def test_it_is_iterated_once(self, t0_engine: Engine) -> None:
        generation = t0_engine.generate(random_ids(5), 3)
        list(generation)
        with pytest.raises(UserError, match="iterated once"):
            next(iter(generation))


@pytest.mark.parametrize(
    ("ids", "num_tokens", "said"),
    [
        ([3, -1], 2, "token id -1 is outside"),
        ([10**9], 2, "is outside"),
        ([3], 0, "max_new_tokens is 0"),
        ([], 2, "empty"),
    ],
)
def test_what_cannot_be_answered_is_refused(t0_engine: Engine, ids: list[int], num_tokens: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        t0_engine.generate(ids, num_tokens)
