"""The command `selftest`: the engine's own checks, one line each as they end. Knows no check by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from kestrel_cli import flags, options, signals
from kestrel_cli.heard import Heard
from kestrel_cli.output import Output, error_object, escape_controls
from kestrel_cuda import __version__
from kestrel_cuda.config import EngineConfig
from kestrel_cuda.errors import CheckFailed

if TYPE_CHECKING:
    from kestrel_cuda.selftest import Check, OnOpen, SelftestReport


def selftest(
    context: typer.Context,
    model: flags.Model = None,
    quant: flags.Quant = None,
    kv: flags.Kv = None,
    vram: flags.Vram = None,
    cache_budget: flags.CacheBudget = None,
    prefill_chunk: flags.PrefillChunk = None,
    backend: flags.Backend = None,
    device: flags.Device = None,
    profile: flags.Profile = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    debug: flags.Debug = False,
) -> flags.Invocation:
    """Check kernels and a checkpoint.

    Kernels against an oracle, and the checkpoint's answers to text over every window, the largest of which is
    everything resident; its vision tower is not read. Exit code 1 if a check fails.
    """
    return flags.Invocation(check, flags.given(context.params))


def check(given: flags.Given, variables: Mapping[str, str], output: Output) -> None:
    """Do what `selftest` was asked. Raises CheckFailed when a check did not pass."""
    with signals.held():
        from kestrel_cli.render import Screen

    settings = options.settle(options.SELFTEST, given, variables)
    screen = Screen(settings[options.QUIET], variables)
    config = options.selftest_config(settings)
    screen.hold()
    screen.settings(settings)
    heard = Heard(screen, settings)

    def opened(backend: str, device: str, reason: str | None) -> None:
        screen.begin()
        screen.backend(backend, device)
        heard.add([], [f"running on the CPU: {reason}"] if reason else [])
        heard.add([], options.unused_device(settings, backend))

    with settings.naming_sources():
        report = run_checks(config, opened, lambda one: output.text(_line(one)))
    failed = [one.name for one in report.checks if not one.passed and not one.skipped]
    message = f"{len(failed)} of {len(report.checks)} checks failed: {', '.join(failed)}"
    result: dict[str, object] = {
        "version": __version__,
        "model": str(config.model),
        "backend": report.backend,
        "device": report.device,
        "passed": report.passed,
        "checks": [asdict(one) for one in report.checks],
        "settings": settings.as_json(),
        **heard.as_json(),
    }
    if not report.passed:
        result["error"] = error_object(CheckFailed.kind, message)
    output.result(result)
    if not report.passed:
        raise CheckFailed(message)
    num_skipped = sum(one.skipped for one in report.checks)
    where = f"{report.backend}, {escape_controls(report.device)}"
    output.text(f"{len(report.checks) - num_skipped} checks passed, {num_skipped} skipped ({where})\n")


def run_checks(config: EngineConfig, on_open: OnOpen, on_check: Callable[[Check], None]) -> SelftestReport:
    with signals.held():
        from kestrel_cuda.selftest import run_selftest

    return run_selftest(config, on_open, on_check)


def _line(one: Check) -> str:
    outcome = "skip" if one.skipped else "ok" if one.passed else "FAIL"
    return f"{outcome:5}{escape_controls(one.name)}: {escape_controls(one.detail)}\n"
