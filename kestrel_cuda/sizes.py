"""Byte counts written for people: "24GiB" to bytes and back. Knows nothing of what the bytes hold."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {
    "": 1,
    "B": 1,
    "K": 1024,
    "KB": 1000,
    "KIB": 1024,
    "M": 1024**2,
    "MB": 1000**2,
    "MIB": 1024**2,
    "G": 1024**3,
    "GB": 1000**3,
    "GIB": 1024**3,
    "T": 1024**4,
    "TB": 1000**4,
    "TIB": 1024**4,
}
_MOST_BYTES = (1 << 63) - 1  # an int64's, which every interface below counts in
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


_FEWEST_BARE_BYTES = 1 << 16
"""Of what is written without a unit: nothing here is asked for fewer."""


class TooLarge(ValueError):
    """A number beyond what anything here can count; the message goes on from "... holds ..., "."""


def parse_size(text: str) -> int:
    """Bytes of a size like `6GiB`, `500MB`, `24G` (binary) or `1048576`.

    Raises ValueError when the text is not a positive number with a known unit, TooLarge when no count holds it.
    """
    match = _SIZE.fullmatch(text)
    unit = match and _UNITS.get(match[2].upper())
    if not match or not unit:
        raise ValueError(f"{text!r} is not a size; write a number with a unit, like 6GiB or 500MB")
    exact = Decimal(match[1]) * unit
    if exact > _MOST_BYTES:
        raise TooLarge("which is over 8 EiB")
    num_bytes = int(exact)
    if num_bytes < 1:
        raise ValueError(f"{text!r} is not a size above zero")
    if not match[2] and (num_bytes != exact or num_bytes < _FEWEST_BARE_BYTES):
        raise ValueError(f"{text!r} lacks a unit; write a number with one, like {match[1]}GiB")
    return num_bytes


def format_size(num_bytes: int) -> str:
    """A byte count in the largest binary unit that leaves at least one whole, with two decimals."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def enough_size(num_bytes: int) -> str:
    """A size to write after a flag: whole MiB, or KiB below 16 of them, rounded up."""
    name, unit = ("MiB", 1 << 20) if num_bytes >= 16 << 20 else ("KiB", 1 << 10)
    return f"{-(-num_bytes // unit)}{name}"
