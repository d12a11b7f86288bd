"""Prompts with pictures and videos against the reference implementation, from the goldens' pixels to the ids.

Bounds are those of the oracle's README.md. Features and positions by themselves are test_vision's and
test_prompt_positions'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kestrel_cuda.config import Quant
from kestrel_cuda.engine import Engine
from kestrel_cuda.errors import InputError
from kestrel_cuda.model.prompt_positions import Visual
from kestrel_cuda.model.visual_rows import EncodedVisuals
from tests.compare import assert_close
from tests.engines import assert_bytes_moved, generate
from tests.goldens import checkpoint, golden, golden_names, pixels_and_grids
from tests.pixel_codes import codes_of

GOLDENS = golden_names("img", "vid")
CTX = 160
EMBED, HIDDEN, LOGITS = 1e-4, 1.5e-3, 3e-3

Load = Callable[..., Engine]


def encoded(engine: Engine, arrays: dict[str, NDArray[Any]]) -> EncodedVisuals:
    kind = "video" if "video_grid_thw" in arrays else "image"
    pixels_mk, grids = pixels_and_grids(arrays, kind)
    return engine.encode_visuals([Visual(kind, grid) for grid in grids], codes_of(pixels_mk, grids))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GOLDENS)
def test_unquantized(shared: Load, name: str) -> None:
    arrays, info = golden(name)
    engine = shared(checkpoint(name), quant=Quant.NONE, ctx=CTX)
    hidden: dict[str, list[NDArray[np.float32]]] = {}
    run = generate(
        engine,
        arrays["input_ids"].tolist(),
        32,
        encoded=encoded(engine, arrays),
        observe=lambda what, rows_mk: hidden.setdefault(what, []).append(rows_mk.copy()),
    )
    first = int(arrays["rows_from"])
    assert_close(np.concatenate(hidden["embed"])[first:], arrays["hidden_embed"], max_abs=EMBED, what=f"{name} embed")
    kept = {f"layer {int(key[-2:])}": rows for key, rows in arrays.items() if key.startswith("hidden_after_layer_")}
    assert len(kept) > 3
    for what, rows in kept.items():
        assert_close(np.concatenate(hidden[what])[first:], rows, max_abs=HIDDEN, what=f"{name} {what}")
    assert_close(run.prompt_logits[first:], arrays["logits"], max_abs=LOGITS, what=f"{name} logits")

    small = np.flatnonzero(arrays["greedy_margins"] < 2 * LOGITS)
    steps = int(small[0]) if small.size else 32
    assert steps > 5
    assert run.ids[:steps] == arrays["greedy_ids"][:steps].tolist()
    assert_close(run.step_logits[:steps], arrays["greedy_logits"][:steps], max_abs=LOGITS, what=f"{name} steps")
    until_eos = info["generate_ids_until_eos"]
    assert run.ids[: min(steps, len(until_eos))] == until_eos[:steps]


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("name", [name for name in GOLDENS if "two" in name or "vid" in name])
def test_chunks_that_cut_through_pictures(shared: Load, name: str, chunk: int) -> None:
    arrays, _ = golden(name)
    engine = shared(checkpoint(name), quant=Quant.NONE, ctx=CTX, prefill_chunk=chunk)
    run = generate(engine, arrays["input_ids"].tolist(), 8, encoded=encoded(engine, arrays))
    assert_close(run.prompt_logits, arrays["logits"], max_abs=LOGITS, what=f"{name} in {chunk}s")
    assert run.ids == arrays["greedy_ids"][:8].tolist()


@pytest.mark.parametrize("keep", [1, 2])
def test_a_window_changes_nothing(shared: Load, keep: int) -> None:
    """To the bit, with two pictures."""
    name = "tiny-dense-tied/img-two"
    arrays, _ = golden(name)
    digests = set()
    for window in (0, keep):
        engine = shared(checkpoint(name), ctx=CTX, keep=window)
        run = generate(engine, arrays["input_ids"].tolist(), 8, encoded=encoded(engine, arrays))
        assert_bytes_moved(engine, run)
        digests.add(run.digest)
    assert len(digests) == 1


def test_text_after_pictures_is_as_before(shared: Load) -> None:
    """Positions of a picture are gone with it."""
    arrays, _ = golden("tiny-dense-tied/img-two")
    engine = shared(checkpoint("tiny-dense-tied"), ctx=CTX)
    ids = [5, 6, 7, 8]
    before = generate(engine, ids, 8)
    held = engine.backend.memory().allocated_bytes if engine.backend else 0
    pictures = encoded(engine, arrays)
    pictured = generate(engine, arrays["input_ids"].tolist(), 8, encoded=pictures)
    pictures.free()
    after = generate(engine, ids, 8)
    assert after.digest == before.digest != pictured.digest
    assert_bytes_moved(engine, pictured)
    assert_bytes_moved(engine, after)
    assert engine.backend is not None
    assert engine.backend.memory().allocated_bytes == held, "features are given back"


def test_case_d24_swapped_images_change_the_answer(shared: Load) -> None:
    """Two pictures of 4 and 6 tokens, in the golden's order and in the other."""
    name = "tiny-dense-tied/img-two"
    arrays, _ = golden(name)
    engine = shared(checkpoint(name), quant=Quant.NONE, ctx=CTX)
    pixels_mk, grids = pixels_and_grids(arrays, "image")
    swapped = engine.encode_visuals([Visual("image", grid) for grid in grids[::-1]], codes_of(pixels_mk, grids)[::-1])
    pad = engine.checkpoint.config.image_token_id
    ids = arrays["input_ids"].tolist()
    first, second = (i for i in range(len(ids)) if ids[i] == pad and ids[i - 1] != pad)
    between = ids[first + 4 : second]
    ids[first : second + 6] = [pad] * 6 + between + [pad] * 4
    run = generate(engine, ids, 32, encoded=swapped)
    assert run.ids != arrays["greedy_ids"].tolist()


def test_pictures_that_the_prompt_has_no_place_for_are_refused(shared: Load) -> None:
    name = "tiny-dense-tied/img-two"
    arrays, _ = golden(name)
    engine = shared(checkpoint(name), quant=Quant.NONE, ctx=CTX)
    with pytest.raises(InputError, match=r"^2 images came with the prompt, and image 1 has no tokens in it"):
        engine.generate([1, 2, 3], 4, encoded=encoded(engine, arrays))


def test_a_text_only_checkpoint_takes_no_pictures(load: Load, tiny_model: Any) -> None:
    engine = load(tiny_model)
    with pytest.raises(InputError, match="has no vision tower"):
        engine.encode_visuals([Visual("image", (1, 2, 2))], np.zeros((4, 1536), np.float32))
