"""Weights and activations to codes and scales: the definition on cases worked by hand, and the reference's samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from kestrel_cuda.checkpoint.reader import open_checkpoint
from kestrel_cuda.config import Quant
from kestrel_cuda.quant.grouped import (
    GroupedWeight,
    GroupScheme,
    NonFiniteWeightError,
    OversizedScaleError,
    dequantize,
    quantize,
    quantize_activations,
    round_half_away,
    scheme_for,
)

Q8, Q4, G256 = GroupScheme(8, 32), GroupScheme(4, 32), GroupScheme(8, 256)
SMALLEST_NORMAL = 2.0**-126


def group(*first: float, size: int = 32) -> NDArray[np.float32]:
    """One row of one group that begins with the given weights; the rest is zero."""
    row = np.zeros((1, size), np.float32)
    row[0, : len(first)] = first
    return row


def codes_of(row: NDArray[np.float32], scheme: GroupScheme, count: int) -> list[int]:
    return [int(code) for code in quantize(row, scheme).codes_nk[0, :count]]


def assert_zeros(weight: GroupedWeight) -> None:
    assert not weight.codes_nk.any()
    assert not weight.scales_ng.any()


class TestRounding:
    @pytest.mark.parametrize(
        ("value", "rounded"),
        [
            (0.5, 1), (-0.5, -1), (1.5, 2), (-1.5, -2), (2.5, 3), (-2.5, -3), (126.5, 127), (0.25, 0),
            # One below a half: adding a half first would round the sum up to 1.
            (np.nextafter(np.float32(0.5), np.float32(0)), 0),
            (-np.nextafter(np.float32(0.5), np.float32(0)), 0),
            (8388609.0, 8388609),
        ],
    )  # fmt: skip
    def test_halves_go_away_from_zero(self, value: float, rounded: int) -> None:
        assert round_half_away(np.array([value], np.float32))[0] == rounded

    def test_a_negative_fraction_stays_a_zero(self) -> None:
        assert round_half_away(np.array([-0.25], np.float32))[0] == 0


class TestEightBits:
    def test_codes_are_nearest_multiples_of_the_largest_over_127(self) -> None:
        row = group(127, 0.5, -0.5, 1.5, -1.5, 2.5, 63.25, -127)
        assert codes_of(row, Q8, 9) == [127, 1, -1, 2, -2, 3, 63, -127, 0]
        assert quantize(row, Q8).scales_ng[0, 0] == 1

    def test_the_largest_magnitude_may_be_negative(self) -> None:
        assert codes_of(group(3, -127), Q8, 2) == [3, -127]

    def test_codes_go_by_the_scale_before_it_is_rounded(self) -> None:
        # d = 1.0004 is stored as 1; 62.5 / 1.0004 rounds to 62, 62.5 / 1 to 63.
        weight = quantize(group(np.float32(127) * np.float32(1.0004), 62.5), Q8)
        assert weight.scales_ng[0, 0] == 1
        assert list(weight.codes_nk[0, :2]) == [127, 62]

    def test_the_product_with_the_inverse_decides_not_the_quotient(self) -> None:
        # A tie of w / d that w * (1 / d) misses, or the other way round, is where two right-looking versions part.
        amax = np.float32(1)
        d = amax / np.float32(127)
        halves = ((np.arange(127) + np.float32(0.5)) * d).astype(np.float32)
        by_product, by_quotient = round_half_away(halves * (np.float32(1) / d)), round_half_away(halves / d)
        parted = np.flatnonzero(by_product != by_quotient)
        assert parted.size, "no such weight among these halves"
        for w, code in zip(halves[parted], by_product[parted], strict=True):
            assert codes_of(group(1, w), Q8, 2) == [127, int(code)]

    def test_one_scale_for_256(self) -> None:
        row = np.zeros((1, 512), np.float32)
        row[0, [0, 255, 256, 511]] = [127, 1, 254, 1]
        weight = quantize(row, G256)
        assert list(weight.scales_ng[0]) == [1, 2]
        assert list(weight.codes_nk[0, [0, 255, 256, 511]]) == [127, 1, 127, 1]


class TestFourBits:
    def test_the_largest_magnitude_becomes_minus_eight(self) -> None:
        weight = quantize(group(-8, 7, 7.6, 0.5, -0.5, -0.51, 0.49, -7.5), Q4)
        assert weight.scales_ng[0, 0] == 1
        assert list(weight.codes_nk[0, :9]) == [-8, 7, 7, 1, 0, -1, 0, -7, 0]

    def test_a_positive_largest_makes_the_scale_negative(self) -> None:
        weight = quantize(group(8, -7, 1, -1), Q4)
        assert weight.scales_ng[0, 0] == -1
        assert list(weight.codes_nk[0, :4]) == [-8, 7, -1, 1]
        assert list(dequantize(weight)[0, :4]) == [8, -7, 1, -1]

    @pytest.mark.parametrize(("pair", "scale", "codes"), [((4, -4), -0.5, [-8, 7]), ((-4, 4), 0.5, [-8, 7])])
    def test_the_first_of_equals_gives_the_sign(
        self, pair: tuple[float, float], scale: float, codes: list[int]
    ) -> None:
        weight = quantize(group(0, *pair), Q4)
        assert weight.scales_ng[0, 0] == scale
        assert list(weight.codes_nk[0, 1:3]) == codes


@pytest.mark.parametrize("scheme", [Q8, Q4, G256])
class TestEveryScheme:
    def test_a_zero_group_gives_zeros(self, scheme: GroupScheme) -> None:
        row = np.zeros((2, 2 * scheme.group_size), np.float32)
        row[0, -1] = 1
        weight = quantize(row, scheme)
        assert np.isfinite(weight.scales_ng).all()
        assert not weight.codes_nk[0, : scheme.group_size].any()
        assert not weight.codes_nk[1].any()
        assert list(weight.scales_ng[:, 0]) == [0, 0]
        assert weight.num_lost_groups == 0

    def test_negative_zeros_are_zeros(self, scheme: GroupScheme) -> None:
        weight = quantize(np.full((1, scheme.group_size), -0.0, np.float32), scheme)
        assert_zeros(weight)
        assert not np.signbit(weight.scales_ng).any()
        assert weight.num_lost_groups == 0

    def test_a_scale_below_the_smallest_normal_counts_as_zero(self, scheme: GroupScheme) -> None:
        largest = np.float32(127 if scheme.bits == 8 else 8) * np.float32(SMALLEST_NORMAL)
        below = largest * np.float32(1 - 2.0**-20)
        # Just below: no codes. At the limit: codes, though the stored scale is zero all the same.
        weight = quantize(group(below, size=scheme.group_size), scheme)
        assert_zeros(weight)
        assert weight.num_lost_groups == 1
        weight = quantize(group(largest, size=scheme.group_size), scheme)
        assert weight.codes_nk[0, 0] == (127 if scheme.bits == 8 else -8)
        assert weight.num_lost_groups == 1

    def test_groups_whose_stored_scale_is_zero_are_counted(self, scheme: GroupScheme) -> None:
        steps = 127 if scheme.bits == 8 else 8
        # 2^-24 is the smallest float16; half of it ties to the even zero, a little more does not.
        scales = [2.0**-24, 2.0**-25, 2.0**-25 * 1.01, 2.0**-30, 0.0, 2.0**-140, 1.0]
        row = np.zeros((1, len(scales) * scheme.group_size), np.float32)
        row[0, :: scheme.group_size] = np.array(scales) * steps
        weight = quantize(row, scheme)
        assert [abs(float(s)) for s in weight.scales_ng[0]] == [2.0**-24, 0, 2.0**-24, 0, 0, 0, 1]
        assert weight.num_lost_groups == 3

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_weight_that_is_not_finite_is_refused(self, scheme: GroupScheme, bad: float) -> None:
        row = np.ones((3, 2 * scheme.group_size), np.float32)
        row[1, -1] = bad
        with pytest.raises(NonFiniteWeightError):
            quantize(row, scheme)

    def test_a_scale_over_the_largest_float16_is_refused(self, scheme: GroupScheme) -> None:
        steps = np.float32(127 if scheme.bits == 8 else 8)
        weight = quantize(group(np.float32(65504) * steps, size=scheme.group_size), scheme)
        assert abs(weight.scales_ng[0, 0]) == 65504
        with pytest.raises(OversizedScaleError, match="65504"):
            quantize(group(np.float32(65505) * steps, size=scheme.group_size), scheme)
        with pytest.raises(OversizedScaleError):
            quantize(group(3e38, size=scheme.group_size), scheme)

    def test_a_short_last_group_is_filled_with_zeros(self, scheme: GroupScheme) -> None:
        k = scheme.group_size + 5
        full = np.random.Generator(np.random.Philox(3)).standard_normal((4, k), dtype=np.float32)
        short = quantize(full, scheme)
        assert short.codes_nk.shape == (4, 2 * scheme.group_size)
        assert short.scales_ng.shape == (4, 2)
        assert short.num_inputs == k
        assert not short.codes_nk[:, k:].any()
        padded = quantize(np.pad(full, ((0, 0), (0, 2 * scheme.group_size - k))), scheme)
        assert (short.codes_nk == padded.codes_nk).all()
        assert (short.scales_ng == padded.scales_ng).all()
        assert dequantize(short).shape == (4, k)

    def test_codes_stay_in_range_and_values_near(self, scheme: GroupScheme) -> None:
        random = np.random.Generator(np.random.Philox([4, scheme.bits]))
        w = (random.standard_normal((16, 512)) * 10.0 ** random.integers(-3, 3, (16, 512))).astype(np.float32)
        weight = quantize(w, scheme)
        low, high = (-127, 127) if scheme.bits == 8 else (-8, 7)
        assert weight.codes_nk.min() >= low
        assert weight.codes_nk.max() <= high
        assert weight.codes_nk.dtype == np.int8
        assert (weight.scales_ng == weight.scales_ng.astype(np.float16)).all()
        # Half a step, a whole one where the positive end of int4 is cut off; and the scale's own rounding.
        step = np.repeat(np.abs(weight.scales_ng), scheme.group_size, axis=1)
        amax = np.repeat(np.abs(w).reshape(16, -1, scheme.group_size).max(axis=-1), scheme.group_size, axis=1)
        allowed = step * (0.501 if scheme.bits == 8 else 1.001) + amax * 2.0**-10
        assert (np.abs(dequantize(weight) - w) <= allowed).all()


class TestActivations:
    def test_halves_go_to_even(self) -> None:
        codes, scales = quantize_activations(group(127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.25))
        assert list(codes[0, :9]) == [127, 0, 2, 2, 0, -2, -2, 3, 0]
        assert scales[0, 0] == 1

    def test_groups_are_32_wide_and_the_scale_is_not_rounded(self) -> None:
        x = np.zeros((2, 70), np.float32)
        x[0, [0, 32, 69]] = [1, -2, 3]
        codes, scales = quantize_activations(x)
        assert codes.shape == (2, 96)
        assert (scales[0] == np.array([1, 2, 3], np.float32) / np.float32(127)).all()
        assert list(codes[0, [0, 32, 69]]) == [127, -127, 127]
        assert not codes[1].any()
        assert not scales[1].any()
        assert not codes[:, 70:].any()

    def test_a_scale_below_the_smallest_normal_gives_zeros(self) -> None:
        limit = np.float32(127) * np.float32(SMALLEST_NORMAL)
        codes, scales = quantize_activations(group(np.nextafter(limit, np.float32(0))))
        assert not codes.any()
        assert scales[0, 0] == 0
        codes, scales = quantize_activations(group(limit))
        assert codes[0, 0] == 127
        assert scales[0, 0] == np.float32(SMALLEST_NORMAL)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_reaches_the_scale_of_its_group_alone(self, bad: float) -> None:
        x = np.ones((2, 64), np.float32)
        x[0, 40] = bad
        _, scales = quantize_activations(x)
        assert (~np.isfinite(scales)).tolist() == [[False, True], [False, False]]


class TestWhichScheme:
    @pytest.mark.parametrize(
        ("quant", "num_inputs", "scheme"),
        [
            (Quant.NONE, 512, None),
            (Quant.Q8_0, 544, Q8),
            (Quant.Q4_0, 256, Q4),
            (Quant.G256, 512, G256),
            (Quant.G256, 256, G256),
            (Quant.G256, 544, Q8),
            (Quant.G256, 96, Q8),
        ],
    )
    def test_g256_holds_only_where_the_inputs_divide(
        self, quant: Quant, num_inputs: int, scheme: GroupScheme | None
    ) -> None:
        assert scheme_for(quant, num_inputs) == scheme


def assert_equal_codes(actual: ArrayLike, expected: ArrayLike) -> None:
    assert np.asarray(actual).shape == np.asarray(expected).shape
    assert np.count_nonzero(np.asarray(actual) != np.asarray(expected)) == 0


@pytest.mark.parametrize("name", ["tiny-28L", "tiny-dense-tied", "tiny-dense-untied-sharded"])
def test_equal_to_the_reference_to_the_last_bit(oracle: Path, name: str) -> None:
    checkpoint = open_checkpoint(oracle / "checkpoints" / name)
    with np.load(oracle / "golden" / name / "quant_samples.npz") as samples:
        tensors = sorted({key.rsplit("/", 1)[0] for key in samples})
        assert len(tensors) == 10
        for key in tensors:
            kind, tensor = key.split("/")
            data = checkpoint.tensor(checkpoint.lm_head_name if tensor == "lm_head.weight" else tensor).data
            values = (data.astype(np.uint32) << 16).view(np.float32) if data.dtype == np.uint16 else data
            weight = quantize(values.astype(np.float32), {"q8_0": Q8, "q4_0": Q4}[kind])
            assert_equal_codes(weight.codes_nk, samples[f"{key}/codes"])
            assert_equal_codes(weight.scales_ng.view(np.uint32), samples[f"{key}/scales"].view(np.uint32))
