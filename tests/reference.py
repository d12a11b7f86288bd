"""Logits of a text prompt in float64, straight from a checkpoint's files: a second, plain reading of the model.

For shapes the goldens do not have; where they have one, test_reference.py holds it to them. Knows no product code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.checkpoints import read_tensors

Array = NDArray[np.float64]
PREFIX = "model.language_model."


def text_logits(folder: Path, ids: Sequence[int]) -> Array:
    """[S, V] of one prompt."""
    text: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    stored = read_tensors(folder)

    def w(name: str) -> Array:
        return stored[name].to_float32().astype(np.float64)

    def rms(x: Array, weight: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + text["rms_norm_eps"]) * weight

    num_tokens, d = len(ids), text["head_dim"]
    per_kv = text["num_attention_heads"] // text["num_key_value_heads"]
    theta = text.get("rope_theta") or text["rope_parameters"]["rope_theta"]
    angles = np.arange(num_tokens)[:, None] * float(theta) ** (-np.arange(0, d, 2) / d)
    turn = np.exp(1j * angles)[:, None]

    def heads(x: Array, norm: str | None = None) -> Array:
        x = x.reshape(num_tokens, -1, d)
        if norm is None:
            return x
        x = rms(x, w(norm))
        turned = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    future = np.triu(np.full((num_tokens, num_tokens), -np.inf), 1)
    embedding = w(PREFIX + "embed_tokens.weight")
    h = embedding[list(ids)]
    for layer in range(text["num_hidden_layers"]):
        at = f"{PREFIX}layers.{layer}."
        x = rms(h, w(at + "input_layernorm.weight"))
        q = heads(x @ w(at + "self_attn.q_proj.weight").T, at + "self_attn.q_norm.weight")
        k = heads(x @ w(at + "self_attn.k_proj.weight").T, at + "self_attn.k_norm.weight").repeat(per_kv, axis=1)
        v = heads(x @ w(at + "self_attn.v_proj.weight").T).repeat(per_kv, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(d) + future
        p = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), v).reshape(num_tokens, -1)
        h = h + attended @ w(at + "self_attn.o_proj.weight").T
        x = rms(h, w(at + "post_attention_layernorm.weight"))
        gate, up = x @ w(at + "mlp.gate_proj.weight").T, x @ w(at + "mlp.up_proj.weight").T
        h = h + (gate / (1 + np.exp(-gate)) * up) @ w(at + "mlp.down_proj.weight").T
    head = w("lm_head.weight") if "lm_head.weight" in stored else embedding
    return rms(h, w(PREFIX + "norm.weight")) @ head.T
