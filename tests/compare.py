"""Compares two arrays for tests: `nmse`, and the one `assert_close`. Knows nothing of backends or models."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def nmse(actual: ArrayLike, expected: ArrayLike) -> float:
    """Squared error over squared size of `expected`, in float64: 0 when equal, NaN when either holds one."""
    want = np.asarray(expected, np.float64)
    error = float(np.square(np.asarray(actual, np.float64) - want).sum())
    size = float(np.square(want).sum())
    if size == 0:
        return 0.0 if error == 0 else error * float("inf")
    return error / size


def assert_close(
    actual: ArrayLike,
    expected: ArrayLike,
    *,
    max_nmse: float | None = None,
    max_abs: float | None = None,
    what: str = "array",
) -> None:
    """Fails, with the measured error and the worst element, unless every given bound holds.

    Shapes must be equal and every element finite: a NaN never passes.
    """
    if max_nmse is None and max_abs is None:
        raise TypeError("assert_close needs max_nmse, max_abs or both")
    got, want = np.asarray(actual), np.asarray(expected)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if not got.size:
        return
    for side, values in (("actual", got), ("expected", want)):
        num_bad = int((~np.isfinite(values)).sum())
        assert not num_bad, f"{what}: {num_bad} of {values.size} {side} elements are not finite"

    difference = np.abs(got.astype(np.float64) - want.astype(np.float64))
    worst = tuple(int(i) for i in np.unravel_index(int(difference.argmax()), difference.shape))
    measured = nmse(got, want)
    report = (
        f"{what} {got.shape}: NMSE {measured:.3e} (at most {max_nmse}), "
        f"largest difference {difference[worst]:.3e} (at most {max_abs}) "
        f"at {worst}: {got[worst]} against {want[worst]}"
    )
    assert max_nmse is None or measured <= max_nmse, report
    assert max_abs is None or difference[worst] <= max_abs, report
