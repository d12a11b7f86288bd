"""What tests of `run` with pictures share: the goldens' files, pictures of any size, a folder of frames."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from tests.goldens import ORACLE

IMAGES = ORACLE / "images"
TINY = ORACLE / "checkpoints/tiny-dense-tied"

Run = Callable[..., tuple[int, str, str]]
Ask = Callable[..., dict[str, Any]]
Refuse = Callable[..., str]
Conversation = Callable[[Any], Path]


def picture(path: Path, height: int, width: int, colour: Any = 0, mode: str = "RGB", **options: Any) -> Path:
    Image.new(mode, (width, height), colour).save(path, **options)
    return path


def frames(folder: Path, count: int = 4) -> Path:
    """The golden's clip, or more of it, as a folder."""
    folder.mkdir()
    for number in range(count):
        shutil.copyfile(IMAGES / f"clip_64x64_f{number % 4}.png", folder / f"{number}.png")
    return folder
