"""What an exception means to the person at the terminal: an exit code, a kind and one line. Prints nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import typer

from kestrel_cli.output import PROGRAM, StdoutClosed, one_line
from kestrel_cli.signals import exit_code_of
from kestrel_cuda.errors import CheckFailed, InternalError, KestrelError, SettingError, UserError


class ExitCode(IntEnum):
    """How a command ended. A signal adds its number to 128, as shells have it."""

    SUCCESS = 0
    CHECK_FAILED = 1
    USER = 2
    INTERNAL = 3
    STDOUT_CLOSED = 141


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
            return Failure(exit_code_of(error), "interrupt", "interrupted")
        case CheckFailed():
            return Failure(ExitCode.CHECK_FAILED, error.kind, one_line(str(error)))
        case UserError():
            return Failure(ExitCode.USER, error.kind, one_line(str(error)))
        case typer.TyperException():
            usage = one_line(error.format_message()).rstrip(".")
            return Failure(ExitCode.USER, SettingError.kind, f"{usage}; see {PROGRAM} --help")
        case MemoryError():
            # CuPy's out-of-memory error is one of these too.
            detail = one_line(str(error)) or "no more to be had"
            return Failure(ExitCode.USER, UserError.kind, f"out of memory: {detail}")
        case OSError():
            where = f"{error.filename}: " if error.filename is not None else ""
            return Failure(ExitCode.USER, UserError.kind, one_line(f"{where}{error.strerror or error}"))
        case KestrelError():
            return Failure(ExitCode.INTERNAL, error.kind, one_line(str(error)))
        case _:
            detail = one_line(str(error))
            text = f"{type(error).__name__}: {detail}" if detail else type(error).__name__
            return Failure(ExitCode.INTERNAL, InternalError.kind, f"internal error: {text}")
