"""The program: parses a command line, runs it, and turns whatever that raised into one line and an exit code."""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from inspect import signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from kestrel_cli import signals
from kestrel_cli.bench import bench
from kestrel_cli.failures import ExitCode, failure_of
from kestrel_cli.flags import VISUAL_ORDER, Invocation
from kestrel_cli.inspect import inspect
from kestrel_cli.output import PROGRAM, Output, StdoutClosed, error_line, prepare_streams
from kestrel_cli.run import run
from kestrel_cli.selftest import selftest
from kestrel_cuda import __version__
from kestrel_cuda.errors import SettingError


class Command(TyperCommand):
    """A command that refuses an option given twice, where Typer would let the last value replace the others."""

    # Typer shows its own context, and this method has the one of the Click inside it.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            _, extra, order = self.make_parser(ctx).parse_args(list(args))
        except typer.TyperException as error:
            # Some come without the context, which tells whose --help to point to.
            if getattr(error, "ctx", None) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise
        if any(parameter.is_eager for parameter in order):
            # Help, whatever stands around it.
            return super().parse_args(ctx, args)
        ctx.meta[VISUAL_ORDER] = [parameter.name for parameter in order if getattr(parameter, "multiple", False)]
        for parameter in order:
            if getattr(parameter, "multiple", False):
                continue
            is_plain_switch = getattr(parameter, "is_flag", False) and not parameter.secondary_opts
            if order.count(parameter) > 1 and not is_plain_switch:
                names = "/".join([*parameter.opts, *parameter.secondary_opts])
                raise SettingError(f"{names} is given {order.count(parameter)} times; give it once")
        if extra:
            has_prompt = any(parameter.param_type_name == "argument" for parameter in self.params)
            wanted = "put a prompt of several words in quotes" if has_prompt else f"{self.name} takes options only"
            raise SettingError(f"unexpected argument {extra[0]!r}; {wanted}; see {ctx.command_path} --help")
        return super().parse_args(ctx, args)


_OLDER_VARIABLES = {"backend": "VLLM_CUDA_INFER", "keep": "VLLM_CUDA_STREAM", "host_keep": "VLLM_VQF_STREAM"}


def _epilog(command: Callable[..., Invocation]) -> str:
    """The variables of a command's options, and the exit codes."""
    older = [
        f"--{name.replace('_', '-')} from {variable}"
        for name, variable in _OLDER_VARIABLES.items()
        if name in signature(command).parameters
    ]
    of_older = f"; {', '.join(older)}, whose 0 has a meaning of its own (README)" if older else ""
    return (
        "Every option with a value is also read from a variable, KESTREL_CUDA_ and its name (KESTREL_CUDA_MODEL for "
        f"--model){of_older}. Exit codes: 0 success, 1 a check failed, 2 something you can mend, 3 our fault, 130 "
        "interrupted, 141 standard output closed, 143 terminated."
    )


app = typer.Typer(
    name=PROGRAM,
    help="Runs Qwen3-VL checkpoints on an NVIDIA GPU, also when the weights do not fit its memory.",
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: the same with and without a terminal, and no wait for rich.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, inspect, selftest, bench):
    app.command(cls=Command, epilog=_epilog(command))(command)


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


def execute(arguments: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run one command line and return its exit code; everything that was to be said has been."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    output = Output(as_json="--json" in options)
    with_traceback = "--debug" in options
    try:
        _work(arguments, variables, output)
    except BaseException as error:
        try:
            return _report(error, output, with_traceback)
        except KeyboardInterrupt as interrupt:
            # It came while the report was written, and is the last that can be caught.
            return _report(interrupt, output, with_traceback)
    return ExitCode.SUCCESS


def _work(arguments: Sequence[str], variables: Mapping[str, str], output: Output) -> None:
    # Typer makes an exit code of an interrupt, and says nothing.
    with signals.held():
        prepare_streams()
        captured = io.StringIO()
        # Typer's help goes through the same writer as everything else, for the sake of a closed pipe.
        with redirect_stdout(captured):
            parsed: Invocation | int = app(arguments, prog_name=PROGRAM, standalone_mode=False)
    if isinstance(parsed, int):
        Output(as_json=False).text(captured.getvalue())
        return
    output.as_json = parsed.given.get("json", False) is True
    parsed.work(parsed.given, variables, output)


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
