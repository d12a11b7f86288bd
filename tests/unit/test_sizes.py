"""Sizes as people write them, to bytes and back."""

from __future__ import annotations

import pytest

from kestrel_cuda.sizes import TooLarge, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1048576", 1 << 20),
        ("1B", 1),
        ("6GiB", 6 << 30),
        ("24G", 24 << 30),
        ("500MB", 500_000_000),
        ("1.5gib", 3 << 29),
        (" 2 KiB ", 2048),
        ("3T", 3 << 40),
        ("9223372036854775807", (1 << 63) - 1),
        ("9007199254740993", (1 << 53) + 1),
        ("0.1000000000000000000000000000000000000001KB", 100),
    ],
)
def test_a_number_with_a_unit_is_that_many_bytes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "0", "0.2B", "-1GiB", "1e3", "GiB", "6 GiB 7", "6XB", "٦GiB", "inf", "1,5GiB"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["1.5", " 24.25 ", "6", "24576"])
def test_part_of_a_byte_or_a_few_lack_their_unit(text: str) -> None:
    with pytest.raises(ValueError, match="lacks a unit"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000 + "GiB", "8388608TiB"])
def test_what_no_count_holds_is_refused(text: str) -> None:
    with pytest.raises(TooLarge, match="over 8 EiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1 << 20, "1.00 MiB"),
        (5 << 30, "5.00 GiB"),
        (3 << 40, "3.00 TiB"),
        (5000 << 40, "5000.00 TiB"),
    ],
)
def test_bytes_are_written_in_the_largest_unit_that_leaves_a_whole(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text
