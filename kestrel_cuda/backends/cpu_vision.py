"""The steps of the vision tower in plain NumPy and float32, written to be read. Knows no weights' names and no order.

Rows are patches, or tokens of several patches put side by side.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.cpu import rotate

Rows = NDArray[np.float32]

NORM_EPS = np.float32(1e-6)
"""No checkpoint names it (transformers, modeling_qwen3_vl.py: nn.LayerNorm(..., eps=1e-6))."""

QUERY_BLOCK = 64


def layer_norm(x_mk: Rows, weight_k: Rows, bias_k: Rows) -> Rows:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis."""
    centred: Rows = x_mk - np.mean(x_mk, axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    y: Rows = centred * (np.float32(1) / np.sqrt(variance + NORM_EPS)) * weight_k + bias_k
    return y


def linear(x_mk: Rows, weight_nk: Rows, bias_n: Rows) -> Rows:
    """x @ weight^T + bias."""
    y: Rows = x_mk @ weight_nk.T
    y += bias_n
    return y


def gelu_tanh(x: Rows) -> Rows:
    """The blocks' activation: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    inner = (x + x * x * x * np.float32(0.044715)) * np.float32(math.sqrt(2 / math.pi))
    tanh: Rows = np.tanh(inner)
    y: Rows = x * (tanh + np.float32(1)) * np.float32(0.5)
    return y


def gelu_erf(x: Rows) -> Rows:
    """The mergers' activation: x (1 + erf(x / sqrt(2))) / 2."""
    inner = (x * np.float32(math.sqrt(0.5))).ravel()
    # NumPy has no erf; the standard library's is exact to float64, and the mergers alone use it.
    erf = np.fromiter(map(math.erf, inner.data), np.float32, inner.size).reshape(x.shape)
    y: Rows = x * (erf + np.float32(1)) * np.float32(0.5)
    return y


def attend(qkv_mn: Rows, num_heads: int, cos_md: Rows, sin_md: Rows) -> Rows:
    """Full attention of every row over every row: rotated queries and keys, softmax(q k^T / sqrt(d)) v.

    A row of `qkv_mn` holds queries, keys and values of all heads, in this order; `cos_md` and `sin_md` have an angle
    for each pair of channels (i, i + d/2).
    """
    num_rows = qkv_mn.shape[0]
    q_mhd, k_mhd, v_mhd = (part.reshape(num_rows, num_heads, -1) for part in np.split(qkv_mn, 3, axis=1))
    cos, sin = cos_md[:, None], sin_md[:, None]
    q_hmd = rotate(q_mhd, cos, sin).transpose(1, 0, 2)
    k_hdm = rotate(k_mhd, cos, sin).transpose(1, 2, 0)
    v_hmd = v_mhd.transpose(1, 0, 2)
    scale = np.float32(q_hmd.shape[-1] ** -0.5)
    out_mhd = np.empty_like(q_mhd)
    # Blocks of queries keep the scores linear in the number of rows.
    for begin in range(0, num_rows, QUERY_BLOCK):
        rows = slice(begin, begin + QUERY_BLOCK)
        scores = q_hmd[:, rows] @ k_hdm * scale
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out_mhd[rows] = (p @ v_hmd / p.sum(axis=-1, keepdims=True)).transpose(1, 0, 2)
    return out_mhd.reshape(num_rows, -1)
