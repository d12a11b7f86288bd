"""What a run will cost before anything is loaded, and the window that fits. Arithmetic only; allocates nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from kestrel_cuda import passes
from kestrel_cuda.backends.base import MemoryInfo
from kestrel_cuda.config import DEFAULT_PREFETCH, EngineConfig, ModelConfig, Quant
from kestrel_cuda.errors import DeviceError, InternalError, SettingError
from kestrel_cuda.model.weights import DecoderWeights
from kestrel_cuda.plan_sizes import HEAD, LOADER_BYTES, Sizes
from kestrel_cuda.residency.window import make_window
from kestrel_cuda.sizes import enough_size, format_size

Q4_0_BYTES = 18 / 32
"""Of a weight."""


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes. `keep` 0 means everything resident; `prefetch` is what was wanted, or less where that fits.

    `rows` are (what, bytes), summing to the total.
    """

    keep: int
    prefetch: int
    ctx: int
    prefill_chunk: int
    embeddings_on: Literal["device", "host"]
    weight_budget_bytes: int
    rows: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.rows)


@dataclass(frozen=True)
class Flags:
    """What the caller's messages call the settings that a plan may have to refuse.

    `keep` is the flag of the window; `smaller` are those that need less memory when they are less. A caller that `lays`
    its own windows over what is loaded is told nothing of the one that was planned for. `least_new_tokens` is the
    fewest that it takes.
    """

    keep: str | None = "--keep"
    smaller: tuple[str, ...] = ("--ctx", "--prefetch", "--prefill-chunk")
    lays: bool = False
    least_new_tokens: int = 1


RUN_FLAGS = Flags()


class DoesNotFit(DeviceError):
    """A plan, or one window, is over what there is; `bound` says in words what that is."""

    def __init__(self, message: str, bound: str) -> None:
        super().__init__(message)
        self.bound = bound


def make_plan(
    config: EngineConfig,
    model: ModelConfig,
    weights: DecoderWeights,
    memory: MemoryInfo,
    *,
    ctx: int,
    num_prompt: int,
    embedding_bytes: int,
    on_gpu: bool,
    embeddings_on: Literal["device", "host"] | None = None,
    collects_logits: bool = False,
    held: Sequence[tuple[str, int]] = (),
    lowers_prefetch: bool = True,
    flags: Flags = RUN_FLAGS,
) -> Plan:
    """Fit weights, cache and work buffers into the memory there is; `embeddings_on` says where they lie already.

    `collects_logits` makes room for the prompt's last hidden rows, from which its logits are computed afterwards.
    `held` is what lies on the device beside all that: (what, bytes). Layers are fetched ahead as far as there is room
    for them, and a plan with fewer than wanted warns; without `lowers_prefetch` it is refused.

    Raises DoesNotFit when what was asked for does not fit, naming what would, and SettingError for a context longer
    than the model's positions.
    """
    most = model.text.max_positions
    if ctx > most:
        raise SettingError(f"--ctx {ctx} is over the {most} positions this model has; use at most that")
    refusal: DoesNotFit | None = None
    # More than all layers is no further ahead than all.
    fewer_ahead = range(min(config.prefetch, model.text.num_layers) - 1, -1, -1) if lowers_prefetch else ()
    for prefetch in (config.prefetch, *fewer_ahead):
        planner = _Planner(
            replace(config, prefetch=prefetch),
            model.text,
            weights,
            memory,
            ctx,
            num_prompt,
            embedding_bytes,
            on_gpu,
            embeddings_on,
            collects_logits,
            tuple(held),
            flags,
            config.prefetch,
        )
        try:
            plan = planner.plan()
        except DoesNotFit as error:
            # The last has the fewest layers fetched ahead, and so what is needed at the least.
            refusal = error
            continue
        if refusal is None:
            window = make_window(config.policy, model.text.num_layers, plan.keep, config.prefetch)
            uploads = window.uploads_per_token if window and not flags.lays else None
            return replace(plan, warnings=(*plan.warnings, *too_far_ahead(config.prefetch, uploads)))
        fewer = f"--prefetch {config.prefetch} does not fit {refusal.bound}: --prefetch {prefetch} is used"
        return replace(plan, warnings=(*plan.warnings, fewer))
    assert refusal is not None
    raise refusal


def too_far_ahead(prefetch: int, uploads: int | None) -> list[str]:
    """A warning where somebody wants more layers fetched ahead than a window uploads; None is no window."""
    # The default says what is usual, not what somebody wants.
    if uploads is None or prefetch <= max(uploads, DEFAULT_PREFETCH):
        return []
    if not uploads:
        return [f"--prefetch {prefetch} has nothing to fetch: no layer is uploaded again"]
    layers = "1 layer that is" if uploads == 1 else f"{uploads} layers that are"
    return [f"--prefetch {prefetch} is more than the {layers} uploaded again: no more are fetched ahead"]


@dataclass(frozen=True)
class _Planner(Sizes):
    """Chooses by the sizes, and says what would fit where nothing does."""

    flags: Flags
    asked_prefetch: int
    """Layers that were to be fetched ahead; the config has how many are looked at."""

    def plan(self) -> Plan:
        num_layers = self.text.num_layers
        keeps = (0, *range(num_layers - 1, 0, -1))
        best = next((keep for keep in keeps if self.fits(keep, self._hiding_chunk(keep))), None)
        if best is None:
            # Rather short passes than no window.
            if not self.fits(1, passes.LEAST_CHUNK):
                raise self._nothing_fits() if self.flags.keep else self._does_not_fit(self.config.keep or 0, None)
            best = 1
        keep = best
        notes: list[str] = []
        warnings: list[str] = []
        if self.config.keep is not None:
            keep = min(self.config.keep, num_layers)
            if keep < self.config.keep:
                too_many = f"{self.flags.keep} {self.config.keep} is more than the model's {num_layers} layers"
                warnings.append(f"{too_many}: {num_layers} are kept")
        elif best and not self.flags.lays:
            notes.append(
                f"the weights do not fit {self.bound(0)} whole, with room for passes over the prompt: a window of "
                f"{self.flags.keep} {best} of {num_layers} layers is used"
            )
        if not self.fits(keep, passes.LEAST_CHUNK):
            raise self._does_not_fit(keep, best)
        room = self._longest_chunk(keep)
        chunk = self.rows_a_pass(passes.even_chunk(self.num_prompt, room))
        if self.embeddings_on is not None:
            on_device = self.embeddings_on == "device"
        else:
            # Passes go before the table: a token reads one row of it.
            on_device = self.on_gpu and self.fits(keep, chunk, embeddings_on_device=True)
        if room < passes.USUAL_CHUNK and chunk < self.num_prompt and not self.flags.lays:
            notes.append(self._short_passes(keep, chunk))
        if self.on_gpu and not on_device:
            notes.append(f"the embedding table ({format_size(self.embedding_bytes)}) stays in host memory")
        return Plan(
            keep,
            self.config.prefetch,
            self.ctx,
            chunk,
            "device" if on_device else "host",
            min(self.cache_budget_bytes, self.total_bytes),
            tuple(self.rows(keep, chunk, on_device)),
            tuple(notes),
            tuple(warnings),
        )

    def _hiding_chunk(self, keep: int) -> int:
        """Rows a pass for which room is kept before layers."""
        window = make_window(self.config.policy, self.text.num_layers, keep, self.config.prefetch)
        if window is None:
            return passes.RESIDENT_CHUNK
        share = window.uploads_per_token / self.text.num_layers
        return passes.hiding_chunk(self.num_prompt, share, self.bytes_per_weight)

    def _longest_chunk(self, keep: int) -> int:
        """Of the lengths tried, the most for which there is room; the most of all where the length is given."""
        most = passes.MOST_RESIDENT_CHUNK if keep == 0 else passes.MOST_WINDOW_CHUNK
        fitting = (chunk for chunk in passes.lengths(most) if self.fits(keep, chunk))
        return next(fitting, passes.LEAST_CHUNK)

    def _short_passes(self, keep: int, chunk: int) -> str:
        taken = f"the {self.num_prompt} tokens of the prompt take {-(-self.num_prompt // chunk)} passes of {chunk} rows"
        window = make_window(self.config.policy, self.text.num_layers, keep, self.config.prefetch)
        if window is None:
            return f"the weights fit {self.bound(0)} whole with little room beside them: {taken}"
        uploads = f"each uploads {window.uploads_per_token} layers"
        return f"a window of {keep} layers leaves little room in {self.bound(keep)}: {taken}, and {uploads}"

    def _does_not_fit(self, keep: int, best: int | None) -> DoesNotFit:
        """`best` is the largest window that fits, 0 for everything resident."""
        over_budget = self.breaks_budget(keep)
        needed = enough_size(self.weight_bytes(keep) if over_budget else self.needed_bytes(keep))
        message = f"keeping {keep or 'all'} of {self.text.num_layers} layers resident needs {needed}"
        message += f"{' of weights' if over_budget else ''}, more than {self.bound(keep)}"
        if best == 0:
            message += "; everything resident fits"
        elif self.flags.keep:
            message += f"; {self.flags.keep} {best} fits"
            if self.config.prefetch < self.asked_prefetch:
                message += f" with --prefetch {self.config.prefetch}"
        elif over_budget or self.config.vram_bytes is not None:
            message += f"; give {'--cache-budget' if over_budget else '--vram'} {needed}"
        return DoesNotFit(message, self.bound(keep))

    def _nothing_fits(self) -> DoesNotFit:
        rows = self.rows(1, passes.LEAST_CHUNK, False)
        enough = []
        if self.needed_bytes(1) > self.total_bytes:
            enough.append(f"--vram {enough_size(self.needed_bytes(1))}")
        if self.weight_bytes(1) > self.cache_budget_bytes and self.config.cache_budget is not None:
            enough.append(f"--cache-budget {enough_size(self.weight_bytes(1))}")
        if self.breaks_budget(1):
            rows = [row for row in rows if row[0] in (self.layers_name(1), HEAD)]
        elif self.load_bytes(1) > sum(num_bytes for _, num_bytes in rows):
            slab_bytes = max(layout.num_bytes for layout in self.weights.layouts)
            rows = [rows[0], ("the largest part while it loads", slab_bytes), ("its scratch", LOADER_BYTES), *self.held]
        parts = ", ".join(f"{what} {format_size(b)}" for what, b in rows if b)
        message = f"{self.bound(1)} cannot hold even a window of one layer; {' with '.join(enough)} would ({parts})"
        alone = " or ".join(self._enough_alone())
        if self._asked == 1:
            message += f"; so would {alone}" if alone else ""
        elif not self.breaks_budget(1):
            named = f"{self.flags.keep} {self._asked or 'off'}"
            message += f", {named} takes --vram {enough_size(self.needed_bytes(self._asked))}"
            message += f" or {alone}" if alone else ""
        return DoesNotFit(message, self.bound(1))

    @property
    def _asked(self) -> int:
        """The window that was asked for, 0 for everything resident; one layer where none was."""
        return 1 if self.config.keep is None else min(self.config.keep, self.text.num_layers)

    def _enough_alone(self) -> list[str]:
        """Settings of which one, changed no more than it takes, lets the window that was asked for fit."""
        found = []
        for flag in self.flags.smaller:
            values = self._smaller(flag)
            # The larger a setting is, the more it takes.
            number = bisect_right(values, False, key=partial(self._is_too_much, flag))
            if number:
                found.append(f"{flag} {values[number - 1]}")
        if self.config.quant is not Quant.Q4_0 and self._fits_in_four_bits():
            found.append("--quant q4_0")
        return found

    def _smaller(self, flag: str) -> range:
        """Values of a flag below the one it has, of which the least may be of use."""
        match flag:
            case "--ctx":
                return range(self.num_prompt + 1, self.ctx)
            case "--new-tokens":
                return range(self.flags.least_new_tokens, self.ctx - self.num_prompt)
            case "--prompt-tokens":
                return range(1, self.num_prompt)
            case "--prefetch":
                return range(self.config.prefetch)
            case "--prefill-chunk":
                return range(1, self.rows_a_pass(passes.LEAST_CHUNK))
            case _:
                raise InternalError(f"what a smaller {flag} takes is not known")

    def _is_too_much(self, flag: str, value: int) -> bool:
        return not self._with(flag, value).fits(self._asked, passes.LEAST_CHUNK)

    def _with(self, flag: str, value: int) -> _Planner:
        match flag:
            case "--ctx":
                return replace(self, ctx=value)
            case "--new-tokens":
                return replace(self, ctx=self.num_prompt + value)
            case "--prompt-tokens":
                return replace(self, num_prompt=value, ctx=self.ctx - self.num_prompt + value)
            case "--prefetch":
                return replace(self, config=replace(self.config, prefetch=value))
            case _:
                return replace(self, config=replace(self.config, prefill_chunk=value))

    def _fits_in_four_bits(self) -> bool:
        """Whether that window would fit if every weight took as many bytes as in q4_0."""
        keep, share = self._asked, Q4_0_BYTES / self.bytes_per_weight
        weight_bytes = int(self.weight_bytes(keep) * share)
        total_bytes = sum(b for _, b in self.rows(keep, passes.LEAST_CHUNK, False))
        total_bytes += weight_bytes - self.weight_bytes(keep)
        fixed_bytes = self.memory.context_bytes + self.held_bytes + (LOADER_BYTES if self.on_gpu else 0)
        peak_bytes = max(total_bytes, fixed_bytes + int((self.load_bytes(keep) - fixed_bytes) * share))
        return peak_bytes <= self.total_bytes and weight_bytes <= self.cache_budget_bytes
