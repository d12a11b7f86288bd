"""Runs a command on a terminal for tests and collects what it writes. Knows no command."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Mapping, Sequence


def run_on_terminal(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run with all three streams on a terminal; its exit code and everything it wrote."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        command, env=environment, stdin=child, stdout=child, stderr=child, start_new_session=True
    )
    os.close(child)
    written = b""
    while True:
        try:
            written += os.read(parent, 65536)
        except OSError:
            # EIO is Linux's way to say that the other side is closed.
            break
    os.close(parent)
    return process.wait(timeout=60), written.decode()
