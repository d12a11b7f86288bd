"""The file that --logits writes: complete under its name, or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kestrel_cuda.errors import SettingError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written, before a run is spent on it. Raises SettingError."""
    if path.exists() and not path.is_file():
        raise SettingError(f"--logits {path}: not a file; needed: the path of one, or of nothing yet")
    with _refusing(path):
        temporary = _temporary(path)
        temporary.touch(exist_ok=False)
        temporary.unlink()


def save(path: Path, prompt_logits: NDArray[np.float32], step_logits: NDArray[np.float32]) -> None:
    """Write both arrays under a temporary name, then rename. Raises SettingError when the disk refuses."""
    import numpy as np

    with _refusing(path):
        temporary = _temporary(path)
        try:
            with temporary.open("xb") as file:
                np.savez(file, prompt_logits=prompt_logits, step_logits=step_logits)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingError(f"--logits {path}: cannot be written: {error.strerror}") from error


def _temporary(path: Path) -> Path:
    # In the same folder: a rename does not cross file systems.
    return path.with_name(f".{path.name}.{os.getpid()}.part")
