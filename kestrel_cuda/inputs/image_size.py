"""To which size a picture is resized and how many tokens it becomes. Arithmetic only; opens no picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kestrel_cuda.config import ImageProcessorConfig
from kestrel_cuda.errors import InputError, SettingError

MAX_ASPECT_RATIO = 200
MAX_TOKENS = 262_144
"""The most tokens that limits may allow a picture: as many positions as the model family has."""


class LimitNames(NamedTuple):
    """What messages call the limits, and where those come from that are not chosen.

    `image_tokens` is None where a limit cannot be given in tokens.
    """

    min_pixels: str = "--min-pixels"
    max_pixels: str = "--max-pixels"
    image_tokens: str | None = "--image-tokens"
    least_otherwise: str = "the checkpoint"
    most_otherwise: str = "the checkpoint"


FLAGS = LimitNames()


@dataclass(frozen=True)
class ImageSize:
    """A picture as the vision tower gets it: pixels after the resize, patches, tokens."""

    height: int
    width: int
    grid_thw: tuple[int, int, int]
    num_tokens: int


def image_size(height: int, width: int, rules: ImageProcessorConfig, where: str = "the picture") -> ImageSize:
    """What a picture of `height` x `width` pixels becomes. Raises InputError for one too long for its width."""
    check_aspect_ratio(height, width, where)
    resized = smart_resize(height, width, 1, 1, rules)
    return size_of(1, *resized, rules)


def size_of(grid_t: int, height: int, width: int, rules: ImageProcessorConfig) -> ImageSize:
    grid_h, grid_w = height // rules.patch_size, width // rules.patch_size
    return ImageSize(height, width, (grid_t, grid_h, grid_w), grid_t * grid_h * grid_w // rules.merge_size**2)


def check_aspect_ratio(height: int, width: int, where: str, given_hw: tuple[int, int] | None = None) -> None:
    """Raise InputError, which calls the picture `where`, unless its sides are within the reference's bound.

    `given_hw` is the size that a message shows, where it is not this one.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        given_height, given_width = given_hw or (height, width)
        raise InputError(
            f"{where} is {given_height} x {given_width} pixels (height x width), one side {ratio:.6g} times the other; "
            f"at most {MAX_ASPECT_RATIO} times is taken: crop it or pad it"
        )


def smart_resize(
    height: int, width: int, num_frames: int, num_padded_frames: int, rules: ImageProcessorConfig
) -> tuple[int, int]:
    """The reference's rule, `round` to even halves included; the limits hold over all frames of a video."""
    factor = rules.factor
    resized = round(height / factor) * factor, round(width / factor) * factor
    area = num_padded_frames * resized[0] * resized[1]
    if area > rules.max_pixels:
        scale = math.sqrt(num_frames * height * width / rules.max_pixels)
        return (
            max(factor, math.floor(height / scale / factor) * factor),
            max(factor, math.floor(width / scale / factor) * factor),
        )
    if area < rules.min_pixels:
        scale = math.sqrt(rules.min_pixels / (num_frames * height * width))
        return math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    return resized


def with_limits(
    rules: ImageProcessorConfig,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    image_tokens: int | None = None,
    names: LimitNames = FLAGS,
) -> ImageProcessorConfig:
    """`rules` with the limits that a user chose; `image_tokens` is `max_pixels` counted in tokens.

    Raises SettingError, which calls them by `names`, for limits that leave no size to take.
    """
    per_token = rules.pixels_per_token
    if max_pixels is not None and image_tokens is not None:
        raise SettingError(
            f"{names.max_pixels} and {names.image_tokens} contradict each other: both say how large a picture may be"
        )
    most, most_from, raised = None, names.most_otherwise, names.max_pixels
    if image_tokens is not None:
        assert names.image_tokens is not None
        _check_range(names.image_tokens, image_tokens, 1, MAX_TOKENS, "one token")
        most, most_from, raised = image_tokens * per_token, names.image_tokens, names.image_tokens
    elif max_pixels is not None:
        _check_range(names.max_pixels, max_pixels, per_token, MAX_TOKENS * per_token, "one token's pixels")
        most, most_from = max_pixels, names.max_pixels
    elif names.image_tokens is not None:
        raised = f"{names.max_pixels} or {names.image_tokens}"
    if min_pixels is not None:
        _check_range(names.min_pixels, min_pixels, 1, MAX_TOKENS * per_token, "one pixel")
    chosen = replace(
        rules,
        min_pixels=rules.min_pixels if min_pixels is None else min_pixels,
        max_pixels=rules.max_pixels if most is None else most,
    )
    if chosen.min_pixels > chosen.max_pixels:
        least_from = names.least_otherwise if min_pixels is None else names.min_pixels
        raise SettingError(
            f"pictures are to have {chosen.min_pixels} pixels at least ({least_from}) and {chosen.max_pixels} at most "
            f"({most_from}); lower {names.min_pixels}, or raise {raised}"
        )
    return chosen


def halving_tokens(height: int, width: int, rules: ImageProcessorConfig) -> int | None:
    """The largest --image-tokens at which a picture takes at most half its tokens.

    None where no limit of at least `min_pixels` does that.
    """
    return fitting_tokens([(height, width)], image_size(height, width, rules).num_tokens // 2, rules)


def fitting_tokens(sizes_hw: Sequence[tuple[int, int]], most: int, rules: ImageProcessorConfig) -> int | None:
    """The largest --image-tokens at which pictures that take more than `most` tokens together take at most that.

    None where no limit of at least `min_pixels` does that.
    """
    least = math.ceil(rules.min_pixels / rules.pixels_per_token)

    def num_tokens(limited: ImageProcessorConfig) -> int:
        return sum(image_size(height, width, limited).num_tokens for height, width in sizes_hw)

    def fits(image_tokens: int) -> bool:
        return num_tokens(replace(rules, max_pixels=image_tokens * rules.pixels_per_token)) <= most

    # Tokens never fall as the limit grows, and at `high` nothing is limited that is not limited now.
    low, high = max(1, least), max(num_tokens(rules) + 2, rules.max_pixels // rules.pixels_per_token + 1)
    if not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check_range(flag: str, value: int, least: int, most: int, least_is: str) -> None:
    if not least <= value <= most:
        raise SettingError(f"{flag} is {value}; it takes a whole number from {least} ({least_is}) to {most}")
