"""Paths as messages show them. Knows no file."""

from __future__ import annotations

from pathlib import Path


def shown_path(path: Path | str) -> str:
    """A path as it is; in quotes where it would not be seen, or not be seen whole: blanks around it, line ends."""
    text = str(path)
    return text if text and text.isprintable() and text == text.strip() else repr(text)
