"""Standard error for people: progress, load report, per-token table, summary. Only this file and bench_table.py import
rich.

Text of the model or of a file is never markup here, and never a control character.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import TextIO, cast

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kestrel_cli.options import TableRows
from kestrel_cli.output import LossyStderr, escape_controls
from kestrel_cli.settings import Settings
from kestrel_cli.settings_lines import settings_lines
from kestrel_cuda.report import LoadReport, PlanReport, RunReport, Token
from kestrel_cuda.sizes import format_size

_LAST_ROWS = 32
_LABEL_WIDTH = 13
_LEAST_WIDTH, _USUAL_WIDTH = 40, 80

OnProgress = Callable[[str, int, int], None]


class Screen:
    """Standard error. Colour and progress only on a terminal that NO_COLOR and TERM=dumb do not rule out."""

    def __init__(self, quiet: bool, variables: Mapping[str, str]) -> None:
        self._fancy = is_fancy(sys.stderr, variables)
        self._width = _width_of(sys.stderr, variables)
        self._breaks_lines = sys.stderr.isatty()
        self._console = Console(
            file=cast(TextIO, LossyStderr()),
            width=self._width,
            quiet=quiet,
            force_terminal=self._fancy,
            color_system="auto" if self._fancy else None,
            no_color=not self._fancy,
            markup=False,
            highlight=False,
            emoji=False,
            soft_wrap=True,
        )
        self._held: list[tuple[Text, ...]] | None = None

    def hold(self) -> None:
        """Keep what is said until `begin`, but for warnings, so that a mistake found before it is one line."""
        self._held = []

    def begin(self) -> None:
        """Say what was held; what comes next is said as it comes."""
        held, self._held = self._held or [], None
        for texts in held:
            self._line(*texts)

    @contextmanager
    def progress(self) -> Iterator[OnProgress | None]:
        """A bar for each stage that is reported while the block runs, gone after it; None where none is shown."""
        if not self._fancy or self._console.quiet:
            yield None
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        with Progress(
            *columns,
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as bars:
            tasks: dict[str, TaskID] = {}

            def advance(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(escape_controls(stage), total=total)
                bars.update(tasks[stage], completed=done, total=total)

            yield advance

    def note(self, text: str) -> None:
        self._line(Text(self._wrapped(escape_controls(text), "")))

    def warning(self, text: str) -> None:
        lead = "warning: "
        self._print(Text(lead, style="yellow"), Text(self._wrapped(escape_controls(text), lead)))

    def plan_report(self, plan: PlanReport) -> None:
        """Where weights will go and what that takes, before any is read."""
        window = "every layer resident" if plan.keep == 0 else f"window of {plan.keep} of {plan.num_layers} layers"
        host = f", {format_size(plan.host_copy_bytes)} of host memory" if plan.host_copy_bytes else ""
        self._facts(
            [
                ("backend", f"{plan.backend}, {plan.device}; {window}; embeddings on the {plan.embeddings_on}"),
                ("planned", f"{format_size(plan.planned_device_bytes)}{host}; {plan.ctx} tokens of context "
                            f"({plan.kv}, {format_size(plan.kv_bytes_per_slot)} each), {plan.prefill_chunk} at a time"),
            ]
        )  # fmt: skip

    def load_report(self, load: LoadReport, settings: Settings) -> None:
        """What was loaded, and with which settings."""
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in load.dtypes.items())
        quant = ", ".join(f"{name} {kind}" for name, kind in load.quant.items())
        end_ids = ", ".join(map(str, load.eos_ids)) or "none"
        model = f"{Path(load.model).name}: {load.num_layers} layers, {load.num_weights} weights; stored as {dtypes}"
        self._facts(
            [
                ("model", model),
                ("quant", f"{quant}{'; lm_head tied to the embeddings' if load.tied else ''}"),
                ("prompt form", f"template: {load.template_source or 'none'}; end ids: {end_ids}"),
                ("loaded in", f"{load.load_ms:.0f} ms"),
            ]
        )  # fmt: skip
        self.settings(settings)

    def settings(self, settings: Settings) -> None:
        """Every setting and its value, under the source it came from."""
        self._facts([("settings", line) for line in settings_lines(settings)])

    def backend(self, name: str, device: str) -> None:
        """Where a command without a load report computes."""
        self._facts([("backend", f"{name}, {device}")])

    def table(self, tokens: Sequence[Token], end_ids: Iterable[int], rows: TableRows) -> None:
        """One row a token: step, id, text piece, milliseconds; the last 32 unless all are asked for."""
        shown = {"all": tokens, "last": tokens[-_LAST_ROWS:], "none": ()}[rows]
        if not shown:
            return
        table = Table(box=box.SIMPLE_HEAD if self._fancy else box.ASCII2)
        for name in ("step", "id"):
            table.add_column(name, justify="right")
        table.add_column("text", overflow="fold")
        table.add_column("ms", justify="right")
        ends = set(end_ids)
        for token in shown:
            piece = "(end)" if token.token_id in ends else f'"{escape_controls(token.text)}"'
            table.add_row(str(token.step), str(token.token_id), Text(piece), f"{token.time_ms:.2f}")
        self._console.print(table)
        if len(shown) < len(tokens):
            self.note(f"the last {len(shown)} of {len(tokens)} tokens; --table all shows every one")

    def summary(self, load: LoadReport, run: RunReport, visuals: str | None = None) -> None:
        """What the run took and moved; `visuals` says it of its pictures."""
        timing, residency = run.timing, run.residency
        facts = [("pictures", f"{visuals} to read and encode")] if visuals else []
        facts += [
            ("prompt", f"{len(run.prompt_ids)} tokens, {timing.prefill_ms:.1f} ms"),
            ("answer", f"{len(run.ids)} tokens, ended by {run.stop_reason}"),
        ]
        if run.ids:
            left_out = "loading and pictures" if visuals else "loading"
            facts.append(("first token", f"{timing.ttft_ms:.1f} ms, {left_out} left out"))
        median = timing.tpot_ms_median
        if median:
            facts.append(("per token", f"{median:.2f} ms (median), {1000 / median:.1f} tok/s"))
        facts += [
            ("read", f"{format_size(run.bytes_read_per_token)} of weights a token{_read_rate(load, run)}"),
            ("resident", f"{residency.weights_resident_end} of {load.num_weights} weights, "
                         f"{residency.layers_resident_end} of {load.num_layers} layers; at most "
                         f"{residency.peak_layers} layers and {format_size(residency.peak_device_bytes)} at once"),
            ("uploads", f"{residency.uploads_per_token:g} layers, "
                        f"{format_size(residency.h2d_bytes_per_token)} a token"),
        ]  # fmt: skip
        self._facts(facts)

    def _facts(self, facts: Iterable[tuple[str, str]]) -> None:
        previous = ""
        for name, fact in facts:
            label = "" if name == previous else name
            lines = _broken(escape_controls(fact), self._width - _LABEL_WIDTH, "  ")
            for line in lines:
                self._line(Text(f"{label:{_LABEL_WIDTH}}", style="bold"), Text(line))
                label = ""
            previous = name

    def _wrapped(self, text: str, lead: str) -> str:
        """On a terminal broken between words; elsewhere one line, which is a line to whatever reads it."""
        if not self._breaks_lines:
            return text
        return "\n".join(_broken(lead + text, self._width, "  ")).removeprefix(lead)

    def _line(self, *texts: Text) -> None:
        if self._held is None:
            self._print(*texts)
        else:
            self._held.append(texts)

    def _print(self, *texts: Text) -> None:
        self._console.print(*texts, sep="")


def _broken(text: str, width: int, indent: str) -> list[str]:
    """Lines of at most `width` unless a single word is longer, all but the first indented."""
    return wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def _width_of(stream: TextIO, variables: Mapping[str, str]) -> int:
    """Columns to write: COLUMNS, else the terminal's, else 80; never so few that a table has no room for its cells."""
    columns = variables.get("COLUMNS", "")
    if columns.isdecimal() and columns.isascii() and len(columns) < 5 and int(columns):
        return max(_LEAST_WIDTH, int(columns))
    try:
        found = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        found = 0
    return max(_LEAST_WIDTH, found or _USUAL_WIDTH)


def is_fancy(stream: TextIO, variables: Mapping[str, str]) -> bool:
    """Whether a stream is a terminal that NO_COLOR and TERM=dumb leave colour to."""
    dumb = variables.get("TERM", "") in ("dumb", "unknown")
    return stream.isatty() and not dumb and not variables.get("NO_COLOR")


def _read_rate(load: LoadReport, run: RunReport) -> str:
    if run.read_gb_per_s is None:
        return ""
    rate = f", {run.read_gb_per_s:.3g} GB/s"
    if run.read_share is not None:
        return f"{rate}, {100 * run.read_share:.0f} % of the card's {run.device_read_gb_per_s:.4g} GB/s"
    if load.backend == "cuda":
        return f"{rate}; the card's read rate was not measured (--vram, or under 2 GiB free)"
    return rate
