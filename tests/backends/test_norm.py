"""RMSNorm of rows against float64, plain and quantized."""

from __future__ import annotations

import numpy as np
import pytest

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.quant.grouped import quantize_activations
from tests.backends.arrays import (
    Doubles,
    Floats,
    assert_same_bits,
    normal,
    poison,
    poisoned_activation,
    read_codes,
    read_values,
    rng,
)
from tests.compare import assert_close

SIZES = [1, 31, 64, 100, 256, 1000, 2048, 5120]


def expected_norm(x: Floats, weight: Floats, eps: float) -> Doubles:
    wide = x.astype(np.float64)
    return weight * wide / np.sqrt(np.square(wide).mean(axis=-1, keepdims=True) + np.float32(eps))


def norm(backend: Backend, x: Floats, weight: Floats, eps: float) -> Floats:
    m, k = x.shape
    out = poisoned_activation(backend, m + 1, k, quantized=False)
    h = backend.to_device(np.vstack([x, poison((1, k))]))
    backend.norm(h, backend.to_device(weight.copy()), eps, out, m)
    return read_values(backend, out, m)


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_rows_against_float64(backend: Backend, cpu_backend: Backend, k: int, eps: float) -> None:
    random = rng(k)
    x, weight = normal(random, 9, k, scale=3), 1 + normal(random, k, scale=0.3)
    actual = norm(backend, x, weight, eps)
    assert_close(actual, expected_norm(x, weight, eps), max_nmse=1e-13, what="norm")
    if backend.name != "cpu":
        assert_close(actual, norm(cpu_backend, x, weight, eps), max_nmse=1e-9, what="norm against the CPU")


@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1e-3, 1e4, 1e15])
def test_tiny_and_huge_rows(backend: Backend, scale: float) -> None:
    random = rng(1)
    x, weight = normal(random, 3, 512, scale=scale), normal(random, 512, scale=5)
    actual, expected = norm(backend, x, weight, 1e-6), expected_norm(x, weight, 1e-6)
    unit = np.abs(expected).max()
    assert_close(actual / unit, expected / unit, max_nmse=1e-13, what=f"rows of size {scale}")


def test_one_large_channel(backend: Backend) -> None:
    x, weight = normal(rng(2), 4, 2048), np.ones(2048, np.float32)
    x[:, 77] = 3e4
    actual, expected = norm(backend, x, weight, 1e-6), expected_norm(x, weight, 1e-6)
    others = np.arange(2048) != 77
    assert_close(actual[:, others], expected[:, others], max_nmse=1e-13, what="channels beside it")


def test_a_row_of_zeros_gives_zeros(backend: Backend) -> None:
    x = normal(rng(3), 3, 96)
    x[1] = 0
    actual = norm(backend, x, np.ones(96, np.float32), 1e-6)
    assert not actual[1].any()
    assert np.isfinite(actual).all()


@pytest.mark.parametrize("k", SIZES)
def test_quantized_is_the_plain_result_quantized(backend: Backend, k: int) -> None:
    random = rng(4, k)
    m = 5
    x, weight = normal(random, m, k), 1 + normal(random, k, scale=0.3)
    x[3, k // 2 :] = 0
    x[4] = 0
    out = poisoned_activation(backend, m + 1, k, quantized=True)
    h = backend.to_device(np.vstack([x, poison((1, k))]))
    backend.norm(h, backend.to_device(weight), 1e-6, out, m)
    codes, scales = read_codes(backend, out, m)
    expected_codes, expected_scales = quantize_activations(norm(backend, x, weight, 1e-6))
    assert (codes == expected_codes).all()
    assert_same_bits(scales, expected_scales, "scales")


def test_a_row_has_the_same_bits_in_every_batch(backend: Backend) -> None:
    random = rng(5)
    x, weight = normal(random, 70, 640), normal(random, 640)
    together = norm(backend, x, weight, 1e-6)
    for row in (0, 1, 33, 69):
        assert_same_bits(norm(backend, x[row : row + 1], weight, 1e-6), together[row : row + 1], f"row {row} alone")
