"""The tests' own float64 model against the goldens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.compare import assert_close
from tests.reference import text_logits


@pytest.mark.parametrize("name", ["tiny-dense-tied", "tiny-dense-untied-sharded", "tiny-28L"])
def test_reference_is_the_oracle(oracle: Path, name: str) -> None:
    with np.load(oracle / "golden" / name / "text-system.npz") as golden:
        logits_sv = text_logits(oracle / "checkpoints" / name, golden["input_ids"].tolist())
        assert_close(logits_sv, golden["logits"], max_abs=1e-3, what=name)
