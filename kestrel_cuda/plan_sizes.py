"""What a run takes of device memory, as functions of the window. Arithmetic only; chooses nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kestrel_cuda import passes
from kestrel_cuda.backends.base import MemoryInfo
from kestrel_cuda.config import EngineConfig, Quant, TextConfig
from kestrel_cuda.model.kv_cache import kv_cache_bytes
from kestrel_cuda.model.text import workspace_bytes
from kestrel_cuda.model.weights import DecoderWeights
from kestrel_cuda.residency.window import make_window
from kestrel_cuda.sizes import format_size

FREE_MARGIN_BYTES = 512 << 20
LOADER_BYTES = 72 << 20
"""Scratch that packing takes on a GPU while weights load; gone before the first token."""

GRAPH_BYTES = 32 << 20
"""What the driver takes for captured launches and for kernels loaded later."""

SEEDS_MOST_BYTES, SEEDS_LEAST_BYTES = 24 << 30, 256 << 20

HEAD = "lm_head"


def seeds_budget_bytes(free_bytes: int) -> int:
    """Half of free memory, at most 24 GiB, at least 256 MiB."""
    return max(SEEDS_LEAST_BYTES, min(SEEDS_MOST_BYTES, free_bytes // 2))


def most_bytes(memory: MemoryInfo, held_bytes: int, vram_bytes: int | None) -> int:
    """What this process may have of a GPU, its context and the `held_bytes` that stay counted in."""
    if vram_bytes is not None:
        return vram_bytes
    return memory.free_bytes + held_bytes + memory.context_bytes - FREE_MARGIN_BYTES


@dataclass(frozen=True)
class Sizes:
    """Bytes of what was asked for; `keep` 0 is everything resident, `held` lies on the device beside all that."""

    config: EngineConfig
    text: TextConfig
    weights: DecoderWeights
    memory: MemoryInfo
    ctx: int
    num_prompt: int
    embedding_bytes: int
    on_gpu: bool
    embeddings_on: Literal["device", "host"] | None
    collects_logits: bool
    held: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        if self.on_gpu:
            return most_bytes(self.memory, self.held_bytes, self.config.vram_bytes)
        return self.memory.total_bytes if self.config.vram_bytes is None else self.config.vram_bytes

    def breaks_budget(self, keep: int) -> bool:
        """Whether the weights of a window alone are over --cache-budget, which bounds nothing else."""
        return self.weight_bytes(keep) > self.cache_budget_bytes < self.total_bytes

    def bound(self, keep: int) -> str:
        """What a window that does not fit is over, in words."""
        if self.breaks_budget(keep):
            return f"--cache-budget {format_size(self.cache_budget_bytes)}"
        if self.config.vram_bytes is not None:
            return f"--vram {format_size(self.config.vram_bytes)}"
        return f"{format_size(self.memory.free_bytes)} free"

    @property
    def cache_budget_bytes(self) -> int:
        match self.config.cache_budget:
            case None:
                return self.total_bytes
            case "seeds":
                return seeds_budget_bytes(self.memory.free_bytes)
            case budget:
                return budget

    def fits(self, keep: int, chunk: int, *, embeddings_on_device: bool = False) -> bool:
        embeddings_on_device |= self.embeddings_on == "device"
        peak = max(sum(b for _, b in self.rows(keep, chunk, embeddings_on_device)), self.load_bytes(keep))
        return peak <= self.total_bytes and self.weight_bytes(keep) <= self.cache_budget_bytes

    def needed_bytes(self, keep: int) -> int:
        """The least total that holds a window of `keep`: the shortest passes, embeddings on the host."""
        return max(sum(b for _, b in self.rows(keep, passes.LEAST_CHUNK, False)), self.load_bytes(keep))

    def rows(self, keep: int, chunk: int, embeddings_on_device: bool) -> list[tuple[str, int]]:
        text, chunk = self.text, self.rows_a_pass(chunk)
        norm_bytes = 4 * (text.num_layers * (2 * text.hidden_size + 2 * text.head_dim) + text.hidden_size)
        table_bytes = 4 * self.ctx * text.head_dim + 4 * (self.ctx + 2)
        return [
            ("driver context, kernels and captures", self.memory.context_bytes + (GRAPH_BYTES if self.on_gpu else 0)),
            (self.layers_name(keep), self.peak_layers(keep) * self.layer_bytes),
            (HEAD, self.weights.lm_head.num_bytes),
            ("embeddings", self.embedding_bytes if embeddings_on_device else 0),
            ("norms and rotation tables", norm_bytes + table_bytes),
            (f"key-value cache, {self.ctx} slots", kv_cache_bytes(text, self.ctx, self.config.kv_dtype)),
            (f"work buffers, {chunk} rows", self.work_bytes(chunk)),
            ("prompt rows kept for their logits", 4 * self.num_prompt * text.hidden_size * self.collects_logits),
            *self.held,
        ]

    def layers_name(self, keep: int) -> str:
        return f"weights of {self.peak_layers(keep)} of {self.text.num_layers} layers at the peak"

    def peak_layers(self, keep: int) -> int:
        window = make_window(self.config.policy, self.text.num_layers, keep, self.config.prefetch)
        return window.peak_layers if window else self.text.num_layers

    @property
    def held_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.held)

    @property
    def layer_bytes(self) -> int:
        return max(layout.num_bytes for layout in self.weights.layers)

    @property
    def bytes_per_weight(self) -> float:
        layer = max(self.weights.layers, key=lambda layout: layout.num_bytes)
        matrices = (entry.geometry for entry in layer.entries)
        return layer.num_bytes / sum(matrix.num_inputs * matrix.num_outputs for matrix in matrices)

    def weight_bytes(self, keep: int) -> int:
        return self.peak_layers(keep) * self.layer_bytes + self.weights.lm_head.num_bytes

    def load_bytes(self, keep: int) -> int:
        """The peak while weights load: everything packed so far, or one slab, beside the loader's scratch."""
        whole = keep == 0 and not self.config.lazy
        slabs = [layout.num_bytes for layout in self.weights.layouts]
        scratch = LOADER_BYTES if self.on_gpu else 0
        return self.memory.context_bytes + self.held_bytes + (sum(slabs) if whole else max(slabs)) + scratch

    def rows_a_pass(self, chunk: int) -> int:
        if not self.on_gpu:
            # The CPU's float32 products round differently in passes of different length: one length for every window.
            chunk = passes.CPU_CHUNK
        return max(1, min(self.config.prefill_chunk or chunk, self.num_prompt))

    def work_bytes(self, chunk: int) -> int:
        text = self.text
        # Of few rows, and of one row with a flag beside each value.
        splits = (min(chunk, 8) + 2) * text.num_heads * -(-self.ctx // 256) * (text.head_dim + 2) * 4
        attention = splits + chunk * text.q_size * 4 + 4 * text.num_kv_heads
        return workspace_bytes(text, self.weights, chunk, self.config.quant is not Quant.NONE) + attention
