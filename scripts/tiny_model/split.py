"""Which generated things belong to training and which are held out: decided by what they are, not by when they come."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

HELD_OUT_SHARE = 8
"""One content in this many is held out."""

T = TypeVar("T")


class Split(StrEnum):
    """The two sides; no content is on both."""

    TRAIN = "train"
    HELD_OUT = "held-out"


def split_of(content: object) -> Split:
    """The side that a content is on. `content` is what makes two items the same: a word, two summands, a layout."""
    digest = hashlib.blake2s(repr(content).encode(), digest_size=4).digest()
    return Split.HELD_OUT if int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0 else Split.TRAIN


class ExhaustedError(Exception):
    """Nothing of what was drawn is on the side that was asked for: too little was left open."""


def draw_until(
    split: Split, draw: Callable[[], T], content: Callable[[T], object] = lambda drawn: drawn, most: int = 100
) -> T:
    """The first of `draw`'s results whose content is on the side of `split`. Raises ExhaustedError after `most`."""
    for _ in range(most):
        drawn = draw()
        if split_of(content(drawn)) is split:
            return drawn
    raise ExhaustedError
