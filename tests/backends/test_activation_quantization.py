"""Activation codes of the GPU's steps against the CPU's, and what is not finite on its way to the logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import Activation, HeadShape, KvLayer
from tests.backends.arrays import Floats, normal, poisoned_activation, read_codes, rng, sequence_state
from tests.compare import assert_close

Codes = tuple[NDArray[np.int8], Floats]

# At 2 x 10^5 codes and more, the bound of one in 10^4 is far from what chance does to a handful of ties.
NUM_ROWS, NUM_INPUTS = 100, 2048
MAX_SHARE_OFF_BY_ONE = 1e-4


def norm_codes(backend: Backend, x_mk: Floats) -> Codes:
    m, k = x_mk.shape
    weight = 1 + normal(rng(1, k), k, scale=0.3)
    out = poisoned_activation(backend, m + 1, k, quantized=True)
    backend.norm(backend.to_device(x_mk.copy()), backend.to_device(weight), 1e-6, out, m)
    return read_codes(backend, out, m)


def silu_mul_codes(backend: Backend, x_mk: Floats) -> Codes:
    """Gates from a seed, `x_mk` as the other factor."""
    m, k = x_mk.shape
    gate = normal(rng(2, k), m, k, scale=3)
    out = poisoned_activation(backend, m + 1, k, quantized=True)
    backend.silu_mul(backend.to_device(np.hstack([gate, x_mk])), k, out, m)
    return read_codes(backend, out, m)


def attention_codes(backend: Backend, x_mk: Floats) -> Codes:
    """Values of one head a row wide, from `x_mk`: row i is a mean of its first rows."""
    m, k = x_mk.shape
    head_dim = 128
    num_heads = k // head_dim
    heads = HeadShape(num_heads, num_heads, head_dim, k, 2 * k, 1e-6)
    k_hsd = normal(rng(3, k), num_heads, m, head_dim)
    v_hsd = np.ascontiguousarray(x_mk.reshape(m, num_heads, head_dim).transpose(1, 0, 2))
    q = normal(rng(4, k), m, num_heads, head_dim)
    backend.reserve_attention(heads, m, m)
    out: Activation = poisoned_activation(backend, m + 1, k, quantized=True)
    kv = KvLayer(backend.to_device(k_hsd), backend.to_device(v_hsd))
    state = sequence_state(backend, m, 0, head_dim=head_dim)
    backend.attend(backend.to_device(q), kv, heads, state, out, m, m)
    return read_codes(backend, out, m)


STEPS = [norm_codes, silu_mul_codes, attention_codes]


@pytest.mark.cuda
@pytest.mark.parametrize("step", STEPS)
def test_codes_of_both_backends_are_equal_but_for_ties(
    cuda_backend: Backend, cpu_backend: Backend, step: Callable[[Backend, Floats], Codes]
) -> None:
    x = normal(rng(5), NUM_ROWS, NUM_INPUTS)
    (codes, scales), (expected_codes, expected_scales) = step(cuda_backend, x), step(cpu_backend, x)
    difference = np.abs(codes.astype(np.int16) - expected_codes)
    assert difference.max() <= 1
    share = np.count_nonzero(difference) / difference.size
    print(f"{step.__name__}: {share:.2e} of the codes are off by one")
    assert share <= MAX_SHARE_OFF_BY_ONE
    assert_close(scales, expected_scales, max_nmse=1e-11)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_norm_carries_what_is_not_finite_to_every_scale_of_its_row(backend: Backend, bad: float) -> None:
    x = normal(rng(6), 3, 160)
    x[1, 70] = bad
    with np.errstate(invalid="ignore"):
        _, scales = norm_codes(backend, x)
    assert np.isfinite(scales[[0, 2]]).all()
    # An infinity has an infinite square, so the rest of its row becomes 0; its own group tells.
    groups = slice(None) if np.isnan(bad) else 70 // 32
    assert not np.isfinite(scales[1, groups]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_silu_mul_carries_what_is_not_finite_to_the_scale_of_its_group(backend: Backend, bad: float) -> None:
    x = normal(rng(7), 3, 160)
    clean_codes, clean_scales = silu_mul_codes(backend, x)
    x[1, 70] = bad
    codes, scales = silu_mul_codes(backend, x)
    assert np.argwhere(~np.isfinite(scales)).tolist() == [[1, 2]]
    others = np.ones(scales.shape, bool)
    others[1, 2] = False
    assert (scales[others] == clean_scales[others]).all()
    assert (codes[np.repeat(others, 32, axis=1)] == clean_codes[np.repeat(others, 32, axis=1)]).all()


def test_codes_never_reach_minus_128(backend: Backend) -> None:
    codes, _ = silu_mul_codes(backend, normal(rng(8), 50, 512, scale=1e3))
    assert codes.min() == -127
    assert codes.max() == 127
