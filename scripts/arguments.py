"""What scripts take on the command line, refused in one line before anything that takes long. Writes nothing."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from kestrel_cuda.config import Quant
from kestrel_cuda.errors import KestrelError
from kestrel_cuda.paths import shown_path
from kestrel_cuda.sizes import TooLarge, parse_size

_MOST_DIGITS = 18


class Parser(argparse.ArgumentParser):
    """Says what is wrong with an argument in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}\n")


def finish(work: Callable[[argparse.Namespace], int | None], arguments: argparse.Namespace) -> int:
    """The exit status: what `work` returns, or 0; 2 where it refuses, with its one line on stderr."""
    try:
        return work(arguments) or 0
    except KestrelError as error:
        print(error, file=sys.stderr)
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed, and this takes it: pip install {error.name}", file=sys.stderr)
    except OSError as error:
        place = f"{shown_path(Path(error.filename))}: " if isinstance(error.filename, str) else ""
        print(f"{place}{error.strerror or error}; make room, allow it or give another path", file=sys.stderr)
    return 2


def whole(least: int) -> Callable[[str], int]:
    """Whole numbers of at least `least`."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def lengths(text: str) -> list[int]:
    """Whole numbers of at least 1, comma-separated."""
    return [whole(1)(length) for length in text.split(",")]


def number(least: float, most: float, needed: str) -> Callable[[str], float]:
    """Numbers from `least` to `most`; an error says what is `needed`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {needed}")
        return value

    return parse


def quant(text: str) -> Quant:
    try:
        return Quant(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(Quant)}") from None


def size(text: str) -> int:
    try:
        return parse_size(text)
    except TooLarge as error:
        raise argparse.ArgumentTypeError(f"{text!r} is a size {error}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def out_file(text: str) -> Path:
    """The path of a file that can be written; one that exists is left as it is."""
    path = Path(text)
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{shown_path(path)} is a folder; give the path of a file")
        if not path.exists():
            _try_folder(path.parent)
        elif not os.access(path, os.W_OK):
            raise argparse.ArgumentTypeError(f"{shown_path(path)} cannot be written: allow it, or give another path")
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    return path


def out_folder(text: str) -> Path:
    """The path of a folder that can be written, or be made."""
    path = Path(text)
    if not text.strip():
        raise argparse.ArgumentTypeError("the folder's path is blank; give one")
    try:
        _try_folder(next(place for place in (path, *path.absolute().parents) if os.path.lexists(place)))
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    return path


def _try_folder(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder):
        pass


def _unwritable(path: Path, error: Exception) -> argparse.ArgumentTypeError:
    reason = getattr(error, "strerror", None) or error
    return argparse.ArgumentTypeError(f"{shown_path(path)} cannot be written ({reason}); give another path")
