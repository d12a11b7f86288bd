"""Where the patches of a picture lie: their order, their learned positions and their rotation. NumPy alone.

Patches come in the order of the pixel rows: the merge_size x merge_size patches of one token are neighbours, tokens
run by rows. Everything is of one frame; the frames of a video lie alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.config import VisionConfig


def patch_places(config: VisionConfig, num_rows: int, num_columns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column of each patch [patches] of a grid, in the order of the pixel rows."""
    size = config.merge_size
    rows, columns = np.indices((num_rows, num_columns))

    def by_token(places: NDArray[np.int64]) -> NDArray[np.int64]:
        tokens = places.reshape(num_rows // size, size, num_columns // size, size)
        return tokens.transpose(0, 2, 1, 3).ravel()

    return by_token(rows), by_token(columns)


def learned_positions(
    config: VisionConfig, table_mn: NDArray[np.float32], num_rows: int, num_columns: int
) -> NDArray[np.float32]:
    """The learned table of position_side x position_side entries resampled to a grid: [patches, hidden].

    Bilinear with corners aligned: the first patch gets the first entry, the last one the last, whether the grid is
    finer than the table or coarser. In float32, as the reference computes it (transformers, vision_utils.py).
    """
    rows, columns = patch_places(config, num_rows, num_columns)
    side = config.position_side
    top, bottom, down = _taps(rows, num_rows, side)
    left, right, across = _taps(columns, num_columns, side)
    up, back = np.float32(1) - down, np.float32(1) - across
    resampled: NDArray[np.float32] = (
        table_mn[top * side + left] * (up * back)[:, None]
        + table_mn[top * side + right] * (up * across)[:, None]
        + table_mn[bottom * side + left] * (down * back)[:, None]
        + table_mn[bottom * side + right] * (down * across)[:, None]
    )
    return resampled


def _taps(
    index: NDArray[np.int64], size: int, side: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """The two entries of a table's side that place `index` of `size` lies between, and the share of the second."""
    place = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    first = place.astype(np.int64)
    return first, np.minimum(first + 1, side - 1), place - first.astype(np.float32)


def patch_rotation(
    config: VisionConfig, num_rows: int, num_columns: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin, float32 [patches, head_dim / 2]: half of the angles by the row, then half by the column."""
    spatial = config.head_dim // 2
    exponent = np.arange(0, spatial, 2, dtype=np.float32) / np.float32(spatial)
    frequencies = np.float32(1) / np.power(np.float32(config.rope_theta), exponent, dtype=np.float32)
    places = [axis.astype(np.float32)[:, None] for axis in patch_places(config, num_rows, num_columns)]
    angles_md = np.concatenate([place * frequencies for place in places], axis=1)
    return np.cos(angles_md), np.sin(angles_md)
