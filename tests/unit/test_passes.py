"""The passes a prompt is cut into, and the room that is kept for them beside layers."""

from __future__ import annotations

from typing import Any

import pytest

from kestrel_cuda.config import Policy, Quant, TextConfig
from kestrel_cuda.errors import DeviceError
from kestrel_cuda.passes import CPU_CHUNK, HIDING_CHUNK, MOST_RESIDENT_CHUNK, MOST_WINDOW_CHUNK, TILE_ROWS, USUAL_CHUNK
from kestrel_cuda.plan import Flags, Plan
from tests.plans import GIB, MIB, TEXT, TEXT_8B, L, layer_bytes, plan, row


def of_prompt(num_prompt: int, vram_bytes: int | None, text: TextConfig = TEXT, **more: Any) -> Plan:
    """As scripts/check_window_prefill.py loads: four tokens after the prompt, settings as they are by default."""
    wishes = {"policy": Policy.PINNED, "prefetch": 2} | more
    return plan(text, used=0, ctx=num_prompt + 4, num_prompt=num_prompt, vram_bytes=vram_bytes, **wishes)


def row_bytes() -> int:
    longer, shorter = (row(plan(num_prompt=n), "work buffers") for n in (1024, 512))
    return (longer - shorter) // 512


def short(made: Plan) -> bool:
    return any("passes of" in note for note in made.notes)


def test_passes_follow_the_prompt_and_the_flag() -> None:
    for keep in (0, 4):
        assert plan(num_prompt=7, keep=keep).prefill_chunk == 7
        assert plan(num_prompt=100_000, keep=keep).prefill_chunk == (MOST_WINDOW_CHUNK if keep else MOST_RESIDENT_CHUNK)
        assert plan(num_prompt=100_000, keep=keep, prefill_chunk=64).prefill_chunk == 64
        assert plan(num_prompt=10, keep=keep, prefill_chunk=64).prefill_chunk == 10


@pytest.mark.parametrize("keep", [0, 1, 4])
def test_the_cpu_has_passes_of_one_length(keep: int) -> None:
    for num_prompt in (7, 512, 513, 2048, 9000):
        assert plan(num_prompt=num_prompt, keep=keep, on_gpu=False).prefill_chunk == min(num_prompt, CPU_CHUNK)


@pytest.mark.parametrize(
    ("text", "vram_bytes", "num_prompt", "keep", "chunk"),
    [
        (TEXT, 1500 * MIB, 2048, 11, 2048),
        (TEXT, 2 * GIB, 512, 0, 512),
        (TEXT, 2 * GIB, 2048, 0, 256),
        (TEXT, 2 * GIB, 8192, 8, 2048),
        (TEXT_8B, 3 * GIB, 2048, 5, 2048),  # with 6 layers kept it took two passes, and 1.6 times as long as its sums
        (TEXT_8B, 3 * GIB, 8192, 1, 2048),
        (TEXT_8B, 6 * GIB, 2048, 21, 2048),
    ],
)
def test_what_was_measured(text: TextConfig, vram_bytes: int, num_prompt: int, keep: int, chunk: int) -> None:
    made = of_prompt(num_prompt, vram_bytes, text)
    assert (made.keep, made.prefill_chunk) == (keep, chunk)


def most_passes(num_prompt: int, keep: int) -> int:
    """Passes whose uploads the prompt's sums hide, none of them shorter than usual, or as few as the most rows allow.

    Sums of HIDING_CHUNK rows take as long as uploading all layers; of a share of them, as uploading that share.
    """
    hidden = num_prompt * L // (HIDING_CHUNK * (L - keep))
    return max(1, min(hidden, num_prompt // USUAL_CHUNK), -(-num_prompt // MOST_WINDOW_CHUNK))


@pytest.mark.parametrize(("vram_mib", "num_prompt", "keep", "chunk"), [(900, 2048, 10, 1024), (1000, 4096, 4, 1408)])
def test_weights_of_half_the_bytes_are_hidden_by_half_the_rows(
    vram_mib: int, num_prompt: int, keep: int, chunk: int
) -> None:
    made = of_prompt(num_prompt, vram_mib * MIB, quant=Quant.Q4_0)
    assert (made.keep, made.prefill_chunk) == (keep, chunk)


@pytest.mark.parametrize("num_prompt", [7, 300, 700, 2048, 2049, 3000, 8900])
def test_a_windows_passes_are_so_few_that_the_sums_hide_their_uploads(num_prompt: int) -> None:
    keeps = set()
    for vram_mib in range(1000, 3200, 50):
        try:
            made = of_prompt(num_prompt, vram_mib * MIB)
        except DeviceError:
            continue
        assert made.total_bytes <= vram_mib * MIB
        keeps.add(made.keep)
        if made.keep > 1:
            assert -(-num_prompt // made.prefill_chunk) <= most_passes(num_prompt, made.keep)
        if 1 < made.keep < L - 1:
            evenly = -(-num_prompt // most_passes(num_prompt, made.keep + 1))
            rows = -(-evenly // TILE_ROWS) * TILE_ROWS
            with pytest.raises(DeviceError, match="layers resident needs"):
                of_prompt(num_prompt, vram_mib * MIB, keep=made.keep + 1, prefill_chunk=rows, lowers_prefetch=False)
    assert len(keeps) > 8


@pytest.mark.parametrize("keep", [0, 1, 4, 27])
@pytest.mark.parametrize("num_prompt", [2049, 2100, 3000, 5000, 9000])
def test_passes_are_as_few_as_can_be_and_about_as_long(num_prompt: int, keep: int) -> None:
    chunk = of_prompt(num_prompt, None, keep=keep).prefill_chunk
    passes = -(-num_prompt // chunk)
    assert passes == -(-num_prompt // (MOST_WINDOW_CHUNK if keep else MOST_RESIDENT_CHUNK))
    assert chunk % TILE_ROWS == 0 or chunk == num_prompt
    assert chunk - num_prompt / passes < TILE_ROWS


def test_resident_passes_are_as_long_as_there_is_room_for() -> None:
    whole = of_prompt(2048, None, prefill_chunk=256)
    without_table = whole.total_bytes - row(whole, "embeddings")
    for more_rows, chunk in ((0, 256), (256, 512), (512, 768), (768, 1024), (1791, 1024), (1792, 2048)):
        made = of_prompt(2048, without_table + more_rows * row_bytes())
        assert (made.keep, made.prefill_chunk, made.embeddings_on) == (0, chunk, "host"), more_rows


def test_passes_go_before_the_embedding_table() -> None:
    whole = of_prompt(2048, None)
    assert (whole.prefill_chunk, whole.embeddings_on) == (2048, "device")
    assert of_prompt(2048, whole.total_bytes).rows == whole.rows
    made = of_prompt(2048, whole.total_bytes - 1)
    assert (made.keep, made.prefill_chunk, made.embeddings_on) == (0, 2048, "host")


def test_short_resident_passes_are_said() -> None:
    assert of_prompt(2048, 2 * GIB).notes[0] == (
        "the weights fit --vram 2.00 GiB whole with little room beside them: the 2048 tokens of the prompt take 8 "
        "passes of 256 rows"
    )
    assert not short(of_prompt(512, 2 * GIB))
    assert not short(of_prompt(2048, 2 * GIB, prefill_chunk=64)), "as asked"
    assert not short(of_prompt(2048, 2 * GIB, flags=Flags(lays=True)))
    assert not short(of_prompt(2048, 1500 * MIB))
    assert not short(plan(num_prompt=2048, on_gpu=False))
    enough = of_prompt(2048, 2 * GIB).total_bytes + 768 * row_bytes()
    assert not short(of_prompt(2048, enough))
    assert not short(of_prompt(1100, enough)), "cut in two, though there is room for 1024"


def test_short_passes_are_said_where_everything_resident_was_asked_for() -> None:
    least = of_prompt(2048, None, keep=0, prefill_chunk=64)
    made = of_prompt(2048, least.total_bytes - row(least, "embeddings"), keep=0)
    assert "take 32 passes of 64 rows" in made.notes[0]


def test_short_passes_of_a_window_are_said() -> None:
    roomy = of_prompt(8192, None, keep=8, prefill_chunk=128)
    tight = roomy.total_bytes - row(roomy, "embeddings")
    said = next(note for note in of_prompt(8192, tight, keep=8).notes if "passes" in note)
    assert said.startswith("a window of 8 layers leaves little room in --vram ")
    assert said.endswith(": the 8192 tokens of the prompt take 64 passes of 128 rows, and each uploads 20 layers")
    assert not short(of_prompt(8192, tight, keep=8, prefill_chunk=128)), "as asked"


def test_a_window_of_one_layer_has_whatever_passes_there_is_room_for() -> None:
    least = of_prompt(2048, None, keep=1, prefill_chunk=16)
    needed = least.total_bytes - row(least, "embeddings")
    for more_rows, chunk in ((0, 16), (112, 128), (752, 768), (2031, 1024), (2032, 2048)):
        made = of_prompt(2048, needed + more_rows * row_bytes())
        assert (made.keep, made.prefill_chunk) == (1, chunk), more_rows
        assert short(made) is (chunk < USUAL_CHUNK)
    assert row_bytes() * 512 < layer_bytes(), "else another layer would fit"
