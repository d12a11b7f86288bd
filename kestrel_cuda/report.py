"""What a load and a run measured: plain frozen dataclasses with units in their names. Measures and prints nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

StopReason = Literal["eos", "length", "interrupt", "error"]


@dataclass(frozen=True)
class Token:
    """One chosen id. `text` is what it completes ("" inside a character and for end tokens).

    `time_ms` is the time since the id before it; for step 0 the time to first token, loading excluded.
    """

    step: int
    token_id: int
    text: str
    time_ms: float


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What loading is about to take. `keep` 0 means everything resident.

    `kv_bytes_per_slot` is what a token of context takes in the key-value cache over all layers, scales counted in: a
    later token reads that much of it. `host_copy_bytes` is what packed weights take in host memory beside the device.
    `notes` are one-line facts worth saying.
    """

    backend: str
    device: str
    num_layers: int
    keep: int
    ctx: int
    kv: str
    kv_bytes_per_slot: int
    prefill_chunk: int
    embeddings_on: Literal["device", "host"]
    planned_device_bytes: int
    host_copy_bytes: int
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LoadReport(PlanReport):
    """The plan, and what loading found."""

    model: str
    num_weights: int
    quant: dict[str, str]
    dtypes: dict[str, int]
    tied: bool
    eos_ids: tuple[int, ...]
    template_source: str | None
    load_ms: float


@dataclass(frozen=True)
class ResidencyReport:
    """Where the weights were during a run. Fused members count one each; lm_head counts as a weight."""

    weights_resident_end: int
    layers_resident_end: int
    prefetched_layers: int
    peak_layers: int
    peak_weight_bytes: int
    uploads_per_token: float
    layer_uploads: tuple[int, ...]
    h2d_bytes_per_token: int
    evictions: int
    cache_hits: int
    cache_misses: int
    pool_hits: int
    pool_misses: int
    host_pinned_bytes: int
    embed_host_bytes: int
    peak_device_bytes: int


@dataclass(frozen=True)
class TimingReport:
    """Times of a run. `decode_ms[i]` is the time from id i to id i+1; the median leaves the first out."""

    load_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: tuple[float, ...]
    tpot_ms_median: float | None


@dataclass(frozen=True)
class RunReport:
    """Everything a run can say once it has stopped.

    `logits_sha256` is over the float32 bytes of all prompt logits, then all step logits, rows in order;
    None when logits were not asked for. A token behind the prompt stands at the cache's length plus `rope_delta`, which
    is 0 without pictures.

    `bytes_read_per_token` counts weights alone, every layer and lm_head once, as they are stored: 34/32 bytes a
    weight with q8_0, 18/32 with q4_0, 258/256 with g256, and what fills up odd shapes (none in the released ones).
    The key-value cache (`LoadReport.kv_bytes_per_slot` for each slot filled), norms and activations are left out.
    `read_gb_per_s` is that over the median time; `device_read_gb_per_s` the card's read rate, measured while
    loading (None on the CPU, under a memory bound and where less than 2 GiB was free).
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    stop_reason: StopReason
    residency: ResidencyReport
    timing: TimingReport
    bytes_read_per_token: int
    read_gb_per_s: float | None
    device_read_gb_per_s: float | None
    logits_sha256: str | None
    warnings: tuple[str, ...] = field(default=())
    rope_delta: int = 0

    @property
    def read_share(self) -> float | None:
        """Of the card's read rate; None where either rate is unknown."""
        if self.read_gb_per_s is None or self.device_read_gb_per_s is None:
            return None
        return self.read_gb_per_s / self.device_read_gb_per_s
