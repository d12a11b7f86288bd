"""The command `bench`: what residency windows cost, as a table or one object. Measures nothing itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from kestrel_cli import flags, options, signals
from kestrel_cli.heard import Heard
from kestrel_cli.output import Output, error_object
from kestrel_cli.result import bench_result
from kestrel_cli.settings import Settings
from kestrel_cuda.errors import CheckFailed

if TYPE_CHECKING:
    from kestrel_cuda.bench import BenchReport, BenchRow


def bench(
    context: typer.Context,
    model: flags.Model = None,
    keep: flags.Keep = None,
    policy: flags.Policy = None,
    evict: flags.Evict = None,
    sweep_keep: flags.SweepKeep = False,
    keeps: flags.Keeps = None,
    policies: flags.Policies = None,
    evicts: flags.Evicts = None,
    prefetch: flags.Prefetch = None,
    prompt_tokens: flags.PromptTokens = None,
    new_tokens: flags.NewTokens = None,
    rounds: flags.Rounds = None,
    quant: flags.Quant = None,
    strip_cache: flags.StripCache = None,
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
    """Measure what a residency window costs.

    One window, or with --sweep-keep the whole curve: time a token, the rate at which weights are read, bytes over
    the link, and each as a share of what the card can do.
    Exit code 1 if the windows do not agree on every id and every logit.
    """
    return flags.Invocation(compare_windows, flags.given(context.params))


def compare_windows(given: flags.Given, variables: Mapping[str, str], output: Output) -> None:
    """Do what `bench` was asked. Raises CheckFailed when windows that must agree do not."""
    with signals.held():
        from kestrel_cli.bench_table import bench_text
        from kestrel_cli.render import Screen, is_fancy

    settings = options.settle_bench(given, variables)
    screen = Screen(settings[options.QUIET], variables)
    screen.hold()
    screen.settings(settings)
    heard = Heard(screen, settings)
    with screen.progress() as show, settings.naming_sources():

        def on_progress(stage: str, done: int, total: int) -> None:
            screen.begin()
            if show:
                show(stage, done, total)

        report = run_measure(settings, on_progress)
    screen.begin()
    heard.add(report.notes, report.warnings)
    heard.add((), options.unused_device(settings, report.backend))
    if all(row.keep == "off" for row in report.rows):
        heard.add(options.unused_window(settings, 0), ())

    difference = None if report.all_equal else difference_in(report.rows)
    result = bench_result(report, settings, heard)
    if difference:
        result["error"] = error_object(CheckFailed.kind, difference)
    output.result(result)
    output.text(bench_text(report, is_fancy(sys.stdout, variables)))
    if difference:
        raise CheckFailed(difference)


def run_measure(settings: Settings, on_progress: Callable[[str, int, int], None] | None) -> BenchReport:
    # NumPy and the engine come with it, which --help and a mistyped flag need not wait for.
    with signals.held():
        from kestrel_cuda.bench import measure

    keeps, policies, evicts = options.bench_windows(settings)
    return measure(
        options.bench_config(settings),
        keeps,
        policies,
        evicts,
        prompt_tokens=settings[options.PROMPT_TOKENS],
        new_tokens=settings[options.NEW_TOKENS],
        rounds=settings[options.ROUNDS],
        keep_flag=(options.KEEPS if settings[options.SWEEP_KEEP] else options.KEEP).flag,
        on_progress=on_progress,
    )


def difference_in(rows: Sequence[BenchRow]) -> str:
    """The first row that does not agree with the one at the top, in words."""
    top = rows[0]
    for row in rows[1:]:
        for what, one, other in (("ids", top.ids, row.ids), ("logits", top.logits_sha256, row.logits_sha256)):
            if one != other:
                return f"{_named(top)} and {_named(row)} differ in their {what}"
    return f"rounds of {_named(top)} differ in their ids"


def _named(row: BenchRow) -> str:
    return f"keep {row.keep} ({row.policy}, {row.evict}, prefetch {row.prefetch})"
