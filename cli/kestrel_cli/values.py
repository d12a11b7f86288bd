"""One setting's text to its value: pure functions that return it or raise ValueError. Knows no names of settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from kestrel_cuda.config import LEAST_FPS, MOST_FPS
from kestrel_cuda.sizes import TooLarge, parse_size

_DIGITS = re.compile(r"[0-9]+")
_DECIMAL = re.compile(r"[0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18}")
_MOST_DIGITS = 18  # what an int64 holds, whatever they are

Word = TypeVar("Word", bound=str)
Item = TypeVar("Item")


def number(text: str) -> int:
    """A whole number in plain digits: no sign, no blanks, no digits of other scripts."""
    if not _DIGITS.fullmatch(text):
        raise ValueError(text)
    if len(text) > _MOST_DIGITS:
        raise TooLarge(f"which has more than {_MOST_DIGITS} digits")
    return int(text)


def at_least(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from `least` on. Raises ValueError for a smaller one."""

    def parse(text: str) -> int:
        value = number(text)
        if value < least:
            raise ValueError(text)
        return value

    return parse


at_least_one = at_least(1)


def one_of(*words: Word) -> Callable[[str], Word]:
    """A parser of exactly these words. Raises ValueError for any other."""

    def parse(text: str) -> Word:
        return words[words.index(text)]

    return parse


def keep(text: str) -> int | None:
    """Layers of the residency window: None for `auto`, 0 for `off`."""
    if text == "auto":
        return None
    return 0 if text == "off" else number(text)


def fixed_keep(text: str) -> int:
    """The same without `auto`."""
    value = keep(text)
    if value is None:
        raise ValueError(text)
    return value


def window_variable(text: str) -> int:
    """A window switch as a variable: digits, blanks around them ignored."""
    return number(text.strip())


def cache_budget(text: str) -> Literal["seeds"] | int:
    return "seeds" if text == "seeds" else parse_size(text)


def token_ids(text: str) -> tuple[int, ...]:
    """`1,2,3`, blanks around the numbers ignored."""
    return tuple(number(part.strip()) for part in text.split(","))


def distinct(parse: Callable[[str], Item]) -> Callable[[str], tuple[Item, ...]]:
    """A parser of `one,two,three`: each item once, in the order of its first mention."""

    def parse_list(text: str) -> tuple[Item, ...]:
        return tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))

    return parse_list


def single(parse: Callable[[str], Item]) -> Callable[[str], tuple[Item, ...]]:
    """A parser of one of several that come each in its own flag."""

    def parse_one(text: str) -> tuple[Item, ...]:
        return (parse(text),)

    return parse_one


def file(text: str) -> Path:
    """The path of a file, `-` for a standard stream. Raises ValueError for one that can only be a folder's."""
    if text.endswith(("/", "/.", "/..")) or text in (".", ".."):
        raise ValueError(text)
    return path(text)


def named_file(text: str) -> Path:
    """The same without `-`."""
    if text == "-":
        raise ValueError(text)
    return file(text)


def input_path(text: str) -> str:
    """A path as it was typed, so that a message shows it so and knows a URL. Raises ValueError as `path` does."""
    expanded = path(text)
    return str(expanded) if text.startswith("~") else text


def frame_rate(text: str) -> float:
    """Frames a second: a plain decimal number within the bounds of any rate."""
    if not _DECIMAL.fullmatch(text) or not LEAST_FPS <= float(text) <= MOST_FPS:
        raise ValueError(text)
    return float(text)


def non_blank(text: str) -> str:
    if not text.strip():
        raise ValueError(text)
    return text


def path(text: str) -> Path:
    """A path, `~` expanded. Raises ValueError for a blank one, which nobody means and nobody sees in a message."""
    if not text.strip() or "\0" in text:
        raise ValueError(text)
    try:
        # A shell does not expand `~` in a profile's value.
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(text) from error
