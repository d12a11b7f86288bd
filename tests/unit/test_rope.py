"""Rotation tables: which frequency follows which axis, and the angles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kestrel_cuda.checkpoint.config_json import read_config
from kestrel_cuda.config import TextConfig
from kestrel_cuda.model.rope import frequency_axes, rotation_table, text_positions
from tests.compare import assert_close
from tests.plans import TEXT as RELEASED

TINY = [replace(RELEASED, head_dim=2 * sum(s), mrope_section=s) for s in ((6, 5, 5), (12, 10, 10), (4, 2, 2))]


def test_axes_of_the_released_models() -> None:
    axes = frequency_axes(RELEASED)
    assert axes.shape == (64,)
    assert np.flatnonzero(axes == 1).tolist() == list(range(1, 60, 3))
    assert np.flatnonzero(axes == 2).tolist() == list(range(2, 60, 3))
    assert np.flatnonzero(axes == 0).tolist() == [*range(0, 60, 3), 60, 61, 62, 63]


@pytest.mark.parametrize("config", [RELEASED, *TINY])
def test_each_axis_has_as_many_frequencies_as_its_section(config: TextConfig) -> None:
    assert np.bincount(frequency_axes(config), minlength=3).tolist() == list(config.mrope_section)


@pytest.mark.parametrize("config", [RELEASED, *TINY])
def test_text_is_plain_rotary_embedding(config: TextConfig) -> None:
    cos, sin = rotation_table(config, text_positions(300))
    inverse = config.rope_theta ** (-2 * np.arange(config.head_dim // 2) / config.head_dim)
    angles = np.arange(300)[:, None] * inverse
    assert cos.dtype == sin.dtype == np.float32
    assert cos.flags.c_contiguous
    assert_close(cos, np.cos(angles), max_abs=3e-5, what="cos")
    assert_close(sin, np.sin(angles), max_abs=3e-5, what="sin")


def test_an_axis_moves_its_own_frequencies_alone() -> None:
    """A picture's position (t, h, w), as in an image of 8 x 22 tokens that starts at 4."""
    base, _ = rotation_table(RELEASED, np.array([[4], [4], [4]]))
    for axis in range(3):
        positions = np.full((3, 1), 4)
        positions[axis] += 3
        moved, _ = rotation_table(RELEASED, positions)
        changed = np.flatnonzero((moved != base)[0])
        assert set(frequency_axes(RELEASED)[changed]) == {axis}
    picture, _ = rotation_table(RELEASED, np.array([[4], [11], [25]]))
    angles = np.array([4, 11, 25])[frequency_axes(RELEASED)] * 5e6 ** (-np.arange(64) / 64)
    assert_close(picture[0], np.cos(angles), max_abs=3e-6)


def test_far_positions_stay_within_float32_angles() -> None:
    cos, sin = rotation_table(RELEASED, text_positions(4, first=262_000))
    angles = np.arange(262_000, 262_004)[:, None] * 5e6 ** (-np.arange(64) / 64)
    assert_close(cos, np.cos(angles), max_abs=0.05)
    assert_close(cos**2 + sin**2, np.ones_like(cos), max_abs=1e-6)


def test_text_positions_are_the_goldens(oracle: Path) -> None:
    paths = sorted(oracle.glob("golden/*/text-*.npz"))
    assert paths
    for path in paths:
        with np.load(path) as golden:
            position_ids, delta = golden["position_ids"][:, 0], int(golden["rope_deltas"][0, 0])
        num_tokens = position_ids.shape[1]
        assert np.array_equal(text_positions(num_tokens), position_ids), path
        assert np.array_equal(text_positions(3, first=num_tokens), np.tile(np.arange(3) + num_tokens + delta, (3, 1)))


def test_a_part_of_the_table_is_the_table_of_the_part(oracle: Path) -> None:
    """What chunks of a prompt and single tokens rest on."""
    config = read_config(oracle / "checkpoints/tiny-28L/config.json").text
    whole = rotation_table(config, text_positions(50))
    part = rotation_table(config, text_positions(13, first=37))
    for of_whole, of_part in zip(whole, part, strict=True):
        assert np.array_equal(of_whole[37:], of_part)
