"""What a residency window costs: one loaded checkpoint, many windows, rounds interleaved. Prints nothing.

The checkpoint is loaded once, with its host copy; each measurement lays another window over it. A round visits every
variant before any is visited again, so a drift of the machine falls on all alike. Logits are hashed in a run of their
own, since a hash between two tokens lengthens one and gives the copies of the next a start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, stdev

import numpy as np

from kestrel_cuda.config import EngineConfig, Evict, Policy
from kestrel_cuda.engine import Engine
from kestrel_cuda.errors import SettingError
from kestrel_cuda.generate import LogitsWish
from kestrel_cuda.plan import DoesNotFit, Flags, too_far_ahead
from kestrel_cuda.report import RunReport
from kestrel_cuda.residency.window import make_window

WARMUP_TOKENS = 2
"""Decode steps dropped at the start of each measurement: buffers are allocated and launches captured in them."""

LEAST_OF_A_LINE = 3
"""Windows that upload different amounts; a line through two explains everything."""

_SMALLER = ("--prompt-tokens", "--new-tokens", "--prefetch", "--prefill-chunk")


@dataclass(frozen=True)
class Variant:
    """One window to measure; `keep` 0 is everything resident."""

    keep: int
    policy: Policy
    evict: Evict
    prefetch: int


@dataclass(frozen=True)
class BenchRow:
    """A variant's figures over all rounds. Rates are in 10^9 bytes a second.

    `read_gb_per_s` is bytes read per token (weights alone, see RunReport) over the median; `read_share` is None where
    the card's read rate was not measured, `link_share` without a link or without copies, `ms_per_token_sd` where one
    token was timed.
    """

    model: str
    quant: str
    keep: int | str
    policy: str
    evict: str
    prefetch: int
    weights_resident_end: int
    peak_device_bytes: int
    ms_per_token_median: float
    ms_per_token_sd: float | None
    bytes_read_per_token: int
    read_gb_per_s: float
    read_share: float | None
    h2d_bytes_per_token: int
    h2d_gb_per_s: float
    link_share: float | None
    ids: tuple[int, ...]
    ids_hash: str
    logits_sha256: str


@dataclass(frozen=True)
class CostLine:
    """Milliseconds a token as a straight line in what the windows of one rule upload, by least squares.

    `ms_without` is where nothing would be uploaded, `gb_per_s` the bytes that a millisecond more stands for, in 10^9 a
    second; `r_squared` is the share of the variance that the line explains.
    """

    policy: str
    evict: str
    prefetch: int
    num_windows: int
    ms_without: float
    gb_per_s: float
    r_squared: float


@dataclass(frozen=True)
class BenchReport:
    """Every row, the card they were measured on and its ceilings.

    `all_equal` says that no ids differ in any round of any row, and no logits in any row. `num_timed` counts the tokens
    behind each row's median; `notes` and `warnings` are the load's, and say which windows are not measured.
    """

    card: str
    backend: str
    prompt_tokens: int
    new_tokens: int
    rounds: int
    link_gb_per_s: float | None
    device_read_gb_per_s: float | None
    all_equal: bool
    rows: tuple[BenchRow, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def num_timed(self) -> int:
        return self.rounds * (self.new_tokens - 1 - WARMUP_TOKENS)

    @property
    def cost_lines(self) -> tuple[CostLine, ...]:
        """One for each rule of which three windows or more upload different amounts over a link."""
        if self.link_gb_per_s is None:
            return ()
        rules: dict[tuple[str, str, int], list[BenchRow]] = {}
        for row in self.rows:
            if row.h2d_bytes_per_token:
                rules.setdefault((row.policy, row.evict, row.prefetch), []).append(row)
        lines = (_cost_line(rule, rows) for rule, rows in rules.items())
        return tuple(line for line in lines if line is not None)


def _cost_line(rule: tuple[str, str, int], rows: Sequence[BenchRow]) -> CostLine | None:
    gigabytes = np.array([row.h2d_bytes_per_token for row in rows]) / 1e9
    token_ms = np.array([row.ms_per_token_median for row in rows])
    if len(set(gigabytes)) < LEAST_OF_A_LINE:
        return None
    ms_per_gb, ms_without = np.polyfit(gigabytes, token_ms, 1)
    left = np.sum((token_ms - (ms_without + ms_per_gb * gigabytes)) ** 2)
    spread = np.sum((token_ms - token_ms.mean()) ** 2)
    if ms_per_gb <= 0 or spread == 0:
        return None
    return CostLine(*rule, len(rows), float(ms_without), float(1e3 / ms_per_gb), float(1 - left / spread))


@dataclass(frozen=True)
class _Runs:
    """What one variant ran: once with its logits hashed, then timed."""

    checked: RunReport
    timed: list[RunReport]


def variants(
    num_layers: int, keeps: Sequence[int], policies: Sequence[Policy], evicts: Sequence[Evict], prefetch: int
) -> list[Variant]:
    """Every combination, each window once; keeps above the model's layers are the model's layers."""
    wanted: dict[Variant, None] = {}
    for keep in keeps:
        if keep == 0:
            wanted[Variant(0, policies[0], evicts[0], prefetch)] = None
            continue
        for policy in policies:
            for evict in evicts:
                wanted[Variant(min(keep, num_layers), policy, evict, prefetch)] = None
    return list(wanted)


def default_keeps(num_layers: int) -> list[int]:
    """Everything resident, then windows from nearly all layers down to one."""
    shares = (num_layers - 1, num_layers - 2, 5 * num_layers // 7, 3 * num_layers // 7, 2 * num_layers // 7)
    return [0, *sorted({keep for keep in (*shares, num_layers // 7, 2, 1) if 0 < keep < num_layers}, reverse=True)]


def measure(
    config: EngineConfig,
    keeps: Sequence[int | None] | None,
    policies: Sequence[Policy],
    evicts: Sequence[Evict],
    *,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    keep_flag: str = "--keep",
    on_progress: Callable[[str, int, int], None] | None = None,
) -> BenchReport:
    """Load once, then measure every variant `rounds` times.

    A keep of None is the largest that fits; without `keeps`, windows of the default sizes that fit, and a note on the
    others. `keep_flag` is what messages call the setting that `keeps` come from. Raises UserError when the checkpoint
    or a window does not fit, before anything is measured.
    """
    _check_sizes(prompt_tokens, new_tokens, rounds)
    # Loaded for the window that needs most, so that what does not fit is refused before the load.
    policy = min(policies, key=list(Policy).index)
    engine = Engine.open(replace(config, lazy=True, keep=_largest(keeps), policy=policy))
    try:
        _check_positions(engine, prompt_tokens, new_tokens)
        load = engine.load(
            prompt_tokens + new_tokens,
            prompt_tokens,
            on_progress,
            collects_logits=True,
            lowers_prefetch=False,
            flags=Flags(keep_flag, _SMALLER, keeps is None or len(keeps) > 1, WARMUP_TOKENS + 2),
        )
        notes = list(load.notes)
        if keeps is None:
            wanted = variants(load.num_layers, default_keeps(load.num_layers), policies, evicts, config.prefetch)
            too_large = {variant: bound for variant in wanted if (bound := _too_large(engine, variant))}
            chosen = [variant for variant in wanted if variant not in too_large]
            notes += _not_measured(wanted, too_large)
        else:
            known = [load.keep if keep is None else keep for keep in keeps]
            chosen = variants(load.num_layers, known, policies, evicts, config.prefetch)
            for variant in chosen:
                _lay(engine, variant)
        windows = [make_window(one.policy, load.num_layers, one.keep, one.prefetch) for one in chosen]
        uploads = max((window.uploads_per_token for window in windows if window), default=None)
        warnings = [
            *load.warnings,
            *_cut(keeps, load.num_layers, keep_flag),
            *too_far_ahead(config.prefetch, uploads),
        ]
        assert engine.backend is not None
        link = engine.backend.link_rate_gb_per_s()
        prompt_ids = _prompt(engine, prompt_tokens)
        num_done = 0

        def run(variant: Variant, logits: LogitsWish) -> RunReport:
            nonlocal num_done
            _lay(engine, variant)
            generation = engine.generate(prompt_ids, new_tokens, ignore_eos=True, logits=logits)
            for _ in generation:
                pass
            num_done += 1
            if on_progress:
                on_progress("bench", num_done, len(chosen) * (rounds + 1))
            return generation.report()

        runs = {variant: _Runs(run(variant, "hash"), []) for variant in chosen}
        for variant in _rounds(chosen, rounds):
            runs[variant].timed.append(run(variant, "none"))
        return BenchReport(
            card=load.device,
            backend=load.backend,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            rounds=rounds,
            link_gb_per_s=link,
            device_read_gb_per_s=runs[chosen[0]].checked.device_read_gb_per_s,
            all_equal=_all_equal(runs.values()),
            rows=tuple(_row(config, variant, runs[variant], link) for variant in chosen),
            notes=tuple(notes),
            warnings=tuple(dict.fromkeys(warnings)),
        )
    finally:
        engine.close()


def _check_sizes(prompt_tokens: int, new_tokens: int, rounds: int) -> None:
    sizes = (
        ("prompt_tokens", prompt_tokens, 1),
        ("new_tokens", new_tokens, WARMUP_TOKENS + 2),
        ("rounds", rounds, 1),
    )
    for name, value, least in sizes:
        if value < least:
            raise SettingError(f"{name} is {value}; it takes a whole number of at least {least}")


def _check_positions(engine: Engine, prompt_tokens: int, new_tokens: int) -> None:
    positions = engine.checkpoint.config.text.max_positions
    if prompt_tokens + new_tokens > positions:
        raise SettingError(
            f"{prompt_tokens} prompt tokens and {new_tokens} new ones are over the {positions} positions this model has"
            "; lower --prompt-tokens or --new-tokens"
        )


def _largest(keeps: Sequence[int | None] | None) -> int | None:
    """The keep that needs most memory: 0 is everything. None leaves the choice to the plan."""
    asked = [keep for keep in keeps or () if keep is not None]
    if not keeps or len(asked) < len(keeps):
        return None
    return 0 if 0 in asked else max(asked)


def _cut(keeps: Sequence[int | None] | None, num_layers: int, keep_flag: str) -> Iterator[str]:
    for keep in keeps or ():
        if keep is not None and keep > num_layers:
            yield f"{keep_flag} {keep} is more than the model's {num_layers} layers: {num_layers} are kept"


def _lay(engine: Engine, variant: Variant) -> None:
    engine.set_window(variant.keep, variant.policy, variant.prefetch, variant.evict)


def _too_large(engine: Engine, variant: Variant) -> str | None:
    """What a window is over that does not fit; None when it does."""
    try:
        _lay(engine, variant)
    except DoesNotFit as error:
        return error.bound
    return None


def _not_measured(wanted: Sequence[Variant], too_large: Mapping[Variant, str]) -> Iterator[str]:
    """A note for each bound on the windows that are over it; a rule is named where another of that size fits."""
    fitting = {variant.keep for variant in wanted if variant not in too_large}
    for bound in dict.fromkeys(too_large.values()):
        over = [variant for variant in wanted if too_large.get(variant) == bound]
        names = (f"{one.keep or 'off'}{f' ({one.policy})' if one.keep in fitting else ''}" for one in over)
        yield f"not measured, they do not fit {bound}: {', '.join(dict.fromkeys(names))}"


def _all_equal(runs: Iterable[_Runs]) -> bool:
    ids, logits = set(), set()
    for one in runs:
        ids |= {run.ids for run in (one.checked, *one.timed)}
        logits.add(one.checked.logits_sha256)
    return len(ids) == 1 and len(logits) == 1


def _rounds(chosen: Sequence[Variant], rounds: int) -> Iterator[Variant]:
    for _ in range(rounds):
        yield from chosen


def _prompt(engine: Engine, num_tokens: int) -> list[int]:
    """Ids drawn once and for all, so that runs can be compared; no image or video token among them."""
    config = engine.checkpoint.config
    usable = min(engine.tokenizer.size, config.text.vocab_size)
    drawn = np.random.default_rng(1).integers(0, usable, 2 * num_tokens + 8)
    banned = {config.image_token_id, config.video_token_id}
    return [int(token_id) for token_id in drawn if token_id not in banned][:num_tokens]


def _row(config: EngineConfig, variant: Variant, runs: _Runs, link: float | None) -> BenchRow:
    steps_ms = [ms for run in runs.timed for ms in run.timing.decode_ms[WARMUP_TOKENS:]]
    token_ms = median(steps_ms)
    last = runs.timed[-1]
    h2d_bytes = last.residency.h2d_bytes_per_token
    rate = h2d_bytes / token_ms / 1e6
    read_rate = last.bytes_read_per_token / token_ms / 1e6
    # Ids that a round chose differently are the ones worth showing.
    ids = next((run.ids for run in runs.timed if run.ids != runs.checked.ids), runs.checked.ids)
    return BenchRow(
        model=str(config.model),
        quant=config.quant.value,
        keep=variant.keep or "off",
        policy=variant.policy.value,
        evict=variant.evict.value,
        prefetch=variant.prefetch,
        weights_resident_end=last.residency.weights_resident_end,
        peak_device_bytes=max(run.residency.peak_device_bytes for run in runs.timed),
        ms_per_token_median=token_ms,
        ms_per_token_sd=stdev(steps_ms) if len(steps_ms) > 1 else None,
        bytes_read_per_token=last.bytes_read_per_token,
        read_gb_per_s=read_rate,
        read_share=read_rate / last.device_read_gb_per_s if last.device_read_gb_per_s else None,
        h2d_bytes_per_token=h2d_bytes,
        h2d_gb_per_s=rate,
        link_share=rate / link if link and h2d_bytes else None,
        ids=ids,
        ids_hash=hashlib.sha256(np.array(ids, np.int32).tobytes()).hexdigest(),
        logits_sha256=runs.checked.logits_sha256 or "",
    )
