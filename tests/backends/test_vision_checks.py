"""The checks of the vision tower's steps: what they say of a sound backend, and of one that is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.vision import After
from kestrel_cuda.vision_checks import vision_checks


def test_a_sound_backend_passes(backend: Backend) -> None:
    checks = list(vision_checks(backend))
    kinds = 1 if backend.name == "cpu" else 2
    assert len(checks) == 3 * kinds + 1
    assert all(check.passed for check in checks), [check.detail for check in checks]
    assert len({check.name for check in checks}) == len(checks)


@pytest.mark.parametrize(
    ("step", "check"),
    [
        ("affine", "vision linears"),
        ("layer_norm", "vision norms"),
        ("attend_patches", "vision attention"),
        ("add_patch_positions", "vision positions"),
    ],
)
def test_a_step_that_is_wrong_in_one_row_is_named(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, step: str, check: str
) -> None:
    """One row of each result is another's."""
    sound = getattr(backend, step)

    def wrong(*arguments: Any) -> None:
        sound(*arguments)
        rows = arguments[0] if step == "add_patch_positions" else arguments[3 if step == "attend_patches" else 2]
        if len(rows) > 1:
            backend.copy(rows[-1:], rows[:1])

    monkeypatch.setattr(backend, step, wrong)
    failed = [found.name for found in vision_checks(backend) if not found.passed]
    assert failed
    assert all(name.startswith(check) for name in failed)


def test_the_activations_are_told_apart(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 rows; rounded to 8 bits they are the same."""
    sound = backend.affine
    swapped = {After.GELU_ERF: After.GELU_TANH}
    monkeypatch.setattr(
        backend,
        "affine",
        lambda x, weights, out, after=After.NOTHING: sound(x, weights, out, swapped.get(after, after)),
    )
    linears = next(vision_checks(backend))
    assert not linears.passed
    assert linears.name == "vision linears, float32 rows"
    assert np.isfinite(float(linears.detail.split()[2]))
