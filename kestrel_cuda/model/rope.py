"""Rotation tables for interleaved multimodal rotary embedding, from (t, h, w) positions. NumPy only, no device.

Angles are float32 products of a float32 position and a float32 frequency, as the reference implementation computes
them. Frequency i belongs to the height axis when i % 3 == 1 and i < 3 * section[1], to the width axis when i % 3 == 2
and i < 3 * section[2], else to the temporal axis (transformers, modeling_qwen3_vl.py, apply_interleaved_mrope).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.config import TextConfig


def text_positions(num_tokens: int, first: int = 0) -> NDArray[np.int64]:
    """Positions [3, num_tokens] of a run of text: the same count on all three axes."""
    return np.broadcast_to(np.arange(first, first + num_tokens), (3, num_tokens))


def frequency_axes(config: TextConfig) -> NDArray[np.int64]:
    """Which axis (0 t, 1 h, 2 w) each of the head_dim / 2 frequencies takes its position from."""
    index = np.arange(config.head_dim // 2)
    axes = np.zeros_like(index)
    for axis in (1, 2):
        axes[(index % 3 == axis) & (index < 3 * config.mrope_section[axis])] = axis
    return axes


def rotation_table(
    config: TextConfig, positions_3s: NDArray[np.integer]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin, float32 [slots, head_dim / 2], of positions [3, slots]."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1) / np.power(np.float32(config.rope_theta), exponent, dtype=np.float32)
    by_axis = positions_3s.astype(np.float32)[frequency_axes(config)]
    angles_sd = np.ascontiguousarray((by_axis * frequencies[:, None]).T)
    return np.cos(angles_sd), np.sin(angles_sd)
