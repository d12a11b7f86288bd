"""Windows measured over one load: what each row counts, that all agree, and what is refused before it starts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kestrel_cuda import bench
from kestrel_cuda.bench import BenchReport, Variant, default_keeps, variants
from kestrel_cuda.config import EngineConfig, Evict, Policy, Quant
from kestrel_cuda.engine import Engine
from kestrel_cuda.errors import DeviceError, SettingError

TINY_RANDOM = Path(__file__).resolve().parents[1] / "data" / "tiny-random"
L = 12
LAYER_WEIGHTS = 64 * (128 + 64 + 64) + 128 * 64 + 64 * (192 + 192) + 192 * 64
LAYER_BYTES = {Quant.Q8_0: LAYER_WEIGHTS * 34 // 32, Quant.Q4_0: LAYER_WEIGHTS * 18 // 32}
HEAD_WEIGHTS = 656 * 64
HEAD_BYTES = {Quant.Q8_0: HEAD_WEIGHTS * 34 // 32, Quant.Q4_0: HEAD_WEIGHTS * 18 // 32}
FILL_BYTES = 256
"""At most: codes and scales of lm_head start and end at multiples of 256 bytes."""
ALL_POLICIES, BOTH_EVICTS = list(Policy), list(Evict)

Measure = Callable[..., BenchReport]


@pytest.fixture
def measure(backend_name: str) -> Measure:
    """A small bench of the embedded model on each backend."""

    def call(
        keeps: Sequence[int | None] | None,
        policies: Sequence[Policy] = (Policy.PAST_ONLY,),
        evicts: Sequence[Evict] = (Evict.POOL,),
        *,
        prompt_tokens: int = 5,
        new_tokens: int = 5,
        rounds: int = 2,
        keep_flag: str = "--keep",
        on_progress: Callable[[str, int, int], None] | None = None,
        **config: Any,
    ) -> BenchReport:
        return bench.measure(
            EngineConfig(TINY_RANDOM, backend=backend_name, **config),  # type: ignore[arg-type]
            keeps,
            policies,
            evicts,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            rounds=rounds,
            keep_flag=keep_flag,
            on_progress=on_progress,
        )

    return call


class TestRows:
    """What a row says of its window."""

    @pytest.mark.parametrize("prefetch", [0, 2])
    @pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0])
    def test_every_window_moves_what_its_rule_says(self, measure: Measure, quant: Quant, prefetch: int) -> None:
        keeps = (0, 10, 4, 1)
        report = measure(keeps, ALL_POLICIES, BOTH_EVICTS, rounds=1, quant=quant, prefetch=prefetch)
        windows = itertools.product((10, 4, 1), ALL_POLICIES, BOTH_EVICTS)
        assert [(row.keep, row.policy, row.evict) for row in report.rows] == [("off", "past-only", "pool"), *windows]
        assert {(row.quant, row.prefetch) for row in report.rows} == {(quant.value, prefetch)}
        off, *windowed = report.rows
        assert (off.weights_resident_end, off.h2d_bytes_per_token, off.h2d_gb_per_s) == (7 * L + 1, 0, 0)
        assert off.link_share is None
        for row in windowed:
            assert isinstance(row.keep, int)
            uploads = L if row.policy == "both-sides" else L - row.keep
            assert row.h2d_bytes_per_token == uploads * LAYER_BYTES[quant], row
            assert row.weights_resident_end == 7 * row.keep + 1, row
        (read_bytes,) = {row.bytes_read_per_token for row in report.rows}
        assert 0 <= read_bytes - (L * LAYER_BYTES[quant] + HEAD_BYTES[quant]) < FILL_BYTES
        assert report.all_equal
        assert len({(row.ids, row.ids_hash, row.logits_sha256) for row in report.rows}) == 1
        assert len(off.ids) == report.new_tokens

    def test_the_peak_is_the_windows_own(self, measure: Measure) -> None:
        report = measure((0, 4, 1), ALL_POLICIES)
        peaks = {(row.keep, row.policy): row.peak_device_bytes for row in report.rows}
        base = peaks["off", "past-only"] - L * LAYER_BYTES[Quant.Q8_0]
        layers = {window: (peak - base) / LAYER_BYTES[Quant.Q8_0] for window, peak in peaks.items()}
        assert layers == {
            ("off", "past-only"): 12,
            (4, "past-only"): 10,
            (4, "pinned"): 7,
            (4, "both-sides"): 6,
            (1, "past-only"): 4,
            (1, "pinned"): 4,
            (1, "both-sides"): 3,
        }

    def test_conditions_are_reported(self, measure: Measure, backend_name: str) -> None:
        report = measure((1,), prompt_tokens=3, new_tokens=7, rounds=3)
        assert (report.backend, report.prompt_tokens, report.new_tokens, report.rounds) == (backend_name, 3, 7, 3)
        assert report.num_timed == 3 * 4
        assert (report.link_gb_per_s is None) is (backend_name == "cpu")
        (row,) = report.rows
        assert row.ms_per_token_median > 0
        assert row.h2d_gb_per_s == pytest.approx(row.h2d_bytes_per_token / row.ms_per_token_median / 1e6)
        assert row.read_gb_per_s == pytest.approx(row.bytes_read_per_token / row.ms_per_token_median / 1e6)
        if report.device_read_gb_per_s is not None:
            assert row.read_share == pytest.approx(row.read_gb_per_s / report.device_read_gb_per_s)
        assert (row.read_share is None) is (backend_name == "cpu")
        if report.link_gb_per_s is not None:
            assert row.link_share == pytest.approx(row.h2d_gb_per_s / report.link_gb_per_s)

    def test_a_bound_leaves_the_read_share_out(self, measure: Measure) -> None:
        report = measure((1,), rounds=1, vram_bytes=8 << 30)
        assert report.device_read_gb_per_s is None
        assert [row.read_share for row in report.rows] == [None]
        assert report.rows[0].read_gb_per_s > 0

    def test_one_timed_token_has_no_deviation(self, measure: Measure) -> None:
        assert [row.ms_per_token_sd for row in measure((1,), new_tokens=4, rounds=1).rows] == [None]
        (row,) = measure((1,), new_tokens=4, rounds=2).rows
        assert row.ms_per_token_sd is not None
        assert row.ms_per_token_sd > 0

    def test_progress_ends_at_all_runs(self, measure: Measure) -> None:
        seen: list[tuple[str, int, int]] = []
        measure((0, 1), rounds=2, on_progress=lambda *stage: seen.append(stage))
        assert [stage for stage in seen if stage[0] == "bench"] == [("bench", done, 6) for done in range(1, 7)]
        assert ("weights", L + 1, L + 1) in seen


class TestWindows:
    """Which windows are measured, and in what order."""

    def test_sizes_of_a_sweep(self) -> None:
        assert default_keeps(28) == [0, 27, 26, 20, 12, 8, 4, 2, 1]
        assert default_keeps(36) == [0, 35, 34, 25, 15, 10, 5, 2, 1]
        assert default_keeps(12) == [0, 11, 10, 8, 5, 3, 2, 1]
        assert default_keeps(2) == [0, 1]
        assert default_keeps(1) == [0]

    def test_every_combination_once(self) -> None:
        policies, evicts = (Policy.PINNED, Policy.PAST_ONLY), (Evict.FREE, Evict.POOL)
        assert variants(4, [0, 9, 4, 2, 2], policies, evicts, 1) == [
            # Everything resident has no window, so one of it is enough.
            Variant(0, Policy.PINNED, Evict.FREE, 1),
            *(Variant(keep, policy, evict, 1) for keep in (4, 2) for policy in policies for evict in evicts),
        ]

    def test_a_sweep_takes_the_windows_that_fit(self, measure: Measure, backend_name: str) -> None:
        if backend_name == "cuda":
            pytest.skip("the driver's own memory is larger than this model")
        report = measure(None, (Policy.PAST_ONLY, Policy.PINNED), rounds=1, vram_bytes=600 << 10)
        assert [(row.keep, row.policy) for row in report.rows] == [
            (3, "pinned"),
            *itertools.product((2, 1), ("past-only", "pinned")),
        ]
        assert max(row.peak_device_bytes for row in report.rows) <= 600 << 10
        said = "not measured, they do not fit --vram 600.00 KiB: off, 11, 10, 8, 5, 3 (past-only)"
        assert report.notes.count(said) == 1
        assert not any("is used" in note for note in report.notes), "no window is the one that is used"

    def test_windows_over_a_budget_are_said_to_be(self, measure: Measure) -> None:
        report = measure(None, (Policy.PINNED,), rounds=1, prefetch=0, cache_budget=300 << 10)
        assert [row.keep for row in report.rows] == [3, 2, 1]
        assert any(
            note.endswith("they do not fit --cache-budget 300.00 KiB: off, 11, 10, 8, 5") for note in report.notes
        )

    def test_what_does_not_fit_is_said_in_the_words_of_a_bench(self, measure: Measure, backend_name: str) -> None:
        if backend_name == "cuda":
            pytest.skip("the driver's own memory is larger than this model")
        with pytest.raises(
            DeviceError, match=r"; so would --prompt-tokens 4 or --prefetch 1 or --prefill-chunk 3 or --q"
        ):
            measure((1,), vram_bytes=400 << 10)
        with pytest.raises(DeviceError, match=r"--vram 600\.00 KiB; --keeps \d fits"):
            measure((12,), vram_bytes=600 << 10, keep_flag="--keeps")

    def test_a_sweep_with_room_starts_at_everything(self, measure: Measure) -> None:
        report = measure(None, rounds=1, new_tokens=4)
        assert [row.keep or 0 for row in report.rows] == ["off", 11, 10, 8, 5, 3, 2, 1]

    def test_no_keep_is_what_fits(self, measure: Measure) -> None:
        (row,) = measure((None,), (Policy.PINNED,), rounds=1).rows
        assert (row.keep, row.policy) == ("off", "pinned")

    def test_more_than_all_layers_is_all_layers(self, measure: Measure) -> None:
        report = measure((0, 99), rounds=1)
        assert [row.keep for row in report.rows] == ["off", L]
        assert report.warnings.count("--keep 99 is more than the model's 12 layers: 12 are kept") == 1
        report = measure((14, 13), rounds=1, keep_flag="--keeps")
        assert report.warnings == tuple(
            f"--keeps {keep} is more than the model's 12 layers: 12 are kept" for keep in (14, 13)
        )

    def test_more_ahead_than_any_window_uploads_is_said_once(self, measure: Measure) -> None:
        said = "--prefetch 99 is more than the 10 layers that are uploaded again: no more are fetched ahead"
        assert measure((4, 2), (Policy.PINNED,), rounds=1, prefetch=99).warnings == (said,)
        assert measure((4, 2), (Policy.PINNED,), rounds=1, prefetch=10).warnings == ()
        assert measure((0,), rounds=1, prefetch=99).warnings == ()

    def test_rounds_are_interleaved_and_hash_nothing(self, measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
        laid: list[int] = []
        ran: list[tuple[int, object]] = []
        lay, generate = Engine.set_window, Engine.generate

        def note_window(engine: Engine, keep: int, *rule: Any) -> None:
            laid.append(keep)
            lay(engine, keep, *rule)

        def note_run(engine: Engine, *arguments: Any, **wishes: Any) -> Any:
            ran.append((laid[-1], wishes["logits"]))
            return generate(engine, *arguments, **wishes)

        monkeypatch.setattr(Engine, "set_window", note_window)
        monkeypatch.setattr(Engine, "generate", note_run)
        measure((4, 1), rounds=2)
        assert ran == [(4, "hash"), (1, "hash"), *[(4, "none"), (1, "none")] * 2]


class TestEquality:
    """A difference anywhere is a difference."""

    def test_one_bit_of_one_uploaded_layer(self, measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
        lay, calls = Engine.set_window, itertools.count(1)

        def damage(engine: Engine, *rule: Any) -> None:
            lay(engine, *rule)
            # Both are laid once to see that they fit; the fourth time is the checked run of the second.
            if next(calls) == 4:
                engine.flip_host_bit(3)

        monkeypatch.setattr(Engine, "set_window", damage)
        report = measure((0, 1))
        assert not report.all_equal
        assert report.rows[0].logits_sha256 != report.rows[1].logits_sha256

    def test_one_round_of_the_only_window(self, measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
        generate, calls = Engine.generate, itertools.count(1)

        def stray(engine: Engine, prompt_ids: Sequence[int], *arguments: Any, **wishes: Any) -> Any:
            prompt = [7, 8, 9] if next(calls) == 3 else prompt_ids
            return generate(engine, prompt, *arguments, **wishes)

        undisturbed = measure((1,))
        monkeypatch.setattr(Engine, "generate", stray)
        report = measure((1,))
        assert undisturbed.all_equal
        assert not report.all_equal
        assert report.rows[0].ids != undisturbed.rows[0].ids
        assert report.rows[0].ids_hash != undisturbed.rows[0].ids_hash


class TestRefusals:
    """What cannot be measured is said before anything runs."""

    @pytest.fixture(autouse=True)
    def _nothing_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(*_: Any, **__: Any) -> None:
            raise AssertionError("measured something")

        monkeypatch.setattr(Engine, "generate", run)

    @pytest.mark.parametrize(
        ("keeps", "named"), [((1, 5), "keeping 5 of 12"), ((1, 0), "keeping all of 12"), ((5,), "keeping 5 of 12")]
    )
    def test_a_window_that_does_not_fit(self, keeps: tuple[int, ...], named: str) -> None:
        config = EngineConfig(TINY_RANDOM, backend="cpu", vram_bytes=600 << 10)
        with pytest.raises(DeviceError, match=f"{named} layers resident needs .*; --keep 2 fits"):
            bench.measure(config, keeps, ALL_POLICIES, BOTH_EVICTS, prompt_tokens=5, new_tokens=5, rounds=1)

    def test_a_policy_that_does_not_fit(self) -> None:
        config = EngineConfig(TINY_RANDOM, backend="cpu", vram_bytes=600 << 10)
        with pytest.raises(DeviceError, match=r"keeping 3 of 12 layers resident needs .*; --keep 2 fits"):
            bench.measure(
                config, (3,), (Policy.PINNED, Policy.PAST_ONLY), (Evict.POOL,), prompt_tokens=5, new_tokens=5, rounds=1
            )

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"new_tokens": 3}, "new_tokens is 3; it takes a whole number of at least 4"),
            ({"prompt_tokens": 0}, "prompt_tokens is 0; it takes a whole number of at least 1"),
            ({"rounds": 0}, "rounds is 0; it takes a whole number of at least 1"),
            ({"prompt_tokens": 4092}, "4092 prompt tokens and 5 new ones are over the 4096 positions this model has"),
        ],
    )
    def test_sizes_out_of_range(self, sizes: dict[str, int], message: str) -> None:
        config = EngineConfig(TINY_RANDOM, backend="cpu")
        with pytest.raises(SettingError, match=message):
            bench.measure(
                config, (1,), ALL_POLICIES, BOTH_EVICTS, **({"prompt_tokens": 5, "new_tokens": 5, "rounds": 1} | sizes)
            )
