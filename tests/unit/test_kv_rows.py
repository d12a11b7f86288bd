"""Rows of an int8 cache against their definition: the scale rounded first, halves to even, and where values run out."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from kestrel_cuda.quant.kv_rows import KV_GROUP, LARGEST_KV_SCALE, dequantize_kv, quantize_kv


def rows(*groups: dict[int, float]) -> np.ndarray:
    """One row of groups that are zero but for the given channels."""
    x = np.zeros((1, KV_GROUP * len(groups)), np.float32)
    for number, group in enumerate(groups):
        for channel, value in group.items():
            x[0, number * KV_GROUP + channel] = value
    return x


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape, dtype=np.float32)


def test_shapes() -> None:
    codes, scales = quantize_kv(normal(2, 5, 128))
    assert (codes.shape, codes.dtype, scales.shape, scales.dtype) == ((2, 5, 128), np.int8, (2, 5, 4), np.float16)
    values = dequantize_kv(codes, scales)
    assert (values.shape, values.dtype) == ((2, 5, 128), np.float16)


def test_codes_are_the_nearest_of_the_stored_scale() -> None:
    """In exact arithmetic; a code beside a tie may go either way, as its product is rounded in float32."""
    x = normal(40, 64) * np.float32(3)
    codes, scales = quantize_kv(x)
    for row, row_codes, row_scales in zip(x, codes, scales, strict=True):
        for channel, value in enumerate(row):
            exact = Fraction(float(value)) / Fraction(float(row_scales[channel // KV_GROUP]))
            assert abs(exact - int(row_codes[channel])) <= Fraction(1, 2) + Fraction(1, 1 << 16)


def test_the_scale_is_rounded_before_the_codes_are_computed() -> None:
    """127 * 1.0004 / 127 lies between the halves 1 and 1 + 2^-10 and is stored as 1; 63.5 / 1.0004 would be 63."""
    codes, scales = quantize_kv(rows({0: 127 * 1.0004, 1: 63.51}))
    assert scales.tolist() == [[1.0]]
    assert codes[0, :2].tolist() == [127, 64]


def test_halves_go_to_even() -> None:
    codes, scales = quantize_kv(rows({0: 127, 1: 0.5, 2: 1.5, 3: 2.5, 4: -0.5, 5: -1.5, 6: -2.5}))
    assert scales.tolist() == [[1.0]]
    assert codes[0, :7].tolist() == [127, 0, 2, 2, 0, -2, -2]


def test_groups_do_not_meet() -> None:
    x = normal(3, 96)
    codes, scales = quantize_kv(x)
    x[:, 32:64] *= 1000
    others, other_scales = quantize_kv(x)
    assert (codes[:, [*range(32), *range(64, 96)]] == others[:, [*range(32), *range(64, 96)]]).all()
    assert (scales[:, [0, 2]] == other_scales[:, [0, 2]]).all()
    assert (scales[:, 1] != other_scales[:, 1]).all()


def test_what_is_read_back_is_within_half_a_scale() -> None:
    x = normal(200, 128)
    codes, scales = quantize_kv(x)
    steps = np.repeat(scales.astype(np.float64), KV_GROUP, axis=-1)
    # Beside the rounding of the code, that of the entry to float16.
    assert (np.abs(dequantize_kv(codes, scales) - x.astype(np.float64)) <= steps * 0.5001 + np.abs(x) * 2.0**-11).all()
    assert codes.min() == -127, "-128 is no code"


def test_entries_are_products_rounded_to_float16() -> None:
    codes = np.arange(-127, 129).clip(max=127).astype(np.int8).reshape(1, -1)
    scales = np.array([[1 / 3, 2.0**-24, 515.5, 0, 3e-5, 1.0, 7.7, 0.01]], np.float16)
    values = dequantize_kv(codes, scales).astype(np.float64)
    exact = codes.astype(np.float64).reshape(-1, KV_GROUP) * scales.astype(np.float64).reshape(-1, 1)
    assert (values.reshape(-1, KV_GROUP) == exact.astype(np.float16)).all()
    assert np.isfinite(values).all()


@pytest.mark.parametrize("loud", [7e4, 1e6, 3e38, np.inf, -np.inf])
def test_what_a_half_cannot_hold_saturates(loud: float) -> None:
    codes, scales = quantize_kv(rows({3: loud, 4: 1000}))
    assert scales[0, 0] == LARGEST_KV_SCALE
    assert codes[0, 3] == np.sign(loud) * 127
    assert codes[0, 4] == 2
    assert dequantize_kv(codes, scales)[0, 3] == np.sign(loud) * 65472


def test_the_largest_scale_is_the_last_that_stays_finite() -> None:
    after = np.nextafter(np.float16(LARGEST_KV_SCALE), np.float16(np.inf))
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(np.float32(127) * np.float32(after)))
    assert np.isfinite(np.float16(np.float32(127) * LARGEST_KV_SCALE))


def test_a_nan_takes_its_group_with_it_and_no_other() -> None:
    x = normal(1, 64)
    x[0, 40] = np.nan
    codes, scales = quantize_kv(x)
    values = dequantize_kv(codes, scales)
    assert np.isfinite(values[0, :32]).all()
    assert np.isnan(values[0, 32:]).all()


def test_what_is_too_small_for_a_scale_is_zero() -> None:
    codes, scales = quantize_kv(rows({0: 3.7e-6}, {0: 3.9e-6}, {}))
    assert scales.tolist() == [[0, 2.0**-24, 0]]
    assert codes[0, [0, 32]].tolist() == [0, 65]
    assert not codes[0, 64:].any()


def test_small_rows_lose_little() -> None:
    """Where the scale is subnormal, its own rounding shows: the largest entries may saturate."""
    x = normal(50, 32) * np.float32(1e-4)
    assert np.abs(dequantize_kv(*quantize_kv(x)) - x.astype(np.float64)).max() <= 3.8e-6
