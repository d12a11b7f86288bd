"""A bench report as text for people: its conditions, one row a window, the verdict. Writes nothing anywhere."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kestrel_cli.output import escape_controls

if TYPE_CHECKING:
    from kestrel_cuda.bench import BenchReport, BenchRow, CostLine

_WIDTH = 80
_HASH_DIGITS = 6
_NONE = "-"
_LOGITS, _IDS = "logits\nsha256", "first\nids"
_LABEL_WIDTH = 13

# A line below the heads, broken between columns, and no other.
_PLAIN_RULE = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)
_FANCY_RULE = Box("    \n    \n ─  \n    \n    \n    \n    \n    \n")

_BINARY = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_DECIMAL = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def bench_text(report: BenchReport, fancy: bool) -> str:
    """The whole report, for a terminal when `fancy`; 80 columns wide unless its figures need more."""
    columns, shared = _without_shared(_columns(report))
    # Two blanks between columns where that leaves room for an id.
    gap = 2 if _least_width(columns, 2) <= _WIDTH else 1
    *others, last = columns
    if last.head == _IDS:
        columns = [*others, _cut_ids(last, _WIDTH - _total_width(others, gap) - gap)]
    console = Console(
        file=io.StringIO(),
        width=max(_WIDTH, _total_width(columns, gap)),
        force_terminal=fancy,
        color_system="auto" if fancy else None,
        no_color=not fancy,
        markup=False,
        highlight=False,
        emoji=False,
    )
    with console.capture() as captured:
        for name, fact in (*_facts(report), *shared):
            console.print(Text(f"{name:{_LABEL_WIDTH - 1}}", style="bold"), Text(escape_controls(fact)), soft_wrap=True)
        console.print()
        console.print(_table(columns, gap, fancy))
        console.print()
        for line in report.cost_lines:
            console.print(Text(_cost(line)), soft_wrap=True)
        console.print(Text(_verdict(report)), soft_wrap=True)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().split("\n")[:-1])


@dataclass(frozen=True)
class _Column:
    """`head` may have two lines."""

    head: str
    cells: tuple[str, ...]
    is_number: bool = True

    @property
    def width(self) -> int:
        return max(map(len, (*self.head.splitlines(), *self.cells)))


def _facts(report: BenchReport) -> Iterator[tuple[str, str]]:
    """What the figures below hold for, a line each."""
    yield "model", f"{Path(report.rows[0].model).name}, {report.rows[0].quant}"
    yield "card", f"{report.card} ({report.backend} backend)"
    yield "sizes", f"prompt {report.prompt_tokens} tokens, answer {report.new_tokens} tokens, rounds {report.rounds}"
    windows = _windows(report.rows)
    same = [f"{name} {get(windows[0])}" for name, get in _RULES if windows and not _varies(windows, get)]
    if same or not windows:
        yield "window", ", ".join(same) or "none, everything resident"
    if report.link_gb_per_s is None:
        yield "ceilings", "no link: copies stay in host memory; read rate not measured"
    else:
        read = report.device_read_gb_per_s
        memory = (
            "read rate not measured (--vram, or under 2 GiB free)" if read is None else f"device memory {_rate(read)}"
        )
        yield "ceilings", f"link {_rate(report.link_gb_per_s)}, {memory}"
    unit, (size,) = _in_one_unit([report.rows[0].bytes_read_per_token], _DECIMAL)
    yield "read", f"{size} {unit} a token: every weight once, nothing else"
    yield "columns", "weights resident after a token; peak of device memory;"
    tokens = "1 token" if report.num_timed == 1 else f"{report.num_timed} tokens"
    yield "", f"ms/token: median ± standard deviation of {tokens}; link a token;"
    yield "", "GB/s over that median, % of the ceiling above"
    num_untimed = report.new_tokens - report.num_timed // report.rounds
    yield "not timed", f"loading, prefill, a run that hashes logits, {num_untimed} first tokens a round"


def _cost(line: CostLine) -> str:
    rule = f"{line.policy}, {line.evict}, prefetch {line.prefetch}"
    return (
        f"{rule}: a token takes {line.ms_without:.2f} ms and what it uploads at {line.gb_per_s:.4g} GB/s "
        f"(R² {line.r_squared:.5f}, {line.num_windows} windows)"
    )


def _verdict(report: BenchReport) -> str:
    what = f"ids and logits of {len(report.rows)} windows" if len(report.rows) > 1 else "ids of every round"
    return f"{what}: {'equal to the bit' if report.all_equal else 'NOT EQUAL'}"


_RULES: tuple[tuple[str, Callable[[BenchRow], object]], ...] = (
    ("policy", lambda row: row.policy),
    ("evict", lambda row: row.evict),
    ("prefetch", lambda row: row.prefetch),
)
"""What a window has beside its keep: a column where it varies."""


def _columns(report: BenchReport) -> list[_Column]:
    """Every column, its ids, whole for now, the last."""
    rows = report.rows
    columns = [_Column("keep", tuple(str(row.keep) for row in rows))]
    for name, get in _RULES:
        if _varies(_windows(rows), get):
            columns.append(_Column(name, tuple(_NONE if row.keep == "off" else str(get(row)) for row in rows), False))
    times = _fixed([row.ms_per_token_median for row in rows], digits=4, least_decimals=2)
    decimals = len(times[0].partition(".")[2])
    spreads = [_NONE if row.ms_per_token_sd is None else f"{row.ms_per_token_sd:.{decimals}f}" for row in rows]
    columns += [
        _Column("weights", tuple(str(row.weights_resident_end) for row in rows)),
        _sizes("peak", [row.peak_device_bytes for row in rows], _BINARY),
        _Column("ms/token", tuple(f"{time} ±{spread}" for time, spread in zip(times, spreads, strict=True))),
        _Column("read\nGB/s", tuple(_fixed([row.read_gb_per_s for row in rows], digits=3))),
        _Column("read\n%", tuple(_percent([row.read_share for row in rows]))),
        _sizes("link", [row.h2d_bytes_per_token for row in rows], _DECIMAL),
        _Column("link\nGB/s", tuple(_fixed([row.h2d_gb_per_s or None for row in rows], digits=3))),
    ]
    if report.link_gb_per_s is not None:
        columns.append(_Column("link\n%", tuple(_percent([row.link_share for row in rows]))))
    columns.append(_Column(_LOGITS, tuple(row.logits_sha256[:_HASH_DIGITS] for row in rows), False))
    columns.append(_Column(_IDS, tuple(" ".join(map(str, row.ids)) for row in rows), False))
    return columns


def _without_shared(columns: list[_Column]) -> tuple[list[_Column], list[tuple[str, str]]]:
    """Where 80 columns have no room, ids and digests that every row shares leave the table and are said once above."""
    facts: list[tuple[str, str]] = []
    for head in (_IDS, _LOGITS):
        column = next(one for one in columns if one.head == head)
        if len(set(column.cells)) == 1 and _least_width(columns, 1) > _WIDTH:
            columns = [one for one in columns if one is not column]
            name = head.replace("\n", " ")
            (cell, *_) = _cut_ids(column, _WIDTH - _LABEL_WIDTH - len(name) - 2).cells
            facts.append(("" if facts else "every row", f"{name}: {cell}"))
    return columns, facts


def _windows(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows with a window; everything resident is none."""
    return [row for row in rows if row.keep != "off"]


def _varies(windows: Sequence[BenchRow], get: Callable[[BenchRow], object]) -> bool:
    return len({get(row) for row in windows}) > 1


def _sizes(name: str, sizes_bytes: Sequence[int], units: Sequence[tuple[str, int]]) -> _Column:
    """Byte counts in one unit, the largest that the largest of them fills."""
    unit, cells = _in_one_unit(sizes_bytes, units)
    return _Column(f"{name}\n{unit}", tuple(cells))


def _in_one_unit(sizes_bytes: Sequence[int], units: Sequence[tuple[str, int]]) -> tuple[str, list[str]]:
    unit, num_bytes = next((one for one in units if max(sizes_bytes) >= one[1]), units[-1])
    return unit, _fixed([size / num_bytes for size in sizes_bytes], digits=4)


def _percent(shares: Sequence[float | None]) -> list[str]:
    return _fixed([None if share is None else 100 * share for share in shares], digits=3)


def _fixed(values: Sequence[float | None], digits: int, least_decimals: int = 0) -> list[str]:
    """Numbers with one count of decimals, that which shows `digits` digits of the largest."""
    largest = max((value for value in values if value is not None), default=0.0)
    whole_digits = len(str(int(largest))) if largest >= 1 else 0
    decimals = max(least_decimals, digits - whole_digits)
    return [_NONE if value is None else f"{value:.{decimals}f}" if value else "0" for value in values]


def _rate(gb_per_s: float) -> str:
    return f"{gb_per_s:.4g} GB/s"


def _total_width(columns: Sequence[_Column], gap: int) -> int:
    return sum(column.width for column in columns) + gap * (len(columns) - 1)


def _least_width(columns: Sequence[_Column], gap: int) -> int:
    """With one id, where ids are among the columns."""
    return _total_width([_cut_ids(one, 0) if one.head == _IDS else one for one in columns], gap)


def _cut_ids(ids: _Column, width: int) -> _Column:
    """As many whole ids as fit, at least one."""

    def cut(cell: str) -> str:
        end = max(width, cell.find(" "))
        return cell if len(cell) <= end else cell[: cell.rfind(" ", 0, end + 1)]

    return replace(ids, cells=tuple(cut(cell) for cell in ids.cells))


def _table(columns: Sequence[_Column], gap: int, fancy: bool) -> Table:
    table = Table(
        box=_FANCY_RULE if fancy else _PLAIN_RULE,
        show_edge=False,
        padding=(0, gap - 1, 0, 0),
        pad_edge=False,
        header_style="bold" if fancy else "",
    )
    for column in columns:
        table.add_column(column.head, justify="right" if column.is_number else "left", no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, cells))
    return table
