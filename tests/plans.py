"""Plans for released shapes on a card of some size, for the tests of plan.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kestrel_cuda.backends.base import MemoryInfo
from kestrel_cuda.config import EngineConfig, ModelConfig, Policy, Quant, TextConfig
from kestrel_cuda.model.weights import plan_weights
from kestrel_cuda.plan import (
    RUN_FLAGS,
    Flags,
    Plan,
    make_plan,
)
from kestrel_cuda.quant.packed import Element

MIB, GIB = 1 << 20, 1 << 30
L = 28
TEXT = TextConfig(
    hidden_size=2048,
    num_layers=L,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=6144,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    rope_theta=5e6,
    mrope_section=(24, 20, 20),
    max_positions=262144,
)
TEXT_8B = replace(TEXT, hidden_size=4096, num_layers=36, num_heads=32, intermediate_size=12288)
EMBEDDING_BYTES = 2 * TEXT.vocab_size * TEXT.hidden_size
DRIVER_BYTES = 500 * MIB


def plan(
    text: TextConfig = TEXT,
    *,
    free: int = 140 * GIB,
    used: int = DRIVER_BYTES,
    ctx: int = 1024,
    num_prompt: int = 512,
    on_gpu: bool = True,
    collects_logits: bool = False,
    lowers_prefetch: bool = True,
    flags: Flags = RUN_FLAGS,
    **config: Any,
) -> Plan:
    """A plan, for the 2B shape unless told, on a card with `free` bytes left; nothing is fetched ahead unless asked."""
    model = ModelConfig("Qwen3VLForConditionalGeneration", text, True, None, None, None)
    engine = EngineConfig(model=Path("model"), **{"prefetch": 0, "policy": Policy.PAST_ONLY} | config)
    weights = plan_weights(model, engine.quant, lambda key: Element.BF16)
    return make_plan(
        engine,
        model,
        weights,
        MemoryInfo(free, free + used, 0, 0, used if on_gpu else 0),
        ctx=ctx,
        num_prompt=num_prompt,
        embedding_bytes=2 * text.vocab_size * text.hidden_size,
        on_gpu=on_gpu,
        collects_logits=collects_logits,
        lowers_prefetch=lowers_prefetch,
        flags=flags,
    )


def row(made: Plan, beginning: str) -> int:
    return next(num_bytes for what, num_bytes in made.rows if what.startswith(beginning))


def layer_bytes(quant: Quant = Quant.Q8_0) -> int:
    model = ModelConfig("", TEXT, True, None, None, None)
    return plan_weights(model, quant, lambda key: Element.BF16).layers[0].num_bytes
