"""The window changes where bytes are, never what is computed: the same logits to the bit, and honest counts.

On the GPU the logits of a position are also the same however a prompt is cut and whichever kernel runs; on the
CPU those agree within rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel_cuda.config import KvDtype, Quant
from kestrel_cuda.engine import Engine
from tests.compare import assert_close
from tests.engines import QUANTS, assert_bytes_moved, assert_same_bits, generate, head_bytes, layer_bytes, random_ids

ROOT = Path(__file__).resolve().parents[2]
TINY_28L = ROOT / "tests/data/oracle/checkpoints/tiny-28L"
TINY_RANDOM = ROOT / "tests/data/tiny-random"
RESIDENT_WEIGHTS = {0: 197, 27: 190, 26: 183, 20: 141, 12: 85, 4: 29, 1: 8}
KEEPS = [keep for keep in RESIDENT_WEIGHTS if keep]
PROMPT = random_ids(24)
N, CTX = 6, 32
NARROW = [Quant.Q8_0, Quant.Q4_0, Quant.NONE]
"""In the small models no width divides by 256, so that g256 there is q8_0."""

Load = Callable[..., Engine]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("quant", NARROW)
def test_windows_over_28_layers(shared: Load, load: Load, quant: Quant, keep: int) -> None:
    whole = shared(TINY_28L, quant=quant, keep=0, ctx=CTX)
    expected = generate(whole, PROMPT, N)
    assert expected.residency.weights_resident_end == RESIDENT_WEIGHTS[0]
    assert expected.residency.peak_weight_bytes == 28 * layer_bytes(whole) + head_bytes(whole)

    engine = load(TINY_28L, quant=quant, keep=keep, prefetch=0, ctx=CTX)
    run = generate(engine, PROMPT, N)
    assert_same_bits(run, expected)
    residency, one = run.residency, layer_bytes(engine)
    assert residency.weights_resident_end == RESIDENT_WEIGHTS[keep]
    assert (residency.layers_resident_end, residency.prefetched_layers) == (keep, 0)
    assert residency.uploads_per_token == 28 - keep
    assert residency.h2d_bytes_per_token == (28 - keep) * one
    assert residency.layer_uploads == (N,) * (28 - keep) + (1,) * keep, "once for the prompt, once a token since"
    assert residency.peak_layers == min(28, 2 * keep)
    assert residency.peak_weight_bytes == min(28, 2 * keep) * one + head_bytes(engine)
    assert residency.evictions == 7 * N * (28 - keep)

    again = generate(engine, PROMPT, N)
    assert_same_bits(again, expected)
    assert again.residency.layer_uploads == (N,) * (28 - keep) + (0,) * keep, "the tail was still there"
    assert again.residency.pool_misses == 0


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("prefetch", [2, 5])
def test_windows_that_fetch_ahead(shared: Load, load: Load, prefetch: int, keep: int) -> None:
    """As many uploads, some of them for the next token; those are no part of what a token leaves."""
    expected = generate(shared(TINY_28L, quant=Quant.Q8_0, keep=0, ctx=CTX), PROMPT, N)
    engine = load(TINY_28L, quant=Quant.Q8_0, keep=keep, prefetch=prefetch, ctx=CTX)
    for _ in range(2):
        run = generate(engine, PROMPT, N)
        assert_same_bits(run, expected)
        residency, one = run.residency, layer_bytes(engine)
        assert residency.weights_resident_end == RESIDENT_WEIGHTS[keep]
        assert residency.layers_resident_end == keep
        assert residency.prefetched_layers == min(prefetch, 28 - keep)
        assert residency.uploads_per_token == 28 - keep
        assert residency.h2d_bytes_per_token == (28 - keep) * one
        assert residency.peak_layers <= min(28, 2 * keep + prefetch)
        assert residency.peak_weight_bytes == residency.peak_layers * one + head_bytes(engine)
    assert residency.pool_misses == 0


@pytest.mark.parametrize("keep", [11, 6, 1])
@pytest.mark.parametrize("quant", NARROW)
def test_windows_over_12_layers(shared: Load, load: Load, quant: Quant, keep: int) -> None:
    expected = generate(shared(TINY_RANDOM, quant=quant, keep=0, ctx=CTX), PROMPT, N)
    engine = load(TINY_RANDOM, quant=quant, keep=keep, ctx=CTX)
    run = generate(engine, PROMPT, N)
    assert_same_bits(run, expected)
    assert run.residency.weights_resident_end == 7 * keep + 1
    assert run.residency.uploads_per_token == 12 - keep
    assert run.residency.h2d_bytes_per_token == (12 - keep) * layer_bytes(engine)


@pytest.mark.parametrize("window", [{"keep": 1}, {"keep": 3}, {"keep": 0, "lazy": True}], ids=str)
def test_windows_with_wide_groups(shared: Load, load: Load, wide_model: Path, window: dict[str, int]) -> None:
    whole = shared(wide_model, quant=Quant.G256, keep=0, ctx=CTX)
    assert whole._weights is not None
    assert set(whole._weights.quant_by_class.values()) == {"g256"}
    engine = load(wide_model, quant=Quant.G256, ctx=CTX, **window)
    run = generate(engine, PROMPT, N)
    assert_same_bits(run, generate(whole, PROMPT, N))
    uploads = 5 - window["keep"] if window["keep"] else 0
    assert run.residency.h2d_bytes_per_token == uploads * layer_bytes(engine)


@pytest.mark.parametrize("quant", NARROW)
def test_preloaded_and_lazy(shared: Load, load: Load, quant: Quant) -> None:
    expected = generate(shared(TINY_28L, quant=quant, keep=0, ctx=CTX), PROMPT, N)
    engine = load(TINY_28L, quant=quant, keep=0, lazy=True, ctx=CTX)
    first = generate(engine, PROMPT, N)
    assert_same_bits(first, expected)
    assert first.residency.layer_uploads == (1,) * 28
    assert first.residency.uploads_per_token == 0
    assert first.residency.weights_resident_end == 197
    again = generate(engine, PROMPT, N)
    assert_same_bits(again, expected)
    assert again.residency.layer_uploads == expected.residency.layer_uploads == (0,) * 28
    assert again.residency.cache_misses == expected.residency.cache_misses == 0
    assert again.residency.cache_hits == expected.residency.cache_hits


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("quant", QUANTS)
def test_prompts_in_chunks(
    shared: Load, load: Load, backend_name: str, wide_model: Path, quant: Quant, keep: int, chunk: int
) -> None:
    prompt = random_ids(70, seed=1)
    expected = generate(shared(wide_model, quant=quant, keep=0, ctx=80), prompt, N)
    engine = load(wide_model, quant=quant, keep=keep, prefill_chunk=chunk, ctx=80)
    run = generate(engine, prompt, N)
    if backend_name == "cuda":
        assert_same_bits(run, expected)
    elif quant is Quant.NONE:
        assert_close(run.prompt_logits, expected.prompt_logits, max_abs=3e-3)
        assert run.ids == expected.ids
    else:  # an activation may fall on the other side of a rounding step
        assert np.abs(run.prompt_logits - expected.prompt_logits).mean() < 0.05
    if keep:
        passes = -(-len(prompt) // chunk)
        assert run.residency.layer_uploads[2] == passes + N - 1, "of no tail, and too far on to be fetched ahead"
    assert_bytes_moved(engine, run)


@pytest.mark.parametrize("chunk", [1, 7, 33, 70])
@pytest.mark.parametrize("quant", QUANTS)
def test_a_prompt_whose_logits_are_not_asked_for(
    shared: Load, backend_name: str, wide_model: Path, monkeypatch: pytest.MonkeyPatch, quant: Quant, chunk: int
) -> None:
    """Of its last layer only keys, values and the end of the last pass are computed, which changes nothing else."""
    prompt = random_ids(70, seed=1)
    engine = shared(wide_model, quant=quant, keep=0, ctx=80, prefill_chunk=chunk)
    expected = generate(engine, prompt, N)
    assert_bytes_moved(engine, expected)
    assert engine.backend is not None
    assert engine._model is not None
    monkeypatch.setattr(engine.backend, "rows_are_independent", True)
    passes: list[list[int]] = []
    linear, embed = engine.backend.linear, engine.backend.embed

    def counted_linear(x: Any, weight: Any, out_mn: Any, num_rows: int, **options: Any) -> None:
        if options.get("add"):
            passes[-1].append(num_rows)
        linear(x, weight, out_mn, num_rows, **options)

    def counted_embed(table: Any, state: Any, h_mk: Any, num_rows: int) -> None:
        passes.append([num_rows])
        embed(table, state, h_mk, num_rows)

    monkeypatch.setattr(engine.backend, "linear", counted_linear)
    monkeypatch.setattr(engine.backend, "embed", counted_embed)
    generation = engine.generate(prompt, N, ignore_eos=True, logits="none")
    tokens = iter(generation)
    ids = [next(tokens).token_id]
    logits_v = engine.backend.to_host(engine._model.logits_mv[0])[: expected.step_logits.shape[1]].copy()
    for rows, *added in passes[:-1]:
        assert added == [rows] * 8, "o and down of four layers of five"
    rows, *added = passes[-1]
    assert added == [rows] * 8 + [(rows - 1) % 16 + 1] * 2
    ids += [token.token_id for token in tokens]
    if backend_name == "cuda":
        assert np.array_equal(logits_v, expected.step_logits[0])
        assert ids == expected.ids
    else:
        assert np.abs(logits_v - expected.step_logits[0]).mean() < 0.05


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.NONE])
def test_prompts_in_chunks_over_an_int8_cache(
    shared: Load, load: Load, backend_name: str, wide_model: Path, quant: Quant, keep: int, chunk: int
) -> None:
    prompt, over = random_ids(70, seed=1), {"quant": quant, "kv": KvDtype.Q8, "ctx": 80}
    expected = generate(shared(wide_model, keep=0, **over), prompt, N)
    assert expected.digest != generate(shared(wide_model, keep=0, **over | {"kv": KvDtype.F16}), prompt, N).digest
    windowed = load(wide_model, keep=keep, **over)
    whole = generate(windowed, prompt, N)
    assert_same_bits(whole, expected)
    assert_bytes_moved(windowed, whole)
    cut = load(wide_model, keep=keep, prefill_chunk=chunk, **over)
    run = generate(cut, prompt, N)
    assert_bytes_moved(cut, run)
    if backend_name == "cuda":
        assert_same_bits(run, expected)
    else:  # an activation or an entry may fall on the other side of a rounding step
        assert np.abs(run.prompt_logits - expected.prompt_logits).mean() < 0.05


@pytest.mark.parametrize("kv", [None, KvDtype.Q8])
@pytest.mark.parametrize("quant", QUANTS)
def test_one_token_at_a_time_and_all_at_once(
    shared: Load, backend_name: str, wide_model: Path, quant: Quant, kv: KvDtype | None
) -> None:
    """The logits that chose each id are those of the same positions as a prompt."""
    engine = shared(wide_model, quant=quant, kv=kv, keep=0, ctx=80)
    run = generate(engine, PROMPT, 40)
    at_once = generate(engine, PROMPT + run.ids[:-1], 1)
    as_prompt = at_once.prompt_logits[len(PROMPT) - 1 :]
    assert_bytes_moved(engine, run)
    assert_bytes_moved(engine, at_once)
    if backend_name == "cuda":
        assert np.array_equal(as_prompt, run.step_logits)
    elif quant is Quant.NONE and kv is None:
        assert_close(as_prompt, run.step_logits, max_abs=3e-3)
    else:
        # Float32 products of one row and of many round differently, by processor, and now and then a code with them.
        assert np.abs(as_prompt - run.step_logits).mean() < 0.1


@pytest.mark.parametrize("num_prompt", [250, 506])
@pytest.mark.parametrize(("quant", "kv"), [(Quant.Q8_0, None), (Quant.NONE, None), (Quant.Q8_0, KvDtype.Q8)])
def test_a_context_that_crosses_a_split(
    shared: Load,
    load: Load,
    backend_name: str,
    wide_model: Path,
    quant: Quant,
    kv: KvDtype | None,
    num_prompt: int,
) -> None:
    """Attention walks the cache in pieces of 256 slots; a captured token serves one number of them."""
    prompt = random_ids(num_prompt, seed=2)
    engine = shared(wide_model, quant=quant, kv=kv, keep=0, ctx=600, prefill_chunk=128)
    expected = generate(engine, prompt, 14)
    assert num_prompt < num_prompt // 256 * 256 + 256 < num_prompt + 14
    windowed = load(wide_model, quant=quant, kv=kv, keep=1, ctx=530, prefill_chunk=128)
    run = generate(windowed, prompt, 14)
    assert_same_bits(run, expected)
    assert run.residency.h2d_bytes_per_token == 4 * layer_bytes(windowed)
    if backend_name == "cuda":
        for chunk in (77, 512):
            cut = load(wide_model, quant=quant, kv=kv, keep=0, ctx=520, prefill_chunk=chunk)
            cut_run = generate(cut, prompt, 14)
            assert_same_bits(cut_run, expected)
            assert_bytes_moved(cut, cut_run)
        late = generate(engine, prompt + expected.ids[:-1], 1)
        assert_bytes_moved(engine, late)
        assert np.array_equal(late.prompt_logits[num_prompt - 1 :], expected.step_logits)


@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0, Quant.NONE])
def test_one_engine_answers_prompt_after_prompt(shared: Load, wide_model: Path, quant: Quant) -> None:
    """What an earlier, longer prompt left in the cache is never read."""
    engine = shared(wide_model, quant=quant, keep=0, ctx=80)
    first = generate(engine, random_ids(5, seed=3), N)
    generate(engine, random_ids(70, seed=4), N)
    again = generate(engine, random_ids(5, seed=3), N)
    assert_same_bits(again, first)
    assert_bytes_moved(engine, again)


@pytest.mark.parametrize("quant", NARROW)
@pytest.mark.parametrize("keep", [0, 3])
def test_a_flipped_bit_is_noticed(shared: Load, load: Load, quant: Quant, keep: int) -> None:
    """The comparisons above can fail: one bit of a host copy, once uploaded, changes the logits."""
    expected = generate(shared(TINY_RANDOM, quant=quant, keep=0, ctx=CTX), PROMPT, N)
    engine = load(TINY_RANDOM, quant=quant, keep=keep, lazy=True, ctx=CTX)
    assert engine._store is not None
    host = engine._store._host[5]
    assert host.any()
    place, bit = (1, 0x80) if quant is Quant.NONE else (0, 0x40)  # the sign of a bfloat16, a code's upper bit
    host[place] ^= bit
    damaged = generate(engine, PROMPT, N)
    assert damaged.digest != expected.digest
    host[place] ^= bit
    mended = generate(engine, PROMPT, N)
    if keep:
        assert_same_bits(mended, expected)
    else:
        assert mended.digest == damaged.digest, "a resident layer is not uploaded again"
