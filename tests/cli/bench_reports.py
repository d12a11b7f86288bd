"""Bench reports with figures of a real card, for tests of what is printed."""

from __future__ import annotations

from dataclasses import replace

from kestrel_cuda.bench import BenchReport, BenchRow

OFF = BenchRow(
    model="/models/Qwen3-VL-2B-Instruct",
    quant="q8_0",
    keep="off",
    policy="past-only",
    evict="pool",
    prefetch=2,
    weights_resident_end=197,
    peak_device_bytes=2_900_000_000,
    ms_per_token_median=0.7123,
    ms_per_token_sd=0.0041,
    bytes_read_per_token=1_827_979_264,
    read_gb_per_s=2566.3,
    read_share=0.5716,
    h2d_bytes_per_token=0,
    h2d_gb_per_s=0.0,
    link_share=None,
    ids=(151643, 9707, 11, 198, 220, 16),
    ids_hash="9f",
    logits_sha256="c0ffee1234",
)
ONE = replace(
    OFF,
    keep=1,
    weights_resident_end=8,
    peak_device_bytes=700_000_000,
    ms_per_token_median=26.314,
    ms_per_token_sd=0.042,
    read_gb_per_s=69.468,
    read_share=0.01547,
    h2d_bytes_per_token=1_440_000_000,
    h2d_gb_per_s=54.72,
    link_share=0.9931,
)
PINNED = replace(ONE, policy="pinned")
FREED = replace(ONE, policy="both-sides", evict="free", ms_per_token_median=159.41, ms_per_token_sd=10.2)
REPORT = BenchReport(
    card="NVIDIA H200",
    backend="cuda",
    prompt_tokens=16,
    new_tokens=24,
    rounds=5,
    link_gb_per_s=55.1,
    device_read_gb_per_s=4490.2,
    all_equal=True,
    rows=(OFF, ONE),
    notes=("the embedding table stays in host memory",),
    warnings=("a stray file",),
)
