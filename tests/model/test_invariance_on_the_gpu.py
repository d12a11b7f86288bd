"""A token has the same bits whether it is replayed or launched, and in one launch or in many; only a GPU shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kestrel_cuda.backends import token_cuts
from kestrel_cuda.config import KvDtype, Quant
from kestrel_cuda.engine import Engine
from scripts.make_tiny_model import make_tiny_checkpoint
from tests.checkpoints import edit_json
from tests.engines import QUANTS, assert_bytes_moved, assert_same_bits, generate, random_ids

PROMPT = random_ids(24)
N, CTX = 6, 32

Load = Callable[..., Engine]


def assert_whole_tokens_have_the_same_bits(
    load_on_gpu: Load, model: Path, prompts: dict[int, int], *, quant: Quant, ctx: int
) -> Engine:
    """Answers of so many tokens behind prompts of so many, in one launch a token and in many. The engine with one."""
    engine = load_on_gpu(model, quant=quant, keep=0, ctx=ctx)
    answers = {n: generate(engine, random_ids(n, seed=n), num_tokens) for n, num_tokens in prompts.items()}
    assert engine._model is not None
    if not engine._model.has_whole_token:
        pytest.skip("this card takes a token in several launches")
    in_many = load_on_gpu(model, quant=quant, keep=0, ctx=ctx, whole_token=False)
    for n, whole in answers.items():
        assert_bytes_moved(engine, whole)
        many = generate(in_many, random_ids(n, seed=n), prompts[n])
        assert_same_bits(many, whole)
        assert_bytes_moved(in_many, many)
    assert in_many._model is not None
    assert not in_many._model.has_whole_token
    return engine


def forms_of(engine: Engine) -> tuple[str, ...]:
    """Of the kernel that takes a token: for a context of one split, and for longer ones."""
    token = engine._model._whole_token  # type: ignore[union-attr]
    launches = (token._of_one_split, token._of_many)  # type: ignore[union-attr]
    return tuple(launch.func.signature.name.split("_", 4)[-1] for launch in launches)


class TestOnTheGpu:
    """What only a device can show."""

    pytestmark = pytest.mark.cuda

    @pytest.mark.parametrize("keep", [0, 2])
    @pytest.mark.parametrize(("quant", "kv"), [*((quant, None) for quant in QUANTS), (Quant.Q8_0, KvDtype.Q8)])
    def test_replayed_and_launched_tokens(
        self,
        load_on_gpu: Load,
        wide_model: Path,
        quant: Quant,
        kv: KvDtype | None,
        keep: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A prompt just below 256 slots, so that the launches of a token change on the way."""
        prompt = random_ids(250, seed=5)
        engine = load_on_gpu(wide_model, quant=quant, kv=kv, keep=keep, ctx=300)
        assert engine.backend is not None
        captures = []
        capture = engine.backend.capture
        monkeypatch.setattr(engine.backend, "capture", lambda steps: captures.append(1) or capture(steps))
        replayed = generate(engine, prompt, 20)
        assert len(captures) == 2 if keep == 0 else len(captures) > 2
        monkeypatch.setattr(engine.backend, "can_capture", False)
        captures.clear()
        launched = generate(engine, prompt, 20)
        assert not captures
        assert_same_bits(launched, replayed)
        for run in (launched, replayed):
            assert_bytes_moved(engine, run)
        if keep == 0:
            assert launched.residency.cache_hits == replayed.residency.cache_hits

    @pytest.mark.parametrize(
        "sizes",
        [
            {"hidden_size": 128, "num_heads": 4, "head_dim": 32, "intermediate_size": 256},
            {"hidden_size": 256, "num_heads": 4, "head_dim": 64, "intermediate_size": 256},
            {"hidden_size": 2048, "num_heads": 4, "head_dim": 128, "intermediate_size": 768},
            {"hidden_size": 2304, "num_heads": 8, "head_dim": 64, "intermediate_size": 640},
            {"hidden_size": 384, "num_heads": 4, "head_dim": 64, "intermediate_size": 4608},
            {"hidden_size": 2048, "num_heads": 4, "head_dim": 128, "intermediate_size": 4608},
            {"hidden_size": 256, "num_heads": 32, "head_dim": 128, "intermediate_size": 256},
            {"hidden_size": 256, "num_heads": 48, "num_kv_heads": 4, "head_dim": 128, "intermediate_size": 256},
        ],
        ids=["128", "256", "2048", "2304", "384-halved", "2048-halved", "16-queries", "192-groups"],
    )
    @pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0])
    def test_a_token_in_one_launch_and_in_many(
        self, load_on_gpu: Load, tmp_path: Path, sizes: dict[str, int], quant: Quant
    ) -> None:
        """Over a cache of one split and of two, with linears cut in every way; o and down that would be cut differently
        each by itself (128); on 132 multiprocessors, sets of gate and up that two blocks share (halved), and more
        groups of channels to merge than blocks (192-groups)."""
        sizes = {"num_kv_heads": 2} | sizes
        model = make_tiny_checkpoint(tmp_path / "m", num_layers=3, with_vision=False, **sizes)
        engine = assert_whole_tokens_have_the_same_bits(load_on_gpu, model, {240: 40}, quant=quant, ctx=300)
        of_one_split, of_many = forms_of(engine)
        if sizes["head_dim"] == 128 and sizes["num_heads"] // sizes["num_kv_heads"] <= token_cuts.SLICE_QUERIES:
            assert (of_one_split, of_many) == ("one_split", "boxed")
        else:
            assert of_one_split == of_many

    @pytest.mark.parametrize("queries_per_kv", [1, 3, 4, 8])
    @pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0])
    def test_a_split_that_blocks_share(
        self, load_on_gpu: Load, tmp_path: Path, quant: Quant, queries_per_kv: int
    ) -> None:
        """kernels/token_slice.cuh at every number of slots up to 256, from the first token on."""
        sizes = {"hidden_size": 256, "num_kv_heads": 2, "head_dim": 128, "intermediate_size": 256}
        model = make_tiny_checkpoint(
            tmp_path / "m", num_layers=3, with_vision=False, num_heads=2 * queries_per_kv, **sizes
        )
        prompts = {1: 70, 70: 70, 139: 70, 200: 57}
        engine = assert_whole_tokens_have_the_same_bits(load_on_gpu, model, prompts, quant=quant, ctx=260)
        # Weights of eight bits and eight queries leave room for four boxes, but not for those of a slice too.
        has_room = quant is Quant.Q4_0 or queries_per_kv < 8
        assert forms_of(engine) == (("one_split", "boxed") if has_room else ("boxed", "boxed"))

    @pytest.mark.parametrize("kv_slots", [8, 5, 4, None], ids=["roomy", "odd", "narrow", "held"])
    @pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0])
    def test_keys_and_values_that_are_copied_ahead(
        self, load_on_gpu: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: Quant, kv_slots: int | None
    ) -> None:
        """Over several splits of heads of 128 channels, past ends of boxes; where there is room for all of a split, for
        a little more than its keys, for these alone, and for none."""
        monkeypatch.setattr(token_cuts, "MOST_KV_SLOTS", kv_slots or 0)
        sizes = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "intermediate_size": 256}
        model = make_tiny_checkpoint(tmp_path / "m", num_layers=3, with_vision=False, **sizes)
        engine = assert_whole_tokens_have_the_same_bits(load_on_gpu, model, {740: 100}, quant=quant, ctx=1100)
        assert forms_of(engine) == (("one_split", "boxed") if kv_slots else ("held", "held"))

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_more_splits_than_are_fetched_at_a_time(self, load_on_gpu: Load, tmp_path: Path, head_dim: int) -> None:
        """64 of 256 slots are (kernels/token_merge.cuh); and several splits a block."""
        sizes = {"hidden_size": 256, "num_heads": 16, "num_kv_heads": 8, "head_dim": head_dim, "intermediate_size": 256}
        model = make_tiny_checkpoint(tmp_path / "m", num_layers=2, with_vision=False, **sizes)
        edit_json(model / "config.json", {"text_config.max_position_embeddings": 1 << 15})
        prompts, ctx = {65 * 256 - 2: 5}, 65 * 256 + 8
        assert_whole_tokens_have_the_same_bits(load_on_gpu, model, prompts, quant=Quant.Q8_0, ctx=ctx)

    def test_an_int8_cache_is_served_in_several_launches(self, load_on_gpu: Load, wide_model: Path) -> None:
        engine = load_on_gpu(wide_model, quant=Quant.Q8_0, kv=KvDtype.Q8, keep=0, ctx=CTX, whole_token=True)
        asked = generate(engine, PROMPT, N)
        assert engine._model is not None
        assert not engine._model.has_whole_token
        assert_bytes_moved(engine, asked)
        assert_same_bits(asked, generate(load_on_gpu(wide_model, kv=KvDtype.Q8, keep=0, ctx=CTX), PROMPT, N))
