"""How a prompt is cut into passes over the layers. Arithmetic only; knows no memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kestrel_cuda.quant.packed import round_up

MOST_RESIDENT_CHUNK, MOST_WINDOW_CHUNK = 2048, 5632
"""Most prompt rows a pass on a GPU. Resident ones gain by length: 2048 tokens of 2B take an H200 21 ms in one pass and
33 to 35 in passes of 512 rows. A window uploads layers once a pass, so that its passes are longer: up to twice those of
HIDING_CHUNK, since half as long ones would not hide their uploads."""

CPU_CHUNK = 512

USUAL_CHUNK, RESIDENT_CHUNK, LEAST_CHUNK = 1024, 256, 16
"""Rows a pass that room is kept for before layers: in a window at least the usual; with everything resident, where
tokens cost least by far, less; a window of one layer may do with the least. What memory is left over then lengthens
the passes, up to the most."""

TILE_ROWS = 128
"""Long passes are whole tiles of a linear."""

HIDING_CHUNK, HIDING_BYTES = 2800, 34 / 32
"""Rows a pass whose sums take about as long as uploading every layer at so many bytes a weight: both grow with the
weights, so it is a ratio of the tensor cores' rate to the link's. For 8B in q8_0 an H200 takes 88 ms for 2048 rows and
131 ms to upload all layers over 54.6 GB/s, which makes 3050 rows; for 2B 21.4 and 26.6, which makes 2550."""


def hiding_chunk(num_prompt: int, share: float, bytes_per_weight: float) -> int:
    """Rows of so few passes that the prompt's sums hide the uploads of all of them.

    Every pass uploads the same `share` of the layers, however few rows it has.
    """
    hiding = HIDING_CHUNK * share * bytes_per_weight / HIDING_BYTES
    num_passes = max(1, num_prompt // max(USUAL_CHUNK, math.ceil(hiding)))
    return even_chunk(num_prompt, min(MOST_WINDOW_CHUNK, -(-num_prompt // num_passes)))


def even_chunk(num_prompt: int, most: int) -> int:
    """Rows of the fewest passes of at most `most` rows, as even as whole tiles allow."""
    if most < TILE_ROWS:
        return most
    num_passes = -(-num_prompt // most)
    return round_up(-(-num_prompt // num_passes), TILE_ROWS)


def lengths(most: int) -> Iterator[int]:
    """Rows a pass to try for room, the most first: whole tiles, then halves of one."""
    chunk = most
    while chunk >= LEAST_CHUNK:
        yield chunk
        chunk = chunk - TILE_ROWS if chunk > TILE_ROWS else chunk // 2
