"""What Hugging Face calls the tensors of a dense Qwen3-VL, and their shapes. The only file that knows these names.

Names are in one spelling, that of the released checkpoints (`model.language_model.*`, `model.visual.*`);
`canonical` brings other exports to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from kestrel_cuda.checkpoint.json_file import JsonObject
from kestrel_cuda.config import TextConfig
from kestrel_cuda.weight_keys import Projection, WeightKey

Shape = tuple[int, ...]

TEXT_PREFIX = "model.language_model."
VISION_PREFIX = "model.visual."
LAYER_PREFIX = TEXT_PREFIX + "layers."
VISION_BLOCK_PREFIX = VISION_PREFIX + "blocks."
VISION_MERGER_PREFIX = VISION_PREFIX + "deepstack_merger_list."
EMBEDDING = TEXT_PREFIX + "embed_tokens.weight"
FINAL_NORM = TEXT_PREFIX + "norm.weight"
LM_HEAD_WEIGHT = "lm_head.weight"

_PROJECTIONS = {
    Projection.Q: "self_attn.q_proj",
    Projection.K: "self_attn.k_proj",
    Projection.V: "self_attn.v_proj",
    Projection.O: "self_attn.o_proj",
    Projection.GATE: "mlp.gate_proj",
    Projection.UP: "mlp.up_proj",
    Projection.DOWN: "mlp.down_proj",
}

# Exports of other tools; the first prefix that fits is replaced.
_SPELLINGS = (
    (TEXT_PREFIX, TEXT_PREFIX),
    (VISION_PREFIX, VISION_PREFIX),
    ("language_model.model.", TEXT_PREFIX),
    ("language_model.lm_head.", "lm_head."),
    ("visual.", VISION_PREFIX),
    ("model.", TEXT_PREFIX),
)


class Norm(StrEnum):
    """The norms of a decoder layer, by the module's name; `Q` and `K` act on each head."""

    INPUT = "input_layernorm"
    POST_ATTENTION = "post_attention_layernorm"
    Q = "self_attn.q_norm"
    K = "self_attn.k_norm"


def linear_name(key: WeightKey) -> str:
    """The tensor of one plain weight. Raises KeyError for a fused one, which no checkpoint stores."""
    if key.projection is Projection.LM_HEAD:
        return LM_HEAD_WEIGHT
    return f"{LAYER_PREFIX}{key.layer}.{_PROJECTIONS[key.projection]}.weight"


def norm_name(layer: int, norm: Norm) -> str:
    """The tensor of one norm of a decoder layer."""
    return f"{LAYER_PREFIX}{layer}.{norm}.weight"


def canonical(stored_name: str) -> str:
    """The released checkpoints' name for a tensor of any export; a name of no known kind comes back as it is."""
    for spelling, prefix in _SPELLINGS:
        if stored_name.startswith(spelling):
            return prefix + stored_name.removeprefix(spelling)
    return stored_name


def linear_shape(text: TextConfig, projection: Projection) -> Shape:
    """`[n, k]` of one plain weight: output features, input features."""
    return {
        Projection.Q: (text.q_size, text.hidden_size),
        Projection.K: (text.kv_size, text.hidden_size),
        Projection.V: (text.kv_size, text.hidden_size),
        Projection.O: (text.hidden_size, text.q_size),
        Projection.GATE: (text.intermediate_size, text.hidden_size),
        Projection.UP: (text.intermediate_size, text.hidden_size),
        Projection.DOWN: (text.hidden_size, text.intermediate_size),
        Projection.LM_HEAD: (text.vocab_size, text.hidden_size),
    }[projection]


def stored_numbers(prefix: str, names: Iterable[str]) -> set[str]:
    """The numbers, as text, that follow `prefix` in tensor names: which layers are stored, say."""
    return {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}


def text_shapes(text: TextConfig) -> dict[str, Shape]:
    """Every tensor the decoder needs, with its shape; lm_head is left out, since a tied model stores none."""
    shapes: dict[str, Shape] = {EMBEDDING: (text.vocab_size, text.hidden_size)}
    for layer in range(text.num_layers):
        for norm in Norm:
            shapes[norm_name(layer, norm)] = (text.head_dim if norm in (Norm.Q, Norm.K) else text.hidden_size,)
        for projection in _PROJECTIONS:
            shapes[linear_name(WeightKey(layer, projection))] = linear_shape(text, projection)
    shapes[FINAL_NORM] = (text.hidden_size,)
    return shapes


def vision_shapes(vision: JsonObject) -> dict[str, Shape]:
    """Every tensor of the vision tower, with its shape. Raises CheckpointError when vision_config lacks a value."""
    hidden, intermediate = vision.integer("hidden_size"), vision.integer("intermediate_size")
    patch, frames = _square(vision, "patch_size"), vision.integer("temporal_patch_size")
    merged = hidden * vision.integer("spatial_merge_size") ** 2
    out = vision.integer("out_hidden_size")

    shapes: dict[str, Shape] = {
        "patch_embed.proj.weight": (hidden, vision.integer("in_channels"), frames, patch, patch),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (vision.integer("num_position_embeddings"), hidden),
    }
    for block in range(vision.integer("depth")):
        prefix = f"blocks.{block}."
        shapes |= _affine(prefix + "norm1", hidden) | _affine(prefix + "norm2", hidden)
        shapes |= _affine(prefix + "attn.qkv", 3 * hidden, hidden) | _affine(prefix + "attn.proj", hidden, hidden)
        shapes |= _affine(prefix + "mlp.linear_fc1", intermediate, hidden)
        shapes |= _affine(prefix + "mlp.linear_fc2", hidden, intermediate)
    # The final merger normalises each patch before the 2x2 concatenation, the deepstack ones after it.
    mergers = {"merger.": hidden}
    mergers |= {f"deepstack_merger_list.{i}.": merged for i in range(len(vision.integers("deepstack_visual_indexes")))}
    for prefix, normed in mergers.items():
        shapes |= _affine(prefix + "norm", normed)
        shapes |= _affine(prefix + "linear_fc1", merged, merged) | _affine(prefix + "linear_fc2", out, merged)
    return {VISION_PREFIX + name: shape for name, shape in shapes.items()}


def _affine(name: str, num_outputs: int, *num_inputs: int) -> dict[str, Shape]:
    """Weight and bias of a linear, or of a norm when there are no inputs."""
    return {f"{name}.weight": (num_outputs, *num_inputs), f"{name}.bias": (num_outputs,)}


def _square(vision: JsonObject, key: str) -> int:
    """A patch side given as one number or as two equal ones."""
    if not isinstance(vision.get(key), list):
        return vision.integer(key)
    sides = vision.integers(key)
    if len(sides) != 2 or sides[0] != sides[1] or sides[0] < 1:
        raise vision.wrong(key, "one whole number, or two equal ones")
    return sides[0]
