"""The decoder against the reference implementation: every text golden of every checkpoint, on each backend.

Bounds are those of the oracle's README.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kestrel_cuda.config import Quant
from kestrel_cuda.engine import Engine
from kestrel_cuda.quant.grouped import dequantize, quantize, scheme_for
from tests.checkpoints import Stored, copy, read_tensors, write_tensors
from tests.compare import assert_close
from tests.engines import generate
from tests.goldens import ORACLE, checkpoint, golden, golden_names

GOLDENS = golden_names("text", "raw")
CHECKPOINTS = sorted(path.name for path in (ORACLE / "checkpoints").iterdir())
CTX = 320
HIDDEN, FINAL_NORM, LOGITS = 1.5e-3, 8e-4, 3e-3
SMALL_MARGIN = 2 * LOGITS
EMBED, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"

Load = Callable[..., Engine]


def steps_before_a_small_margin(margins: NDArray[np.float32]) -> int:
    """Steps whose id is decided beyond rounding; ids are fed back, so one that is not ends the comparison."""
    small = np.flatnonzero(margins < SMALL_MARGIN)
    return int(small[0]) if small.size else len(margins)


def encode(engine: Engine, info: dict[str, Any]) -> list[int]:
    return engine.encode_raw(info["raw"]) if info["raw"] is not None else engine.encode_chat(info["messages"])


def test_all_text_goldens_are_here() -> None:
    assert len(GOLDENS) == 16
    assert len(CHECKPOINTS) == 3


@pytest.mark.parametrize("name", GOLDENS)
def test_unquantized(shared: Load, name: str) -> None:
    arrays, info = golden(name)
    engine = shared(checkpoint(name), quant=Quant.NONE, ctx=CTX)
    prompt_ids = encode(engine, info)
    assert prompt_ids == arrays["input_ids"].tolist()

    hidden: dict[str, list[NDArray[np.float32]]] = {}
    run = generate(
        engine, prompt_ids, 32, observe=lambda what, rows_mk: hidden.setdefault(what, []).append(rows_mk.copy())
    )
    assert len(hidden) == 1 + engine.checkpoint.config.text.num_layers
    first = int(arrays["rows_from"])
    kept = {"embed": arrays["hidden_embed"]}
    kept |= {f"layer {int(key[-2:])}": rows for key, rows in arrays.items() if key.startswith("hidden_after_layer_")}
    assert len(kept) > 4
    for what, rows in kept.items():
        assert_close(np.concatenate(hidden[what])[first:], rows, max_abs=HIDDEN, what=f"{name} {what}")
    assert_close(run.prompt_logits[first:], arrays["logits"], max_abs=LOGITS, what=f"{name} logits")

    steps = steps_before_a_small_margin(arrays["greedy_margins"])
    assert run.ids[:steps] == arrays["greedy_ids"][:steps].tolist()
    assert_close(run.step_logits[:steps], arrays["greedy_logits"][:steps], max_abs=LOGITS, what=f"{name} steps")
    assert steps == 32, "the goldens at hand have no step that close"


@pytest.mark.parametrize("name", GOLDENS)
def test_final_norm(shared: Load, name: str) -> None:
    """Of the last prompt row, which the first step leaves in the buffer that lm_head reads."""
    arrays, _ = golden(name)
    engine = shared(checkpoint(name), quant=Quant.NONE, ctx=CTX)
    list(engine.generate(arrays["input_ids"].tolist(), 1))
    assert engine._model is not None
    assert engine.backend is not None
    final = engine.backend.to_host(engine._model._final.values_mk)[0]
    assert_close(final, arrays["hidden_final_norm"][-1], max_abs=FINAL_NORM, what=name)


@pytest.mark.parametrize("name", GOLDENS)
def test_answer_that_stops_at_an_end_token(shared: Load, name: str) -> None:
    arrays, info = golden(name)
    engine = shared(checkpoint(name), quant=Quant.NONE, ctx=CTX)
    generation = engine.generate(arrays["input_ids"].tolist(), 32)
    ids = [token.token_id for token in generation]
    assert ids == info["generate_ids_until_eos"]
    assert generation.report().stop_reason == ("eos" if ids[-1] in engine.end_ids else "length")


@pytest.fixture(scope="session")
def dequantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Quant], Path]:
    """A float32 copy of a checkpoint whose quantized matrices hold what their codes and scales stand for."""
    made: dict[tuple[str, Quant], Path] = {}

    def make(name: str, quant: Quant) -> Path:
        if (name, quant) not in made:
            folder = copy(ORACLE / "checkpoints" / name, tmp_path_factory.mktemp("dequantized") / f"{name}-{quant}")
            tensors = read_tensors(folder)
            tensors.setdefault(HEAD, tensors[EMBED])
            listed = json.loads((ORACLE / "golden" / name / "quantised.json").read_text())["quantised"]
            for tensor in {f"{module}.weight" for module in listed} | {HEAD}:
                values = tensors[tensor].to_float32()
                scheme = scheme_for(quant, values.shape[1])
                assert scheme is not None
                values = dequantize(quantize(values, scheme))
                tensors[tensor] = Stored("F32", values.shape, values.tobytes())
            write_tensors(folder, tensors)
            made[name, quant] = folder
        return made[name, quant]

    return make


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0])
def test_quantized_weights(shared: Load, dequantized: Callable[[str, Quant], Path], name: str, quant: Quant) -> None:
    """Codes times scales through the unquantized path: the weights' rounding without the activations'."""
    arrays, _ = golden(name)
    engine = shared(dequantized(name.split("/")[0], quant), quant=Quant.NONE, ctx=CTX)
    run = generate(engine, arrays["input_ids"].tolist(), 32)
    first = int(arrays["quant_rows_from"])
    assert_close(run.prompt_logits[first:], arrays[f"{quant}_logits"], max_abs=LOGITS, what=f"{name} {quant}")
    steps = steps_before_a_small_margin(arrays[f"{quant}_greedy_margins"])
    assert steps > 0
    assert run.ids[:steps] == arrays[f"{quant}_greedy_ids"][:steps].tolist()


def test_eight_bit_activations_stay_in_the_band(shared: Load, figures: dict[str, float], backend_name: str) -> None:
    """Fed the goldens' ids; a rounding step apart is all that two correct versions may be."""
    same, differences = [], []
    for name in GOLDENS:
        arrays, _ = golden(name)
        engine = shared(checkpoint(name), quant=Quant.Q8_0, ctx=CTX)
        prompt, answer = arrays["input_ids"].tolist(), arrays["q8_0_greedy_ids"].tolist()
        logits_sv = generate(engine, prompt + answer[:-1], 1).prompt_logits
        first, last = int(arrays["quant_rows_from"]), len(prompt) - 1
        differences.append(np.abs(logits_sv[first : last + 1] - arrays["q8_0_logits"]).ravel())
        same.append(logits_sv[first:last].argmax(-1) == arrays["q8_0_logits"][:-1].argmax(-1))
        same.append(logits_sv[last:].argmax(-1) == answer)
    share, mean = float(np.concatenate(same).mean()), float(np.concatenate(differences).mean())
    if backend_name == "cuda":
        figures["q8_0_golden_best_token_share"], figures["q8_0_golden_mean_logit_difference"] = share, mean
    print(f"{backend_name}: same best token at {share:.1%} of positions, mean logit difference {mean:.3f}")
    assert share >= 0.75
    assert mean <= 0.7
