"""The steps of the vision tower in plain NumPy and float32, written to be read. Knows no weights' names and no order.

Rows are patches, or tokens of several patches put side by side.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.backends.cpu_rope import rotate
from kestrel_cuda.backends.vision import LAYER_NORM_EPS, Affine, After, PatchPlaces, expand
from kestrel_cuda.config import VisionConfig

Rows = NDArray[np.float32]

QUERY_BLOCK = 64


def layer_norm(x_mk: Rows, weight_k: Rows, bias_k: Rows) -> Rows:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis."""
    centred: Rows = x_mk - np.mean(x_mk, axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    y: Rows = centred * (np.float32(1) / np.sqrt(variance + np.float32(LAYER_NORM_EPS))) * weight_k + bias_k
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


def learned_positions(table_pn: Rows, places: PatchPlaces) -> Rows:
    """The table of side x side entries at the places of a frame: [patches, n].

    Bilinear with corners aligned, in float32, as the reference computes it (transformers, vision_utils.py).
    """
    side = math.isqrt(len(table_pn))
    rows, columns = places.places_m2.T
    (top, bottom), down = places.row_taps_p2[rows].T, places.row_shares_p[rows]
    (left, right), across = places.column_taps_p2[columns].T, places.column_shares_p[columns]
    up, back = np.float32(1) - down, np.float32(1) - across
    resampled: Rows = (
        table_pn[top * side + left] * (up * back)[:, None]
        + table_pn[top * side + right] * (up * across)[:, None]
        + table_pn[bottom * side + left] * (down * back)[:, None]
        + table_pn[bottom * side + right] * (down * across)[:, None]
    )
    return resampled


def patch_angles(places: PatchPlaces) -> tuple[Rows, Rows]:
    """cos and sin [patches, head_dim / 2]: half of the angles by the row, then half by the column."""
    rows, columns = places.places_m2.T
    cos_md, sin_md = (np.concatenate([by[rows], by[columns]], axis=1) for by in (places.cos_pd, places.sin_pd))
    return cos_md, sin_md


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


# What overflows reaches the logits and is refused there, as for the decoder.
_silent = np.errstate(all="ignore")


class CpuVisionSteps:
    """`VisionSteps` in float32 throughout."""

    def patch_dtype(self, vision: VisionConfig) -> DTypeLike:
        return np.float32

    def put_pixels(self, x_mk: Rows, codes_mk: NDArray[np.uint8], values_cv: Rows) -> None:
        x_mk[...] = expand(codes_mk, values_cv, x_mk.shape[1])

    @_silent
    def affine(self, x_mk: Rows, weights: Affine, out_mn: Rows, after: After = After.NOTHING) -> None:
        y_mn = linear(x_mk, weights.weight, weights.bias)
        match after:
            case After.ADD:
                out_mn += y_mn
            case After.GELU_TANH:
                out_mn[...] = gelu_tanh(y_mn)
            case After.GELU_ERF:
                out_mn[...] = gelu_erf(y_mn)
            case After.NOTHING:
                out_mn[...] = y_mn

    @_silent
    def layer_norm(self, h_mk: Rows, weights: Affine, out_mk: Rows) -> None:
        out_mk[...] = layer_norm(h_mk, weights.weight, weights.bias)

    @_silent
    def add_patch_positions(self, h_mn: Rows, table_pn: Rows, places: PatchPlaces) -> None:
        frames_fmn = h_mn.reshape(-1, len(places.places_m2), h_mn.shape[1])
        frames_fmn += learned_positions(table_pn, places)

    @_silent
    def attend_patches(self, qkv_mn: Rows, num_heads: int, places: PatchPlaces, out_mn: Rows) -> None:
        cos_md, sin_md = patch_angles(places)
        frame_rows = len(places.places_m2)
        for begin in range(0, len(qkv_mn), frame_rows):
            frame = slice(begin, begin + frame_rows)
            out_mn[frame] = attend(qkv_mn[frame], num_heads, cos_md, sin_md)
