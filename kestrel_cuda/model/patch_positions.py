"""Where the patches of a picture lie: their order, their learned positions and their rotation. NumPy alone.

Patches come in the order of the pixel rows: the merge_size x merge_size patches of one token are neighbours, tokens
run by rows. Everything is of one frame; the frames of a video lie alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.vision import PatchPlaces
from kestrel_cuda.config import VisionConfig


def patch_places(config: VisionConfig, num_rows: int, num_columns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column of each patch [patches] of a grid, in the order of the pixel rows."""
    size = config.merge_size
    rows, columns = np.indices((num_rows, num_columns))

    def by_token(places: NDArray[np.int64]) -> NDArray[np.int64]:
        tokens = places.reshape(num_rows // size, size, num_columns // size, size)
        return tokens.transpose(0, 2, 1, 3).ravel()

    return by_token(rows), by_token(columns)


def frame_places(config: VisionConfig, num_rows: int, num_columns: int) -> PatchPlaces:
    """The places of a frame's patches, and what each place means, as host arrays."""
    row_taps_p2, row_shares_p = _taps(num_rows, config.position_side)
    column_taps_p2, column_shares_p = _taps(num_columns, config.position_side)
    return PatchPlaces(
        np.stack(patch_places(config, num_rows, num_columns), axis=1).astype(np.int32),
        row_taps_p2,
        row_shares_p,
        column_taps_p2,
        column_shares_p,
        *_angles(config, max(num_rows, num_columns)),
    )


def _taps(size: int, side: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The two entries of a table's side that each of `size` places lies between [size, 2], the share of the second.

    Corners are aligned: the first place gets the first entry, the last one the last, whether the grid is finer than
    the table or coarser. In float32, as the reference computes it (transformers, vision_utils.py).
    """
    place = np.arange(size, dtype=np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    first = place.astype(np.int32)
    return np.stack([first, np.minimum(first + 1, side - 1)], axis=1), place - first.astype(np.float32)


def _angles(config: VisionConfig, num_places: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin of the angles of a place on either axis, float32 [places, head_dim / 4]."""
    spatial = config.head_dim // 2
    exponent = np.arange(0, spatial, 2, dtype=np.float32) / np.float32(spatial)
    frequencies = np.float32(1) / np.power(np.float32(config.rope_theta), exponent, dtype=np.float32)
    angles_pd = np.arange(num_places, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles_pd), np.sin(angles_pd)
