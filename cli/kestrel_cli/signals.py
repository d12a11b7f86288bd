"""Ctrl-C and SIGTERM as exceptions: the first is raised, so that a run can still say what it has; a second ends it."""

from __future__ import annotations

import signal
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to stop."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """128 plus the signal's number; a KeyboardInterrupt of Python's own is a SIGINT."""
    return 128 + (interrupt.signal_number if isinstance(interrupt, Interrupted) else signal.SIGINT)


def raise_on_first_signal() -> None:
    """Raise Interrupted on the first SIGINT or SIGTERM, and leave a second one to the system's default: the end."""

    def stop(signal_number: int, _frame: FrameType | None) -> None:
        leave_to_system()
        raise Interrupted(signal_number)

    for number in _STOPPING:
        # A shell starts background jobs with SIGINT ignored, and means it.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def leave_to_system() -> None:
    """Let every further signal do what it does to any program."""
    for number in _STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
