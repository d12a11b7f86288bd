"""Rows of the key-value cache in int8: codes with one float16 scale for 32 channels, in NumPy. Knows no layers.

This is the definition of `--kv q8`. A row is what a float16 cache would hold of one slot and kv head: a key after norm
and rotation, or a value. In every group of 32 channels along head_dim

    scale = float16(min(amax / 127, 515.5)), nearest even, subnormals kept
    code = rint(x * (1 / scale)), nearest even, clamped to +-127; scale 0 gives 0

which is the rule of activations (quant/grouped.py) but for the scale, rounded before the codes are computed from it. So
32 values take 34 bytes. What is read back is float16(code * scale), and attention goes on with that as with the entries
of a float16 cache: it is one whose entries were rounded further, and its results depend on nothing that those do not.

515.5 is the largest scale whose 127-fold is finite in float16: larger entries saturate, at 65472. An error is half a
scale at most, or 3.8e-6 where the scale is subnormal. A NaN makes its group's scale NaN, and so reaches the logits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.quant.grouped import ACTIVATION_GROUP

KV_GROUP = ACTIVATION_GROUP
"""Channels that share a scale."""

LARGEST_KV_SCALE = np.float32(515.5)


def quantize_kv(x_hsd: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Codes [..., d] and scales [..., d / 32] of float32 rows [..., d]; d divides by 32."""
    *outer, d = x_hsd.shape
    x = np.ascontiguousarray(x_hsd, np.float32).reshape(*outer, d // KV_GROUP, KV_GROUP)
    exact = np.abs(x).max(axis=-1) / np.float32(127)
    scales = np.where(exact > LARGEST_KV_SCALE, LARGEST_KV_SCALE, exact).astype(np.float16)
    wide = scales.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        inverse = np.float32(1) / np.where(wide == 0, np.float32(1), wide)
        codes = np.clip(np.rint(x * inverse[..., None]), -127, 127)
    is_code = (wide != 0) & ~np.isnan(wide)
    return np.where(is_code[..., None], codes, 0).astype(np.int8).reshape(x_hsd.shape), scales


def dequantize_kv(codes_hsd: NDArray[np.int8], scales_hsg: NDArray[np.float16]) -> NDArray[np.float16]:
    """The float16 entries [..., d] that codes [..., d] and scales [..., d / 32] stand for."""
    codes = codes_hsd.reshape(*scales_hsg.shape, KV_GROUP).astype(np.float32)
    values = (codes * scales_hsg.astype(np.float32)[..., None]).astype(np.float16)
    return values.reshape(codes_hsd.shape)
