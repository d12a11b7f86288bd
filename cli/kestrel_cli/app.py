"""The program: parses a command line, runs it, and turns whatever that raised into one line and an exit code."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Annotated

import typer

from kestrel_cli.bench import bench
from kestrel_cli.failures import ExitCode, failure_of
from kestrel_cli.flags import Invocation
from kestrel_cli.output import PROGRAM, Output, StdoutClosed, error_line, prepare_streams
from kestrel_cli.run import run
from kestrel_cli.selftest import selftest
from kestrel_cli.signals import leave_to_system, raise_on_first_signal
from kestrel_cuda import __version__

app = typer.Typer(
    name=PROGRAM,
    help="Runs Qwen3-VL checkpoints on an NVIDIA GPU, also when the weights do not fit its memory.",
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: the same with and without a terminal, and no wait for rich.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(selftest)
app.command()(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Runs Qwen3-VL checkpoints on an NVIDIA GPU, also when the weights do not fit its memory."""


def main() -> None:
    """Run the command line of this process, and end it with its exit code."""
    raise_on_first_signal()
    exit_code = execute(sys.argv[1:], os.environ)
    # What comes now is the interpreter's own end, which no exception should enter.
    leave_to_system()
    sys.exit(exit_code)


def execute(arguments: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run one command line and return its exit code; everything that was to be said has been."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    output = Output(as_json="--json" in options)
    try:
        prepare_streams()
        parsed = _parse(arguments)
        if isinstance(parsed, int):
            return parsed
        output.as_json = parsed.given.get("json", False) is True
        parsed.work(parsed.given, variables, output)
    except BaseException as error:
        return _report(error, output, with_traceback="--debug" in options)
    return ExitCode.SUCCESS


def _parse(arguments: Sequence[str]) -> Invocation | int:
    """What to run, or the exit code where --help and --version leave nothing to do."""
    captured = io.StringIO()
    # Typer's help goes through the same writer as everything else, for the sake of a closed pipe.
    with redirect_stdout(captured):
        parsed: Invocation | int = app(arguments, prog_name=PROGRAM, standalone_mode=False)
    Output(as_json=False).text(captured.getvalue())
    return parsed


def _report(error: BaseException, output: Output, with_traceback: bool) -> int:
    failure = failure_of(error)
    if failure.exit_code == ExitCode.STDOUT_CLOSED:
        return failure.exit_code
    if with_traceback and failure.exit_code == ExitCode.INTERNAL:
        error_line("".join(traceback.format_exception(error)))
    try:
        output.error(failure.kind, failure.message)
    except StdoutClosed:
        return ExitCode.STDOUT_CLOSED
    return failure.exit_code
