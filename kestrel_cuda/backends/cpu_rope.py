"""The rotation of queries and keys in NumPy, as text and pictures share it. Knows no positions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rotate(x: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rotary embedding with pairs (i, i + d/2): x * cos + rotate_half(x) * sin."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
