"""What an exception means to the person at the terminal: an exit code, a kind and one line. Prints nothing."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import typer

from kestrel_cli.output import PROGRAM, StdoutClosed, one_line
from kestrel_cli.signals import exit_code_of
from kestrel_cuda.errors import CheckFailed, InternalError, KestrelError, SettingError, UserError
from kestrel_cuda.paths import shown_path


class ExitCode(IntEnum):
    """How a command ended. A signal adds its number to 128, as shells have it."""

    SUCCESS = 0
    CHECK_FAILED = 1
    USER = 2
    INTERNAL = 3
    STDOUT_CLOSED = 141


_OUT_OF_MEMORY = ("can't start new thread", "Cannot allocate memory", "failed to map segment")
"""What Python and the dynamic loader say where a limit of the system (ulimit) leaves them no room."""


@dataclass(frozen=True)
class Failure:
    """How one exception is reported. `message` is a single line without control characters."""

    exit_code: int
    kind: str
    message: str


def failure_of(error: BaseException) -> Failure:
    """The failure an exception stands for; what nobody foresaw is ours."""
    match error:
        case StdoutClosed():
            return Failure(ExitCode.STDOUT_CLOSED, "output", "standard output was closed")
        case KeyboardInterrupt():
            exit_code = exit_code_of(error)
            how = "terminated" if exit_code == 128 + signal.SIGTERM else "interrupted"
            return Failure(exit_code, "interrupt", how)
        case CheckFailed():
            return Failure(ExitCode.CHECK_FAILED, error.kind, one_line(str(error)))
        case UserError():
            return Failure(ExitCode.USER, error.kind, one_line(str(error)))
        case typer.TyperException():
            usage = one_line(error.format_message()).rstrip(".")
            context = getattr(error, "ctx", None)
            where = PROGRAM if context is None else context.command_path
            return Failure(ExitCode.USER, SettingError.kind, f"{usage}; see {where} --help")
        case MemoryError():
            # CuPy's out-of-memory error is one of these too.
            detail = one_line(str(error)) or "no more to be had"
            return Failure(ExitCode.USER, UserError.kind, f"out of memory: {detail}")
        case RuntimeError() | ImportError() if line := _line_of(str(error), _OUT_OF_MEMORY):
            return Failure(ExitCode.USER, UserError.kind, f"out of memory or threads: {one_line(line)}")
        case OSError():
            where = f"{shown_path(error.filename)}: " if error.filename is not None else ""
            return Failure(ExitCode.USER, UserError.kind, one_line(f"{where}{error.strerror or error}"))
        case KestrelError():
            return Failure(ExitCode.INTERNAL, error.kind, one_line(str(error)))
        case _:
            detail = one_line(str(error))
            text = f"{type(error).__name__}: {detail}" if detail else type(error).__name__
            return Failure(ExitCode.INTERNAL, InternalError.kind, f"internal error: {text}")


def _line_of(text: str, phrases: Sequence[str]) -> str:
    """The first line that holds one of the phrases: a package may wrap pages of advice around it."""
    return next((line for line in text.splitlines() if any(phrase in line for phrase in phrases)), "")
