"""What the model computes in training: transformers' own modules in an order that is quick over many small pictures.

transformers attends to each picture in a call of its own, pads rows, finds positions in Python loops and computes
logits of every token. Here pictures share their calls, as rows do, positions come with the batch, and only answers get
logits: the same function of the same parameters, which `largest_difference` shows. PyTorch and transformers are
imported when they are needed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from kestrel_cuda.config import Grid
from scripts.make_tiny_model import TinyModel
from scripts.tiny_model.batches import MOST_IDS, MOST_PATCHES, Batch, scaled_values
from scripts.tiny_model.checkpoint import model_config, the_tokenizer

Tensor = Any
Arrays = dict[str, Tensor]


def missing_packages() -> str | None:
    """The first package that is needed and not installed."""
    return next((name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None), None)


def build(model: TinyModel, seed: int) -> Any:
    """A Qwen3VLForConditionalGeneration of the sizes of `model`, float32 on the CPU, its weights drawn from `seed`."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    # The configuration says bfloat16, which is how weights are stored.
    network = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**model_config(model, the_tokenizer()))).float()
    network.train()
    random = torch.Generator().manual_seed(seed)
    depths = {"language_model": 2 * model.num_layers, "visual.blocks": 2 * model.vision_depth}
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(float("norm" in name and name.endswith("weight")))
                continue
            if "patch_embed" in name:
                # Both frames of a picture's patch are the same picture: each gets half of one weight.
                half = torch.randn(parameter[:, :, 0].shape, generator=random) * parameter[0, :, 0].numel() ** -0.5 / 2
                parameter.copy_(half[:, :, None].expand_as(parameter))
                continue
            std = 0.05 if "embed" in name else parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight")):
                std *= next(depth for part, depth in depths.items() if part in name) ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=random) * std)
    return network


def to_tensors(batch: Batch) -> Arrays:
    """The arrays of a batch as tensors on the CPU, without a copy."""
    import torch

    return {name: torch.from_numpy(values) for name, values in batch.arrays().items()}


@dataclass(frozen=True)
class Steps:
    """The two steps that repeat, so that they can be compiled; every block and every layer is the same program."""

    block: Callable[..., Tensor]
    layer: Callable[..., Tensor]


def answer_logits(network: Any, arrays: Arrays, steps: Steps | None = None) -> Tensor:
    """Logits [A, V] at the places that predict the ids of answers; `arrays` are a batch's, on the network's device."""
    inner, steps = network.model, steps or PLAIN
    has_pictures = len(arrays["visual_at_t"]) > 0
    tokens_tn, deepstack = tower(inner.visual, arrays, steps) if has_pictures else (None, [])
    h_sn = decoder(inner.language_model, arrays, tokens_tn, deepstack, steps)
    return network.lm_head(h_sn.index_select(0, arrays["answer_at_a"])).float()


def tower(visual: Any, arrays: Arrays, steps: Steps) -> tuple[Tensor, list[Tensor]]:
    """Features of every picture's tokens [T, n], and deepstack features of that shape."""
    import torch
    from torch.nn import functional

    device = arrays["values_u8"].device
    pixels_pk = scaled_on(device)[arrays["values_u8"].int()]
    embed = visual.patch_embed.proj
    h = functional.linear(pixels_pk, embed.weight.sum(2).flatten(1), embed.bias)
    # As a product with the table, whose gradient is one too; rows of shares are zero but for four entries.
    shares = torch.zeros(len(h), len(visual.pos_embed.weight), device=device)
    shares.scatter_add_(1, arrays["taps_p4"], arrays["shares_p4"])
    h = h + shares @ visual.pos_embed.weight
    head_dim = visual.blocks[0].attn.head_dim
    exponents = torch.arange(0, head_dim // 2, 2, device=device, dtype=torch.float32) / (head_dim // 2)
    angles = (arrays["places_p2"][:, :, None] * visual_theta(visual) ** -exponents).flatten(1)
    turn = torch.cat([angles, angles], dim=1)
    cos, sin = turn.cos()[:, None], turn.sin()[:, None]
    levels: list[Tensor] = []
    for number, block in enumerate(visual.blocks):
        h = steps.block(block, h, cos, sin, arrays["picture_starts"])
        if number in visual.deepstack_visual_indexes:
            levels.append(visual.deepstack_merger_list[len(levels)](h))
    return visual.merger(h), levels


def block_step(block: Any, h_pn: Tensor, cos: Tensor, sin: Tensor, starts: Tensor) -> Tensor:
    """A block of the tower, every patch attending to those of its own picture."""
    attention = block.attn
    q, k, v = attention.qkv(block.norm1(h_pn)).view(len(h_pn), 3, attention.num_heads, -1).unbind(1)
    q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
    out = attend(q, k, v, starts, MOST_PATCHES, False)
    h_pn = h_pn + attention.proj(out.flatten(1))
    return h_pn + block.mlp(block.norm2(h_pn))


def layer_step(layer: Any, h_sn: Tensor, cos: Tensor, sin: Tensor, starts: Tensor) -> Tensor:
    """A layer of the decoder, every token attending to itself and those before it in its own row."""
    attention = layer.self_attn
    x, heads = layer.input_layernorm(h_sn), (len(h_sn), -1, attention.head_dim)
    q = attention.q_norm(attention.q_proj(x).view(heads))
    k = attention.k_norm(attention.k_proj(x).view(heads))
    v = attention.v_proj(x).view(heads)
    q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
    k, v = (part.repeat_interleave(attention.num_key_value_groups, dim=1) for part in (k, v))
    h_sn = h_sn + attention.o_proj(attend(q, k, v, starts, MOST_IDS, True).flatten(1))
    return h_sn + layer.mlp(layer.post_attention_layernorm(h_sn))


def attend(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, starts: Tensor, most: int, is_causal: bool) -> Tensor:
    """Attention within pieces of at most `most` tokens, each from one of `starts` to the next.

    One call for all pieces in bfloat16 on a GPU, one a piece elsewhere.
    """
    import torch
    from torch.nn import functional
    from torch.nn.attention.varlen import varlen_attn

    if q_thd.is_cuda and q_thd.dtype is torch.bfloat16:
        window = (-1, 0) if is_causal else (-1, -1)
        return varlen_attn(q_thd, k_thd, v_thd, starts, starts, most, most, window_size=window)
    lengths = starts.diff().tolist()
    pieces = zip(*(part.transpose(0, 1).split(lengths, dim=1) for part in (q_thd, k_thd, v_thd)), strict=True)
    outs = [functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal) for q, k, v in pieces]
    return torch.cat(outs, dim=1).transpose(0, 1)


PLAIN = Steps(block_step, layer_step)


def compiled_steps() -> Steps:
    """The same, compiled for any number of rows when they are first used."""
    import torch

    return Steps(torch.compile(block_step, dynamic=True), torch.compile(layer_step, dynamic=True))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In float32; halves of a head are turned against each other."""
    import torch

    x = x.float()
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def decoder(language: Any, arrays: Arrays, tokens_tn: Tensor | None, deepstack: list[Tensor], steps: Steps) -> Tensor:
    """The decoder over all rows, [S, n]."""
    h, at = language.embed_tokens(arrays["ids_s"]), arrays["visual_at_t"]
    if tokens_tn is not None:
        h = h.index_copy(0, at, tokens_tn.to(h.dtype))
    cos, sin = (turn[0][:, None] for turn in language.rotary_emb(h, arrays["positions_3s"][:, None]))
    for number, layer in enumerate(language.layers):
        h = steps.layer(layer, h, cos, sin, arrays["row_starts"])
        if number < len(deepstack):
            h = h.index_add(0, at, deepstack[number].to(h.dtype))
    return language.norm(h)


@cache
def scaled_on(device: Any) -> Tensor:
    """What each of the 256 values becomes, once for a device."""
    import torch

    return torch.from_numpy(scaled_values()).to(device)


def visual_theta(visual: Any) -> float:
    """The base of the tower's rotation; releases of transformers before 5 have it in no configuration."""
    parameters = getattr(visual.config, "rope_parameters", None)
    return float(parameters["rope_theta"]) if parameters else 10_000.0


def largest_difference(network: Any, arrays: Arrays, grids: list[Grid]) -> float:
    """Between these logits and those of transformers' own forward, row by row, in float32; gradients are not kept."""
    import inspect

    import torch

    with torch.no_grad():
        ours = answer_logits(network, arrays)
        theirs = []
        starts, image_id = arrays["row_starts"].tolist(), network.config.image_token_id
        scaled = scaled_on(ours.device)[arrays["values_u8"].int()]
        frames_pk = scaled.view(-1, 3, 1, 256).expand(-1, -1, 2, -1).reshape(len(scaled), 2 * scaled.shape[1])
        next_grid = next_patch = 0
        for row, (start, stop) in enumerate(pairwise(starts)):
            asked = arrays["answer_at_a"][arrays["item_a"] == row] - start
            ids = arrays["ids_s"][None, start : stop - 1]
            left, used = int((ids == image_id).sum()), []
            while left:
                used.append(grids[next_grid])
                left -= grids[next_grid][1] * grids[next_grid][2] // 4
                next_grid += 1
            patches = sum(rows * columns for _, rows, columns in used)
            inputs: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if used:
                inputs["pixel_values"] = frames_pk[next_patch : next_patch + patches]
                inputs["image_grid_thw"] = torch.tensor(used, device=ids.device)
            if "mm_token_type_ids" in inspect.signature(network.forward).parameters:
                inputs["mm_token_type_ids"] = (ids == image_id).int()
            next_patch += patches
            network.model.rope_deltas = None
            theirs.append(network(**inputs, use_cache=False).logits[0, asked].float())
        return float((ours - torch.cat(theirs)).abs().max())
