"""Ctrl-C and SIGTERM as exceptions: the first is raised, so that a run can still say what it has; a second ends it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


class _Stop:
    """The handler of both signals. While it is held, the first signal waits instead of being raised."""

    def __init__(self) -> None:
        self.is_held = False
        self._waiting: int | None = None

    def __call__(self, signal_number: int, _frame: FrameType | None) -> None:
        leave_to_system()
        if not self.is_held:
            raise Interrupted(signal_number)
        self._waiting = signal_number

    def release(self) -> None:
        self.is_held = False
        number, self._waiting = self._waiting, None
        if number is not None:
            raise Interrupted(number)


def _say_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """As Python does, but for a second signal that had come before the first was seen to: one is enough."""
    error = unraisable.exc_value
    if not (isinstance(error, OSError) and str(error).endswith("ignored due to race condition")):
        sys.__unraisablehook__(unraisable)


# One, as the process has one handler for each signal.
_stop = _Stop()


def raise_on_first_signal() -> None:
    """Raise Interrupted on the first SIGINT or SIGTERM, and leave a second one to the system's default: the end."""
    sys.unraisablehook = _say_unraisable
    for number in _STOPPING:
        # A shell starts background jobs with SIGINT ignored, and means it.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def leave_to_system() -> None:
    """Let every further signal do what it does to any program."""
    for number in _STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def hold() -> None:
    """Let the first signal wait until `release`: in what an exception would leave half done, an import say."""
    _stop.is_held = True


def release() -> None:
    """Take signals again. Raises Interrupted when one has come meanwhile."""
    _stop.release()


@contextmanager
def held() -> Iterator[None]:
    """`hold` for the length of a block, then `release`."""
    hold()
    try:
        yield
    finally:
        release()
