"""Where the process starts: it sees to signals before anything heavy is imported. Knows no command."""

from __future__ import annotations

import os
import sys

from kestrel_cli import signals


def main() -> None:
    """Run the command line of this process, and end it with its exit code."""
    # `execute` lets them go again, inside what reports an error.
    signals.hold()
    signals.raise_on_first_signal()
    from kestrel_cli.program import execute

    try:
        exit_code = execute(sys.argv[1:], os.environ)
        # What comes now is the interpreter's own end, which no exception should enter.
        signals.hold()
    except KeyboardInterrupt as interrupt:
        # Between the last line that `execute` sees to and the one above: everything has been said.
        exit_code = signals.exit_code_of(interrupt)
    signals.leave_to_system()
    sys.exit(exit_code)
