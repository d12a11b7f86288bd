"""The comparison that every other test rests on: it must fail when it should."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compare import assert_close, nmse


def test_nmse_is_squared_error_over_squared_size() -> None:
    assert nmse([1.0, 3.0], [1.0, 2.0]) == pytest.approx(1 / 5)
    assert nmse([0.0], [0.0]) == 0
    assert nmse([1e-30], [0.0]) == np.inf


def test_nmse_sums_in_float64() -> None:
    # 1e5 squared plus 1 is lost in float32.
    expected = np.full(1000, 1e5, np.float32)
    actual = expected.copy()
    actual[0] += 0.0078125
    assert nmse(actual, expected) == pytest.approx(0.0078125**2 / 1e13)


def test_bounds_are_inclusive_and_both_hold() -> None:
    assert_close([1.5], [1.0], max_abs=0.5, max_nmse=0.25)
    with pytest.raises(
        AssertionError, match=r"largest difference 5\.000e-01 \(at most 0\.4\) at \(0,\): 1\.5 against 1"
    ):
        assert_close([1.5], [1.0], max_abs=0.4, max_nmse=1)
    with pytest.raises(AssertionError, match=r"logits \(1,\): NMSE 2\.500e-01 \(at most 0\.2\)"):
        assert_close([1.5], [1.0], max_nmse=0.2, what="logits")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_never_passes(bad: float) -> None:
    with pytest.raises(AssertionError, match="1 of 2 actual elements are not finite"):
        assert_close([bad, 1.0], [bad, 1.0], max_abs=np.inf)
    with pytest.raises(AssertionError, match="1 of 2 expected elements are not finite"):
        assert_close([1.0, 1.0], [bad, 1.0], max_nmse=np.inf)


def test_shapes_are_never_broadcast() -> None:
    with pytest.raises(AssertionError, match=r"shape \(2,\), expected \(1, 2\)"):
        assert_close([1.0, 2.0], [[1.0, 2.0]], max_abs=1)


def test_a_bound_is_required() -> None:
    with pytest.raises(TypeError, match="max_nmse"):
        assert_close([1.0], [1.0])
