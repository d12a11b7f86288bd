"""What a command was told on its way, notes and warnings: shown once each as it comes, kept for --json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kestrel_cli.settings import Settings


class Shows(Protocol):
    """Where people read it."""

    def note(self, text: str) -> None: ...

    def warning(self, text: str) -> None: ...


class Heard:
    """Notes and warnings of one command; the same text is heard once."""

    def __init__(self, screen: Shows, settings: Settings) -> None:
        self._screen = screen
        self._settings = settings
        self._notes: list[str] = []
        self._warnings: list[str] = []
        self.add(settings.notes, settings.warnings)

    def add(self, notes: Iterable[str], warnings: Iterable[str]) -> None:
        """What the engine or the settings have to say."""
        for text in notes:
            self.note(text)
        for text in warnings:
            self.warn(text)

    def note(self, text: str) -> None:
        named = self._settings.with_labels(text)
        if named not in self._notes:
            self._notes.append(named)
            self._screen.note(named)

    def warn(self, text: str) -> None:
        named = self._settings.with_labels(text)
        if named not in self._warnings:
            self._warnings.append(named)
            self._screen.warning(named)

    def as_json(self) -> dict[str, list[str]]:
        return {"notes": list(self._notes), "warnings": list(self._warnings)}
