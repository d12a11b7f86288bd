"""Pictures and videos as a user names them. Opens no file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from kestrel_cuda.checkpoint.files import printable
from kestrel_cuda.errors import InputError
from kestrel_cuda.paths import shown_path

VisualKind: TypeAlias = Literal["image", "video"]

_URL = re.compile(r"(?i)((https?|ftps?|file|s3|gs|hf|data):|[a-z][a-z0-9+.-]*://)")


@dataclass(frozen=True)
class VisualSource:
    """A picture's file, or a video: its file, a folder of its frames, or the files of its frames in order.

    `fps` is the rate of given frames, or how many a second to take of a video file; `min_pixels` and `max_pixels` are
    limits of this picture alone. None leaves each to the caller and the checkpoint.
    """

    kind: VisualKind
    path: str | tuple[str, ...]
    fps: float | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


def refuse_url(path: str) -> None:
    """Raise InputError for a URL, which is no path."""
    if is_url(path):
        refuse_ambiguous(path, Path())
        raise InputError(f"{printable(path)} is a URL, and only files are read; download it and give the file's path")


def refuse_ambiguous(url: str, folder: Path) -> None:
    """Raise InputError for a URL that is the name of a file in `folder` too."""
    if os.path.lexists(folder / url):
        raise InputError(f"{shown_path(url)} reads as a URL, and is the name of a file too; write ./{url} for it")
