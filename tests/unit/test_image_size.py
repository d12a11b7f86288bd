"""Resize rule, limits, tokens: the reference's own sizes, and what a user's limits make of them (D19 to D21, D25)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from kestrel_cuda.config import ImageProcessorConfig
from kestrel_cuda.errors import InputError, SettingError
from kestrel_cuda.inputs.image_size import (
    MAX_TOKENS,
    LimitNames,
    fitting_tokens,
    halving_tokens,
    image_size,
    with_limits,
)

HALF = (0.5, 0.5, 0.5)
RELEASED = ImageProcessorConfig(65536, 16_777_216, 16, 2, 2, HALF, HALF, 1 / 255)


def limits(min_pixels: int, max_pixels: int) -> ImageProcessorConfig:
    return replace(RELEASED, min_pixels=min_pixels, max_pixels=max_pixels)


@pytest.mark.parametrize(
    ("height", "width", "resized", "grid", "tokens"),
    [
        (1, 1, (256, 256), (16, 16), 64),
        (1, 200, (32, 3648), (2, 228), 114),
        (30, 305, (96, 832), (6, 52), 78),
        (16, 16, (256, 256), (16, 16), 64),
        (224, 224, (256, 256), (16, 16), 64),
        (272, 272, (256, 256), (16, 16), 64),
        (304, 304, (320, 320), (20, 20), 100),
        (336, 336, (320, 320), (20, 20), 100),
        (400, 304, (384, 320), (24, 20), 120),
        (240, 720, (256, 704), (16, 44), 176),
        (480, 640, (480, 640), (30, 40), 300),
        (720, 1280, (704, 1280), (44, 80), 880),
        (1080, 1920, (1088, 1920), (68, 120), 2040),
        (1944, 2592, (1952, 2592), (122, 162), 4941),
        (3024, 4032, (3008, 4032), (188, 252), 11844),
        (4096, 4096, (4096, 4096), (256, 256), 16384),
        (4128, 4096, (4096, 4064), (256, 254), 16256),
        (4320, 7680, (3072, 5440), (192, 340), 16320),
        (15420, 690, (15424, 704), (964, 44), 10604),
    ],
)
def test_released_limits(height: int, width: int, resized: tuple[int, int], grid: tuple[int, int], tokens: int) -> None:
    """D19: multiples of 32 by halves to even; D20: tiny pictures are enlarged; D21: a ratio of 200 is taken."""
    size = image_size(height, width, RELEASED)
    assert (size.height, size.width) == resized
    assert size.grid_thw == (1, *grid)
    assert size.num_tokens == tokens


def test_every_size_of_the_oracle(oracle: Path) -> None:
    table = json.loads((oracle / "extras/image_sizes.json").read_text())
    assert len(table["rows"]) > 150
    rules = {name: limits(**values) for name, values in table["limits"].items()}
    for name, height, width, resized_height, resized_width, tokens in table["rows"]:
        if tokens is None:
            with pytest.raises(InputError):
                image_size(height, width, rules[name])
        else:
            size = image_size(height, width, rules[name])
            found = (size.height, size.width, size.num_tokens)
            assert found == (resized_height, resized_width, tokens), (name, height, width)


@pytest.mark.parametrize(("height", "width", "ratio"), [(1, 201, "201"), (201, 1, "201"), (10, 2001, "200.1")])
def test_a_ratio_over_200_is_refused(height: int, width: int, ratio: str) -> None:
    """D21: one line that names the picture, its size and the ratio."""
    with pytest.raises(InputError) as caught:
        image_size(height, width, RELEASED, "a.png")
    assert str(caught.value) == (
        f"a.png is {height} x {width} pixels (height x width), one side {ratio} times the other; "
        "at most 200 times is taken: crop it or pad it"
    )


def test_a_limit_changes_the_size() -> None:
    """D25."""
    size = image_size(1080, 1920, with_limits(RELEASED, max_pixels=200_000))
    assert (size.height, size.width, size.num_tokens) == (320, 576, 180)
    assert image_size(1080, 1920, with_limits(RELEASED, image_tokens=200)).num_tokens <= 200
    assert with_limits(RELEASED, image_tokens=200) == with_limits(RELEASED, max_pixels=200 * 1024)
    assert image_size(32, 32, with_limits(RELEASED, min_pixels=1)).num_tokens == 1
    assert with_limits(RELEASED) == RELEASED


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        ({"min_pixels": 5000, "max_pixels": 4000}, "5000 pixels at least (--min-pixels) and 4000 at most (--max"),
        ({"max_pixels": 65535}, "65536 pixels at least (the checkpoint) and 65535 at most (--max-pixels); lower"),
        ({"image_tokens": 63}, "65536 pixels at least (the checkpoint) and 64512 at most (--image-tokens)"),
        ({"min_pixels": 16_777_217}, "(--min-pixels) and 16777216 at most (the checkpoint)"),
        ({"max_pixels": 1023}, "--max-pixels is 1023; it takes a whole number from 1024 (one token's pixels) to"),
        ({"max_pixels": MAX_TOKENS * 1024 + 1}, f"to {MAX_TOKENS * 1024}"),
        ({"image_tokens": 0}, "--image-tokens is 0; it takes a whole number from 1 (one token) to 262144"),
        ({"image_tokens": MAX_TOKENS + 1}, "--image-tokens is 262145"),
        ({"min_pixels": 0}, "--min-pixels is 0"),
        ({"min_pixels": 10**18}, "--min-pixels is 1000000000000000000"),
        ({"max_pixels": 2048, "image_tokens": 2}, "--max-pixels and --image-tokens contradict each other"),
    ],
)  # fmt: skip
def test_limits_out_of_range(chosen: dict[str, int], complaint: str) -> None:
    """D25: limits that leave no size are an error."""
    with pytest.raises(SettingError) as caught:
        with_limits(RELEASED, **chosen)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("rules", [RELEASED, limits(4096, 32768), limits(1024, 16384), limits(1, 1_000_000)])
@pytest.mark.parametrize(
    ("height", "width"),
    [(1, 1), (32, 32), (33, 32), (64, 64), (64, 4000), (20, 400), (1, 200), (240, 720), (480, 640), (1000, 999)],
)
def test_half_the_tokens(rules: ImageProcessorConfig, height: int, width: int) -> None:
    """The limit that is named halves them, and the next larger one does not, tried one by one."""
    tokens = image_size(height, width, rules).num_tokens
    least = math.ceil(rules.min_pixels / 1024)
    halving = [
        limit
        for limit in range(max(1, least), tokens + 200)
        if image_size(height, width, with_limits(rules, image_tokens=limit)).num_tokens <= tokens // 2
    ]
    assert halving_tokens(height, width, rules) == max(halving, default=None)


@pytest.mark.parametrize("sizes_hw", [[(300, 500)], [(300, 500), (1000, 40)], [(64, 64), (2000, 2000), (700, 90)]])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_the_limit_that_fits_is_the_largest(sizes_hw: list[tuple[int, int]], share: float) -> None:
    rules = limits(2048, 2_000_000)

    def taken(limited: ImageProcessorConfig) -> int:
        return sum(image_size(height, width, limited).num_tokens for height, width in sizes_hw)

    most = int(share * taken(rules))
    fitting = [tokens for tokens in range(2, 3000) if taken(with_limits(rules, image_tokens=tokens)) <= most]
    assert fitting_tokens(sizes_hw, most, rules) == max(fitting, default=None)


def test_limits_of_another_name() -> None:
    """And of those only what acts is advised."""
    names = LimitNames("min_pixels of a.png", "max_pixels of a.png", None, "--min-pixels", "--image-tokens")
    with pytest.raises(SettingError) as caught:
        with_limits(RELEASED, max_pixels=9999, names=names)
    assert str(caught.value) == (
        "pictures are to have 65536 pixels at least (--min-pixels) and 9999 at most (max_pixels of a.png); "
        "lower min_pixels of a.png, or raise max_pixels of a.png"
    )
    with pytest.raises(SettingError, match=r"16777216 at most \(--image-tokens\); .*, or raise max_pixels of a"):
        with_limits(RELEASED, min_pixels=16_777_217, names=names)
    with pytest.raises(SettingError, match=r"^max_pixels of a\.png is 9; it takes a whole number from 1024"):
        with_limits(RELEASED, max_pixels=9, names=names)
    for chosen, advice in (
        ({"image_tokens": 63}, "--image-tokens"),
        ({"max_pixels": 65_535}, "--max-pixels"),
        ({"min_pixels": 16_777_217}, "--max-pixels or --image-tokens"),
    ):
        with pytest.raises(SettingError, match=rf"; lower --min-pixels, or raise {advice}$"):
            with_limits(RELEASED, **chosen)
