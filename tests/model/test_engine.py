"""What an engine loads, and that it computes the right thing with every kind of checkpoint (cases by their number)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kestrel_cuda.model.weights
from kestrel_cuda.config import EngineConfig, Policy, Quant
from kestrel_cuda.engine import Engine
from kestrel_cuda.errors import CheckpointError, DeviceError, InputError, SettingError, UserError
from kestrel_cuda.generate import LogitsWish
from scripts.make_tiny_model import TEXT, Tensors, make_t0, make_tiny_checkpoint
from tests.checkpoints import edit_json, read_tensors
from tests.compare import assert_close, nmse
from tests.engines import QUANTS, Run, generate, layer_bytes, random_ids
from tests.reference import text_logits

Load = Callable[..., Engine]

N, CTX = 8, 64
PROMPT = random_ids(12)
EMBED, HEAD = TEXT + "embed_tokens.weight", "lm_head.weight"
K_PROJ, UP_PROJ = TEXT + "layers.1.self_attn.k_proj.weight", TEXT + "layers.1.mlp.up_proj.weight"
SMALL = {"num_layers": 2, "with_vision": False}


@pytest.fixture(scope="module")
def t0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_t0(tmp_path_factory.mktemp("t0") / "m")


def run(engine: Engine, num_tokens: int = N) -> Run:
    return generate(engine, PROMPT, num_tokens)


class TestCheckpoints:
    """Spellings of one model give one answer."""

    @pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.NONE])
    def test_d01_tied_without_a_tensor(self, load: Load, tmp_path: Path, quant: Quant) -> None:
        def store_embedding(tensors: Tensors) -> None:
            tensors[HEAD] = tensors[EMBED].copy()

        tied = load(make_t0(tmp_path / "tied", tied=True), quant=quant)
        stored = load(make_t0(tmp_path / "stored", edit=store_embedding), quant=quant)
        assert HEAD not in read_tensors(tied.config.model)
        assert (tied.checkpoint.tied, stored.checkpoint.tied) == (True, False)
        assert run(tied).digest == run(stored).digest

    @pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.NONE])
    def test_d02_a_stored_lm_head_wins(self, load: Load, tmp_path: Path, quant: Quant) -> None:
        def store_negative(tensors: Tensors) -> None:
            tensors[HEAD] = -tensors[EMBED]

        tied = load(make_t0(tmp_path / "tied", tied=True), quant=quant)
        model = make_t0(tmp_path / "negative", edit=store_negative)
        edit_json(model / "config.json", {}, drop=("text_config.tie_word_embeddings", "tie_word_embeddings"))
        negative = run(load(model, quant=quant))
        assert np.array_equal(negative.prompt_logits, -run(tied).prompt_logits)

    @pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0, Quant.NONE])
    def test_d06_the_same_values_in_every_dtype(self, load: Load, t0: Path, tmp_path: Path, quant: Quant) -> None:
        expected = run(load(t0, quant=quant))
        for dtype in ("float16", "float32"):
            other = run(load(make_t0(tmp_path / dtype, dtype=dtype), quant=quant))
            assert other.ids == expected.ids, dtype
            assert other.digest == expected.digest, dtype

    def test_d06_shards(self, load: Load, t0: Path, tmp_path: Path) -> None:
        assert run(load(make_t0(tmp_path / "m", num_shards=3))).digest == run(load(t0)).digest

    def test_d07_both_spellings_of_the_rotary_values(self, load: Load, t0: Path, tmp_path: Path) -> None:
        model = make_t0(tmp_path / "m")
        rope = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_theta": 5e6}
        old = ("text_config.rope_scaling", "text_config.rope_theta")
        edit_json(model / "config.json", {"text_config.rope_parameters": rope}, drop=old)
        assert run(load(model)).digest == run(load(t0)).digest

    def test_d10_heads_wider_than_the_hidden_size(self, load: Load, t0: Path) -> None:
        """q is [512, 256]; a prompt of five tokens, then one at a time."""
        engine = load(t0, quant=Quant.NONE)
        text = engine.checkpoint.config.text
        assert (text.q_size, text.hidden_size) == (512, 256)
        answer = generate(engine, PROMPT[:5], N)
        expected = text_logits(t0, PROMPT[:5] + answer.ids[:-1])
        assert_close(answer.prompt_logits, expected[:5], max_abs=3e-3)
        assert_close(answer.step_logits, expected[4:], max_abs=3e-3)


class TestShapes:
    """Sizes that fit no tile and no group."""

    @pytest.mark.parametrize(
        "sizes",
        [
            {"intermediate_size": 66},  # gate and up apart, a short last group
            {"intermediate_size": 544},
            {"hidden_size": 72, "intermediate_size": 100},
            {"num_heads": 3, "num_kv_heads": 1, "head_dim": 16},
            {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64},
            {"num_heads": 16, "num_kv_heads": 1, "head_dim": 16},
            {"vocab_padding": 13, "tied": False},
            {"num_layers": 1},
        ],
        ids=str,
    )
    def test_odd_sizes(self, load: Load, tmp_path: Path, sizes: dict[str, int]) -> None:
        model = make_tiny_checkpoint(tmp_path / "m", **{**SMALL, **sizes})
        answer = run(load(model, quant=Quant.NONE))
        expected = text_logits(model, PROMPT + answer.ids[:-1])
        assert_close(answer.prompt_logits, expected[: len(PROMPT)], max_abs=3e-3)
        assert_close(answer.step_logits, expected[len(PROMPT) - 1 :], max_abs=3e-3)
        eight = generate(load(model, quant=Quant.Q8_0), PROMPT + answer.ids[:-1], 1)
        assert nmse(eight.prompt_logits, expected) < 0.01

    @pytest.mark.parametrize("quant", QUANTS)
    def test_unfused_gate_and_up_equal_padded_ones(self, load: Load, tmp_path: Path, quant: Quant) -> None:
        """66 outputs do not divide by four; 30 channels of zeros more change no sum, and no group's scale."""

        def shrink(tensors: Tensors) -> None:
            for name, values in tensors.items():
                if name.endswith(("gate_proj.weight", "up_proj.weight")):
                    tensors[name] = values[:66].copy()
                elif name.endswith("down_proj.weight"):
                    tensors[name] = values[:, :66].copy()

        def clear(tensors: Tensors) -> None:
            for name, values in tensors.items():
                if name.endswith(("gate_proj.weight", "up_proj.weight")):
                    values[66:] = 0
                elif name.endswith("down_proj.weight"):
                    values[:, 66:] = 0

        padded = load(make_tiny_checkpoint(tmp_path / "p", **SMALL, intermediate_size=96, edit=clear), quant=quant)
        model = make_tiny_checkpoint(tmp_path / "u", **SMALL, intermediate_size=96, edit=shrink)
        edit_json(model / "config.json", {"text_config.intermediate_size": 66})
        unfused = load(model, quant=quant)
        assert unfused._weights is not None
        assert padded._weights is not None
        assert {"gate", "up", "qkv"} <= unfused._weights.quant_by_class.keys()
        assert "gate_up" in padded._weights.quant_by_class
        if quant is Quant.NONE:
            assert_close(run(unfused).prompt_logits, run(padded).prompt_logits, max_abs=1e-3)
        else:
            assert run(unfused).digest == run(padded).digest

    @pytest.mark.parametrize("quant", QUANTS)
    def test_every_member_apart_equals_fused(
        self, load: Load, t0: Path, backend_name: str, quant: Quant, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fused = run(load(t0, quant=quant))
        monkeypatch.setattr(kestrel_cuda.model.weights, "COLUMN_MULTIPLE", 1000)
        engine = load(t0, quant=quant)
        apart = run(engine)
        assert engine._weights is not None
        assert set(engine._weights.quant_by_class) == {"q", "k", "v", "o", "gate", "up", "down", "lm_head"}
        assert apart.residency.weights_resident_end == fused.residency.weights_resident_end == 29
        if quant is Quant.NONE and backend_name == "cpu":
            assert_close(apart.prompt_logits, fused.prompt_logits, max_abs=1e-3)
        else:
            assert apart.digest == fused.digest

    def test_heads_that_no_kernel_has(self, load: Load, backend_name: str, tmp_path: Path) -> None:
        """Six channels a head: key and value columns do not divide by four either."""
        model = make_tiny_checkpoint(tmp_path / "m", **SMALL, num_heads=3, num_kv_heads=1, head_dim=6)
        if backend_name == "cuda":
            with pytest.raises(DeviceError, match=r"head_dim.*--backend cpu"):
                load(model)
            return
        engine = load(model, quant=Quant.NONE)
        assert engine._weights is not None
        assert {"q", "k", "v"} <= engine._weights.quant_by_class.keys()
        assert_close(run(engine).prompt_logits, text_logits(model, PROMPT), max_abs=3e-3)


class TestQuantizing:
    """What a load says of the weights it quantizes."""

    @pytest.mark.parametrize(("quant", "bound"), [(Quant.Q8_0, 0.01), (Quant.Q4_0, 0.5)])
    def test_d16_groups_of_zeros(self, load: Load, tmp_path: Path, quant: Quant, bound: float) -> None:
        def clear(tensors: Tensors) -> None:
            tensors[K_PROJ][:] = 0
            tensors[TEXT + "layers.0.mlp.gate_proj.weight"][7] = 0
            tensors[TEXT + "layers.2.mlp.down_proj.weight"][:, 32:64] = 0

        model = make_t0(tmp_path / "m", edit=clear)
        engine = load(model, quant=quant)
        answer = run(engine)
        assert np.isfinite(answer.prompt_logits).all()
        assert np.isfinite(answer.step_logits).all()
        assert nmse(answer.prompt_logits, text_logits(model, PROMPT)) < bound
        (about_zeros,) = [w for w in engine.load(CTX).warnings if "zero" in w]
        assert about_zeros.startswith(f"tensors of nothing but zeros (1, the first {K_PROJ}): "), "no group is lost"

    def test_d17_a_width_that_256_does_not_divide(self, load: Load, tmp_path: Path) -> None:
        engine = load(make_t0(tmp_path / "m", intermediate_size=544), quant=Quant.G256)
        expected = {"qkv": "g256", "o": "g256", "gate_up": "g256", "down": "q8_0", "lm_head": "g256"}
        assert engine.load(CTX).quant == expected
        answer = run(engine)
        assert nmse(answer.prompt_logits, text_logits(engine.config.model, PROMPT)) < 0.02

    @pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0, Quant.G256])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_a_weight_that_is_not_finite_is_refused_by_name(
        self, load: Load, tmp_path: Path, quant: Quant, value: float
    ) -> None:
        def damage(tensors: Tensors) -> None:
            tensors[UP_PROJ][3, 5] = value

        model = make_tiny_checkpoint(tmp_path / "m", **SMALL, edit=damage)
        with pytest.raises(CheckpointError, match=UP_PROJ) as caught:
            load(model, quant=quant)
        assert "not finite" in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "quant"),
        [
            (TEXT + "layers.1.input_layernorm.weight", Quant.Q8_0),
            (TEXT + "norm.weight", Quant.Q8_0),
            (TEXT + "layers.1.self_attn.k_norm.weight", Quant.Q8_0),
            (UP_PROJ, Quant.NONE),
            (EMBED, Quant.NONE),  # lm_head too
        ],
    )
    def test_unquantized_weights_that_are_not_finite(self, load: Load, tmp_path: Path, name: str, quant: Quant) -> None:
        def damage(tensors: Tensors) -> None:
            tensors[name].reshape(-1)[3] = np.nan

        with pytest.raises(CheckpointError, match=name):
            load(make_tiny_checkpoint(tmp_path / "m", **SMALL, edit=damage), quant=quant)

    @pytest.mark.parametrize(("quant", "most"), [(Quant.Q8_0, 65504 * 127), (Quant.Q4_0, 65504 * 8)])
    def test_a_scale_that_float16_does_not_hold_is_refused_by_name(
        self, load: Load, tmp_path: Path, quant: Quant, most: float
    ) -> None:
        def enlarge(tensors: Tensors) -> None:
            tensors[UP_PROJ][3, 5] = most * 1.02

        model = make_tiny_checkpoint(tmp_path / "m", **SMALL, dtype="float32", edit=enlarge)
        with pytest.raises(CheckpointError, match=UP_PROJ) as caught:
            load(model, quant=quant)
        assert "65504" in str(caught.value)

        def hold(tensors: Tensors) -> None:
            tensors[UP_PROJ][3, 5] = most

        load(make_tiny_checkpoint(tmp_path / "h", **SMALL, dtype="float32", edit=hold), quant=quant)

    @pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0])
    def test_groups_lost_to_float16_are_counted_in_one_warning(self, load: Load, tmp_path: Path, quant: Quant) -> None:
        def shrink(tensors: Tensors) -> None:
            tensors[UP_PROJ][:3, :32] = 1e-9
            tensors[K_PROJ][0, 32:64] = -1e-9

        model = make_tiny_checkpoint(tmp_path / "m", **SMALL, dtype="float32", edit=shrink)
        engine = load(model, quant=quant)
        warnings = [w for w in engine.load(CTX).warnings if "float16" in w]
        assert len(warnings) == 1
        assert warnings[0].startswith("4 groups of 2 tensors")
        assert K_PROJ in warnings[0], "the first in the order of the layer"
        assert np.isfinite(run(engine).prompt_logits).all()


class TestLoading:
    """The engine around a load."""

    def test_the_load_report(self, load: Load, t0: Path, backend_name: str) -> None:
        report = load(t0).load(50, 10)
        assert report.backend == backend_name
        assert (report.num_layers, report.num_weights, report.keep) == (4, 29, 0)
        assert (report.ctx, report.prefill_chunk) == (50, 10)
        # Keys and values of 4 layers and 2 heads of 128 channels.
        assert (report.kv, report.kv_bytes_per_slot) == ("f16", 2 * 4 * 2 * 128 * 2)
        assert report.quant == dict.fromkeys(("qkv", "o", "gate_up", "down", "lm_head"), "q8_0")
        assert report.dtypes.keys() == {"BF16"}
        assert not report.tied
        assert set(report.eos_ids) == {614, 616}
        assert report.planned_device_bytes > 0

    @pytest.mark.parametrize("ids", [[1.5], [True], ["1"], "12", [None]])
    def test_ids_are_whole_numbers(self, load: Load, t0: Path, ids: Any) -> None:
        engine = load(t0)
        engine.load(CTX)
        for take in (engine.check_ids, partial(engine.generate, max_new_tokens=1)):
            with pytest.raises(InputError, match=r"a token id is .*; whole numbers are needed"):
                take(ids)
        assert engine.check_ids(iter([1, np.int64(2)])) == [1, 2]  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "wrong", [{"max_new_tokens": 1.5}, {"max_new_tokens": True}, {"max_new_tokens": "3"}, {"logits": "x"}]
    )
    def test_what_an_answer_takes_is_checked(self, load: Load, t0: Path, wrong: dict[str, Any]) -> None:
        engine = load(t0)
        engine.load(CTX)
        ((name, value),) = wrong.items()
        with pytest.raises(InputError, match=f"{name} is {value!r}; "):
            engine.generate(PROMPT, **{"max_new_tokens": 1} | wrong)

    @pytest.mark.parametrize("ctx", ["5", 5.0, True, 0, None])
    def test_a_context_is_a_whole_number(self, load: Load, t0: Path, ctx: Any) -> None:
        with pytest.raises(SettingError, match=f"ctx is {ctx!r}; it takes a whole number of at least 1"):
            load(t0).load(ctx)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("model", None), ("model", b"/x"), ("strip_cache", 5), ("cache_budget", "x"), ("lazy", "no"),
         ("whole_token", 1), ("keep_tower", None)],
    )  # fmt: skip
    def test_settings_of_another_type_are_refused(self, t0: Path, name: str, value: Any) -> None:
        with pytest.raises(SettingError, match=f"{name} is {re.escape(repr(value))}; it takes "):
            EngineConfig(**{"model": t0} | {name: value})

    @pytest.mark.parametrize("keep", [4, 5, 99])
    def test_d38_a_keep_above_the_model(self, load: Load, t0: Path, keep: int) -> None:
        report = load(t0, keep=keep).load(CTX)
        assert report.keep == 4
        said = [note for note in report.warnings if f"--keep {keep} is more than the model's 4 layers" in note]
        assert len(said) == (keep > 4)

    def test_loading_again_starts_anew(self, load: Load, t0: Path) -> None:
        engine = load(t0, keep=2)
        first = run(engine)
        engine.load(CTX)
        again = run(engine)
        assert again.digest == first.digest
        assert again.residency == first.residency

    def test_a_closed_engine_holds_nothing_and_says_so(self, load: Load, t0: Path) -> None:
        engine = load(t0)
        engine.close()
        with pytest.raises(UserError, match="before load"):
            engine.generate(PROMPT, 1)
        engine.close()

    @pytest.mark.parametrize("keep", [0, 2])
    @pytest.mark.parametrize("logits", ["none", "hash", "keep"])
    def test_answers_leave_nothing_allocated(self, load: Load, t0: Path, logits: LogitsWish, keep: int) -> None:
        engine = load(t0, keep=keep)
        assert engine.backend is not None
        held = []
        for _ in range(3):
            list(engine.generate(PROMPT, 3, logits=logits))
            held.append(engine.backend.memory().allocated_bytes)
        assert len(set(held)) == 1


class TestPrompts:
    """What an engine takes for a prompt."""

    def test_ids_of_pictures_are_refused(self, load: Load, t0: Path) -> None:
        engine = load(t0)
        for name, token_id in (("image", 626), ("video", 627)):
            with pytest.raises(InputError, match=rf"{name} token \({token_id}\)"):
                engine.check_ids([5, token_id])
            with pytest.raises(InputError, match=f"no {name} comes with it"):
                engine.encode_raw(f"a<|{name}_pad|>b")
        typed = engine.encode_chat([{"role": "user", "content": "a<|image_pad|>b"}])
        assert 626 not in typed

    def test_ids_outside_the_vocabulary_are_refused(self, load: Load, t0: Path) -> None:
        engine = load(t0)
        assert engine.check_ids([0, 652]) == [0, 652]
        for token_id in (-1, 653):
            with pytest.raises(InputError, match=f"token id {token_id} .* 0 to 652"):
                engine.check_ids([token_id])


def test_d39_the_next_token_s_layers_are_fetched_at_the_end_of_this_one(load: Load, t0: Path) -> None:
    expected = run(load(t0, keep=0, ctx=256), 200)
    for policy, prefetch in ((Policy.PAST_ONLY, 1), (Policy.PINNED, 2)):
        engine = load(t0, keep=1, policy=policy, prefetch=prefetch, ctx=256)
        found = run(engine, 200)
        num_layers = engine.checkpoint.config.text.num_layers
        assert found.digest == expected.digest
        assert found.residency.uploads_per_token == num_layers - 1
        assert found.residency.h2d_bytes_per_token == (num_layers - 1) * layer_bytes(engine)
        assert engine._store is not None
        assert set(engine._store.counters.pass_uploads[1:]) == {num_layers - 1}
        assert found.residency.prefetched_layers == min(prefetch, num_layers - 1)
