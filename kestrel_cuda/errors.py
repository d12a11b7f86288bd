"""The error tree: what went wrong, and whose it is to mend. Knows nothing of exit codes or terminals.

    KestrelError
    ├── UserError               the user can mend it (exit code 2)
    │   ├── SettingError        a flag, a variable, a profile
    │   ├── CheckpointError     a file of the checkpoint: missing, damaged, contradictory, unsupported
    │   ├── InputError          a prompt, a conversation, an input file
    │   └── DeviceError         no usable GPU, or not enough of its memory
    ├── CheckFailed             a selftest check or an --expect did not hold (exit code 1)
    └── InternalError           our fault (exit code 3)

A message is one line: what was found, what was needed, what to do.
"""

from __future__ import annotations


class KestrelError(Exception):
    """Root of every error this package raises on purpose."""

    kind = "error"


class UserError(KestrelError):
    """Something the user can mend."""

    kind = "user"


class SettingError(UserError):
    """A flag, an environment variable or a profile holds something it does not take."""

    kind = "setting"


class CheckpointError(UserError):
    """A checkpoint file is missing, damaged, contradictory or of an unsupported kind."""

    kind = "checkpoint"


class InputError(UserError):
    """A prompt, a conversation or an input file cannot be used."""

    kind = "input"


class DeviceError(UserError):
    """No usable GPU, or not enough memory on it."""

    kind = "device"


class CheckFailed(KestrelError):
    """A check the user asked for did not hold."""

    kind = "check"


class InternalError(KestrelError):
    """A state this program should never reach."""

    kind = "internal"
