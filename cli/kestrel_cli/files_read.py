"""Which files a run reads, so that it writes over none of them. Opens no file."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kestrel_cli import options
from kestrel_cli.prompt import Prompt
from kestrel_cli.settings import Setting, Settings

_FILES: tuple[Setting[Any], ...] = (options.PROMPT_FILE, options.MESSAGES)
_FOLDERS: tuple[Setting[Any], ...] = (options.MODEL, options.STRIP_CACHE)


def files_read(settings: Settings, prompt: Prompt, stdin: BinaryIO | None) -> Iterator[tuple[str, os.stat_result]]:
    """Every file that is there, with what names it: prompt, profile, pictures and videos, checkpoint, packed weights.

    Logits of an earlier run beside a checkpoint are no part of it.
    """
    if stdin is not None and (status := _status_of_stream(stdin)):
        yield "standard input", status
    for setting in _FILES:
        if settings[setting] is not None:
            yield from _at(settings[setting], settings.label(setting))
    profile = settings[options.PROFILE]
    if profile is not None:
        yield from _at(Path(profile), settings.label(options.PROFILE))
    for visual in prompt.visuals:
        label = _label(settings, options.IMAGE if visual.kind == "image" else options.VIDEO)
        for path in (visual.path,) if isinstance(visual.path, str) else visual.path:
            yield from _at(Path(path), label)
    for setting in _FOLDERS:
        if settings[setting] is not None:
            yield from _at(settings[setting], settings.label(setting), levels=2, but=".npz")


def _label(settings: Settings, setting: Setting[tuple[str, ...]]) -> str:
    """A flag, a variable or a conversation names pictures."""
    return settings.label(setting if settings[setting] else options.MESSAGES)


def _at(path: Path, label: str, levels: int = 1, but: str | None = None) -> Iterator[tuple[str, os.stat_result]]:
    """A file, or those in a folder so many levels down, without those that end in `but`."""
    try:
        # What a name cannot hold is for its reader to say.
        status = path.stat()
        if path.is_dir():
            inside = [entry for entry in path.iterdir() if entry.suffix != but] if levels else []
        else:
            inside = []
            yield label, status
    except (OSError, ValueError):
        return
    for entry in inside:
        yield from _at(entry, label, levels - 1, but)


def _status_of_stream(stream: BinaryIO) -> os.stat_result | None:
    try:
        return os.fstat(stream.fileno())
    except (OSError, io.UnsupportedOperation):
        return None
