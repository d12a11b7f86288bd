"""Standard output and plain lines on standard error: every byte a command writes without Rich goes through here.

Knows what a closed pipe or a full disk does to a stream; knows nothing of what is written.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from typing import TextIO

from kestrel_cuda.errors import UserError

PROGRAM = "kestrel-cuda"

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class StdoutClosed(Exception):
    """Nobody reads standard output any more, so there is nothing left to do and nobody to tell."""


class Output:
    """What a command prints on standard output: text as it comes, or with `as_json` exactly one object."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._object_written = False

    def text(self, text: str) -> None:
        """Write and flush a piece of text; nothing with --json, whose object holds all of it."""
        if text and not self.as_json:
            _write(sys.stdout, text)

    def model_text(self, text: str) -> None:
        """The same for text that a model wrote: a terminal is shown its control characters, and obeys none."""
        self.text(text.translate(_CONTROLS) if sys.stdout.isatty() else text)

    def result(self, result: dict[str, object]) -> None:
        """Write the object of --json; nothing without it."""
        if self.as_json and not self._object_written:
            self._object_written = True
            _write(sys.stdout, json.dumps(result) + "\n")

    def error(self, kind: str, message: str) -> None:
        """The one line of an error, and with --json its object unless the command has already written one.

        Where standard output does not take the object, the line says so. Raises StdoutClosed.
        """
        line = message
        try:
            self.result({"error": error_object(kind, message)})
        except UserError as error:
            line = f"{message} ({error})"
        finally:
            error_line(f"{PROGRAM}: {line}\n")


def error_object(kind: str, message: str) -> dict[str, str]:
    return {"kind": kind, "message": message}


def error_line(text: str) -> None:
    """Write on standard error, where a failure has nobody left to hear of it."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


class LossyStderr(io.TextIOBase):
    """Standard error as a file for Rich: what its reader does not take is dropped, and the run goes on."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute here, the class a property
        return sys.stderr.encoding

    def write(self, text: str) -> int:
        error_line(text)
        return len(text)

    def isatty(self) -> bool:
        return sys.stderr.isatty()

    def fileno(self) -> int:
        return sys.stderr.fileno()


def prepare_streams() -> None:
    """Make both streams fit to write any text to. Raises StdoutClosed when standard output was closed at the start."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - open as long as the process
    if sys.stdout is None:
        raise StdoutClosed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A model writes characters that a locale's encoding may lack.
            stream.reconfigure(errors="backslashreplace")


def discard(stream: TextIO) -> None:
    """Point a broken stream's descriptor at nothing, so that the interpreter's last flush of it cannot fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _write(stream: TextIO, text: str) -> None:
    try:
        # Typed as buffered, which it is not where PYTHONUNBUFFERED is set.
        raw: object = getattr(stream, "buffer", None)
        if isinstance(raw, io.RawIOBase):
            _write_all(raw, text.encode(stream.encoding, stream.errors or "strict"))
        else:
            stream.write(text)
            stream.flush()
    except BrokenPipeError as error:
        discard(stream)
        raise StdoutClosed from error
    except OSError as error:
        discard(stream)
        raise UserError(f"standard output cannot be written: {error.strerror}") from error


def _write_all(raw: io.RawIOBase, data: bytes) -> None:
    """What a disk or a pipe did not take of one write, an unbuffered stream drops in silence."""
    left = memoryview(data)
    while left:
        written = raw.write(left)
        if written is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left = left[written:]


def one_line(text: str) -> str:
    """A message as one line: its lines joined, control characters escaped."""
    return escape_controls("; ".join(line.strip() for line in text.splitlines() if line.strip()))


def escape_controls(text: str) -> str:
    """Control characters, line ends among them, as Python writes them in a literal; the rest as it is."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
