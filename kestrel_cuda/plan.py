"""What a run will cost before anything is loaded, and the window that fits. Arithmetic only; allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kestrel_cuda.backends.base import MemoryInfo
from kestrel_cuda.config import CacheBudget, EngineConfig, ModelConfig, Quant
from kestrel_cuda.errors import DeviceError, SettingError
from kestrel_cuda.model.kv_cache import kv_cache_bytes
from kestrel_cuda.model.text import workspace_bytes
from kestrel_cuda.model.weights import DecoderWeights
from kestrel_cuda.residency.window import make_window
from kestrel_cuda.sizes import format_size

RESIDENT_CHUNK = 512
WINDOW_CHUNK = 2048
"""Prompt rows a pass: a window uploads every layer once a pass, so its passes are long."""

FREE_MARGIN_BYTES = 512 << 20
LOADER_BYTES = 144 << 20
"""Scratch that packing takes while weights load; gone before the first token."""

MAX_CONTEXT_BYTES = 768 << 20
"""The most of what is in use at start that counts as this process's own driver context."""

SEEDS_MOST_BYTES, SEEDS_LEAST_BYTES = 24 << 30, 256 << 20


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes. `keep` 0 means everything resident; `rows` are (what, bytes), summing to the total."""

    keep: int
    ctx: int
    prefill_chunk: int
    embeddings_on: Literal["device", "host"]
    weight_budget_bytes: int
    rows: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.rows)


def seeds_budget_bytes(free_bytes: int) -> int:
    """Half of free memory, at most 24 GiB, at least 256 MiB."""
    return max(SEEDS_LEAST_BYTES, min(SEEDS_MOST_BYTES, free_bytes // 2))


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
) -> Plan:
    """Fit weights, cache and work buffers into the memory there is.

    Raises DeviceError when what was asked for does not fit, naming the keep that would, and SettingError for a
    context longer than the model's positions.
    """
    text = model.text
    if ctx > text.max_positions:
        raise SettingError(f"--ctx {ctx} is over the {text.max_positions} positions this model has; use at most that")
    context_bytes = min(memory.used_at_start_bytes, MAX_CONTEXT_BYTES)
    if config.vram_bytes is not None:
        total, bound = config.vram_bytes, f"--vram {format_size(config.vram_bytes)}"
    else:
        total = memory.free_bytes + context_bytes - FREE_MARGIN_BYTES if on_gpu else memory.total_bytes
        bound = f"{format_size(memory.free_bytes)} free"
    layer_bytes = max(layout.num_bytes for layout in weights.layers)
    lm_head_bytes = weights.lm_head.num_bytes
    kv_bytes = kv_cache_bytes(text, ctx, config.kv_dtype)
    table_bytes = 4 * ctx * text.head_dim + 4 * (ctx + 3)
    norm_bytes = 4 * (text.num_layers * (2 * text.hidden_size + 2 * text.head_dim) + text.hidden_size)

    def rows(keep: int, embeddings_on_device: bool) -> list[tuple[str, int]]:
        chunk = _chunk(config, keep, num_prompt)
        window = make_window(config.policy, text.num_layers, keep, config.prefetch)
        resident = window.peak_layers if window else text.num_layers
        return [
            ("driver context and kernels", context_bytes),
            (f"weights of {resident} of {text.num_layers} layers at the peak", resident * layer_bytes),
            ("lm_head", lm_head_bytes),
            ("embeddings", embedding_bytes if embeddings_on_device else 0),
            ("norms and rotation tables", norm_bytes + table_bytes),
            (f"key-value cache, {ctx} slots", kv_bytes),
            (f"work buffers, {chunk} rows", _work_bytes(config, model, weights, chunk, ctx)),
        ]

    def fits(keep: int, embeddings_on_device: bool) -> bool:
        planned = rows(keep, embeddings_on_device)
        weight_bytes = planned[1][1] + planned[2][1]
        return sum(b for _, b in planned) <= total and weight_bytes <= cache_budget

    cache_budget = _cache_budget_bytes(config.cache_budget, memory.free_bytes, total)
    choices = [0, *range(text.num_layers - 1, 0, -1)]
    best = next((keep for keep in choices if fits(keep, False)), None)
    if best is None:
        needed = sum(b for _, b in rows(1, False))
        raise DeviceError(
            f"{bound} cannot hold even a window of one layer: {format_size(needed)} are needed "
            f"({', '.join(f'{what} {format_size(b)}' for what, b in rows(1, False) if b)}); "
            "a smaller --ctx, --prefill-chunk or --quant q4_0 needs less"
        )
    notes: list[str] = []
    keep = best if config.keep is None else config.keep
    if config.keep is None and best:
        notes.append(
            f"the weights do not fit {bound} whole: a window of --keep {best} of {text.num_layers} layers is used"
        )
    elif keep and keep > text.num_layers:
        notes.append(f"--keep {keep} is more than the model's {text.num_layers} layers: {text.num_layers} are kept")
        keep = text.num_layers
    if not fits(keep, False):
        fitting = "everything resident" if best == 0 else f"--keep {best}"
        raise DeviceError(
            f"keeping {'all' if keep == 0 else keep} of {text.num_layers} layers resident needs "
            f"{format_size(sum(b for _, b in rows(keep, False)))}, but there are {bound}; {fitting} fits"
        )
    on_device = on_gpu and fits(keep, True)
    if on_gpu and not on_device:
        notes.append(f"the embedding table ({format_size(embedding_bytes)}) stays in host memory")
    planned = rows(keep, on_device)
    return Plan(
        keep,
        ctx,
        _chunk(config, keep, num_prompt),
        "device" if on_device else "host",
        min(cache_budget, total),
        tuple(planned),
        tuple(notes),
    )


def _chunk(config: EngineConfig, keep: int, num_prompt: int) -> int:
    most = config.prefill_chunk or (WINDOW_CHUNK if keep else RESIDENT_CHUNK)
    return max(1, min(most, num_prompt))


def _work_bytes(config: EngineConfig, model: ModelConfig, weights: DecoderWeights, chunk: int, ctx: int) -> int:
    text = model.text
    attention = min(chunk, 8) * text.num_heads * -(-ctx // 256) * (text.head_dim + 2) * 4 + chunk * text.q_size * 4
    return workspace_bytes(text, weights, chunk, config.quant is not Quant.NONE) + attention


def _cache_budget_bytes(budget: CacheBudget, free_bytes: int, total_bytes: int) -> int:
    if budget is None:
        return total_bytes
    return seeds_budget_bytes(free_bytes) if budget == "seeds" else budget
