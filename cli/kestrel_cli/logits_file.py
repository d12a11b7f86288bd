"""The file that --logits writes: complete under its name, or not there at all. A link is followed to its file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kestrel_cuda.errors import SettingError
from kestrel_cuda.paths import shown_path

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def check_writable(
    path: Path, read: Iterable[tuple[str, os.stat_result]] = (), strip_cache: Path | None = None
) -> None:
    """Refuse a path that cannot be written, before a run is spent on it. Raises SettingError.

    `read` are files that the run reads, each with what names it: none of them is written over. Nothing is written among
    packed weights, in a folder of `strip_cache`.
    """
    with _refusing(path):
        target = _target(path)
        if strip_cache is not None and _target(strip_cache) in target.parent.parents:
            raise SettingError(
                f"--logits {shown_path(path)}: it would lie among packed weights (--strip-cache), where nothing "
                "else may; give another path"
            )
        if target.exists():
            if not target.is_file():
                raise SettingError(
                    f"--logits {shown_path(path)}: not a file; needed: the path of one, or of nothing yet"
                )
            status = target.stat()
            if any(os.path.samestat(status, os.fstat(stream)) for stream in _open_outputs()):
                raise SettingError(
                    f"--logits {shown_path(path)}: the answer and the report are written there; give another path"
                )
            for label, other in read:
                if os.path.samestat(status, other):
                    raise SettingError(
                        f"--logits {shown_path(path)}: the file is part of what the run reads ({label}); "
                        "give another path"
                    )
            # A rename would replace it all the same, as root may: the mode is the owner's word.
            if not status.st_mode & 0o222 or not os.access(target, os.W_OK):
                raise SettingError(
                    f"--logits {shown_path(path)}: the file is read-only; give another, or make it writable"
                )
        temporary = _temporary(target)
        temporary.touch(exist_ok=False)
        temporary.unlink()


def _open_outputs() -> Iterator[int]:
    """Standard output and standard error, those that are open."""
    for stream in (1, 2):
        try:
            os.fstat(stream)
        except OSError:
            continue
        yield stream


def save(path: Path, prompt_logits: NDArray[np.float32], step_logits: NDArray[np.float32]) -> None:
    """Write both arrays under a temporary name, then rename. Raises SettingError when the disk refuses."""
    import numpy as np

    with _refusing(path):
        target = _target(path)
        temporary = _temporary(target)
        try:
            with temporary.open("xb") as file:
                np.savez(file, prompt_logits=prompt_logits, step_logits=step_logits)
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingError(
            f"--logits {shown_path(path)}: cannot be written: {error.strerror}; {_advice(error)}"
        ) from error
    except RuntimeError as error:
        # What pathlib makes of a ring of links.
        raise SettingError(f"--logits {shown_path(path)}: cannot be written: {error}; give another path") from error


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.ENOENT:
            return "make its folder first, or give another path"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "give a path in a folder that can be written"
        case errno.ENOSPC | errno.EDQUOT:
            return "make room, or give a path elsewhere"
        case errno.EFBIG:
            return "raise the limit on the size of a file (ulimit -f)"
        case _:
            return "give another path"


def _target(path: Path) -> Path:
    return path.resolve()


def _temporary(target: Path) -> Path:
    # In the same folder, since a rename does not cross file systems; short, since the name may be as long as allowed.
    return target.with_name(f".kestrel-{os.getpid()}-{os.urandom(4).hex()}.part")
