"""The vision tower's steps against float64, in every kind of rows that a backend has. Knows no checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.vision import BFLOAT16, LAYER_NORM_EPS, Affine, After, PatchPlaces
from kestrel_cuda.checkpoint.tensor_file import narrow, widen
from kestrel_cuda.config import VisionConfig
from kestrel_cuda.model.patch_positions import frame_places
from kestrel_cuda.step_checks import Check, judge

LINEAR_SHAPES = ((1, 64, 64), (37, 72, 200), (130, 136, 1032))
"""Rows, outputs and inputs."""

NORM_WIDTHS = (64, 1152, 4608)
FRAMES = ((16, 1, 4, 6), (64, 2, 10, 14), (72, 1, 12, 22))
"""Channels of a head, frames, and rows and columns of patches."""

NUM_HEADS, SIDE = 2, 5
FLOAT32, ROUNDED, ROUNDED_TWICE = 1e-11, 2e-5, 2e-4
"""Largest normalized mean square errors: rows of bfloat16 have 8 bits; in its attention rotated rows and weights do
too."""

Doubles = NDArray[np.float64]


def vision_checks(backend: Backend) -> Iterator[Check]:
    """Linears, norms and attention for each kind of rows, and the learned positions."""
    config = _config(64)
    kinds: dict[np.dtype[Any], str] = {np.dtype(np.float32): "float32"}
    if np.dtype(backend.patch_dtype(config)) == BFLOAT16:
        kinds[BFLOAT16] = "bfloat16"
    for kind, name in kinds.items():
        rng = np.random.default_rng(11)
        yield _check_linears(backend, rng, kind, f"vision linears, {name} rows")
        yield _check_norms(backend, rng, kind, f"vision norms, {name} rows")
        yield _check_attention(backend, rng, kind, f"vision attention, {name} rows")
    yield _check_positions(backend, np.random.default_rng(12))


def _config(head_dim: int) -> VisionConfig:
    return VisionConfig(1, NUM_HEADS * head_dim, NUM_HEADS, 64, 64, 3, 16, 2, 2, SIDE, (), 10000.0)


def _put(backend: Backend, values: NDArray[np.float32], kind: np.dtype[Any]) -> tuple[Any, Doubles]:
    """Rows on the device, and what they hold there."""
    stored = narrow(values) if kind == BFLOAT16 else values
    return backend.to_device(stored), widen(stored).astype(np.float64)


def _poison(backend: Backend, shape: tuple[int, ...], kind: np.dtype[Any]) -> Any:
    nan = np.uint16(0x7FC0) if kind == BFLOAT16 else np.float32("nan")
    return backend.to_device(np.full(shape, nan, kind))


def _error(backend: Backend, array: Any, expected: Doubles) -> float:
    found = widen(backend.to_host(array)).astype(np.float64)
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.sum((found - expected) ** 2) / np.sum(expected**2))


def _activated(x: Doubles, after: After) -> Doubles:
    if after is After.GELU_ERF:
        return np.asarray(x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2)
    if after is After.GELU_TANH:
        return np.asarray(x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2)
    return x


def _check_linears(backend: Backend, rng: np.random.Generator, kind: np.dtype[Any], name: str) -> Check:
    errors = []
    for m, n, k in LINEAR_SHAPES:
        x, x_mk = _put(backend, rng.standard_normal((m, k), dtype=np.float32), kind)
        weight, w_nk = _put(backend, rng.standard_normal((n, k), dtype=np.float32) / np.float32(k**0.5), kind)
        bias_n, before_mn = rng.standard_normal(n, dtype=np.float32), rng.standard_normal((m, n), dtype=np.float32)
        affine = Affine(weight, backend.to_device(bias_n))
        for after in After:
            adds = after is After.ADD
            out = backend.to_device(before_mn) if adds else _poison(backend, (m, n), kind)
            backend.affine(x, affine, out, after)
            expected = _activated(x_mk @ w_nk.T + bias_n, after) + (before_mn if adds else 0)
            errors.append(_error(backend, out, expected))
    return judge(name, errors, FLOAT32 if kind == np.float32 else ROUNDED)


def _check_norms(backend: Backend, rng: np.random.Generator, kind: np.dtype[Any], name: str) -> Check:
    errors = []
    for k in NORM_WIDTHS:
        h = rng.standard_normal((11, k), dtype=np.float32) * np.float32(3) + np.float32(2)
        weight, bias = rng.standard_normal((2, k), dtype=np.float32)
        out = _poison(backend, (11, k), kind)
        backend.layer_norm(backend.to_device(h), Affine(backend.to_device(weight), backend.to_device(bias)), out)
        wide = h.astype(np.float64)
        normed = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + LAYER_NORM_EPS)
        errors.append(_error(backend, out, normed * weight + bias))
    return judge(name, errors, FLOAT32 if kind == np.float32 else ROUNDED)


def _check_attention(backend: Backend, rng: np.random.Generator, kind: np.dtype[Any], name: str) -> Check:
    errors = []
    for head_dim, num_frames, rows, columns in FRAMES:
        n, num_rows = NUM_HEADS * head_dim, num_frames * rows * columns
        qkv, exact_mn = _put(backend, rng.standard_normal((num_rows, 3 * n), dtype=np.float32), kind)
        on_host = frame_places(_config(head_dim), rows, columns)
        out = _poison(backend, (num_rows, n), kind)
        backend.attend_patches(qkv, NUM_HEADS, _on_device(backend, on_host), out)
        frames = [_attention_float64(frame, on_host) for frame in np.split(exact_mn, num_frames)]
        errors.append(_error(backend, out, np.concatenate(frames)))
    return judge(name, errors, FLOAT32 if kind == np.float32 else ROUNDED_TWICE)


def _on_device(backend: Backend, places: PatchPlaces) -> PatchPlaces:
    return PatchPlaces(*(backend.to_device(array) for array in places.arrays()))


def _attention_float64(qkv_mn: Doubles, places: PatchPlaces) -> Doubles:
    """Over one frame; channels i and i + d/2 are a complex number, which a rotation multiplies."""
    m, d = len(qkv_mn), qkv_mn.shape[1] // 3 // NUM_HEADS
    q, k, v = qkv_mn.reshape(m, 3, NUM_HEADS, d).transpose(1, 2, 0, 3)
    turns = (places.cos_pd + 1j * places.sin_pd)[places.places_m2].reshape(m, d // 2)
    q_turned, k_turned = ((x[..., : d // 2] + 1j * x[..., d // 2 :]) * turns for x in (q, k))
    scores = (q_turned @ k_turned.conj().swapaxes(-1, -2)).real / math.sqrt(d)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray((p / p.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(m, -1))


def _check_positions(backend: Backend, rng: np.random.Generator) -> Check:
    """A table finer and coarser than the grid, added to two frames."""
    errors = []
    for rows, columns in ((4, 6), (12, 10), (2, 22)):
        places = frame_places(_config(16), rows, columns)
        table = rng.standard_normal((SIDE * SIDE, 32), dtype=np.float32)
        h = rng.standard_normal((2 * rows * columns, 32), dtype=np.float32)
        h_mn = backend.to_device(h)
        backend.add_patch_positions(h_mn, backend.to_device(table), _on_device(backend, places))
        row, column = places.places_m2.T
        weights = (_shares(rows)[row, :, None] * _shares(columns)[column, None, :]).reshape(-1, SIDE * SIDE)
        errors.append(_error(backend, h_mn, h.astype(np.float64) + np.tile(weights @ table.astype(np.float64), (2, 1))))
    return judge("vision positions", errors, FLOAT32)


def _shares(size: int) -> Doubles:
    """[size, SIDE]: how much of each entry of the table's side a place takes, corners aligned."""
    place = np.arange(size) * (SIDE - 1) / max(size - 1, 1)
    shares: Doubles = np.maximum(0.0, 1 - np.abs(place[:, None] - np.arange(SIDE)))
    return shares
