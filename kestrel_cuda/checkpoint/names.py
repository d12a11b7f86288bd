"""What Hugging Face calls the tensors of a dense Qwen3-VL, and their shapes. The only file that knows these names.

Names are in one spelling, that of the released checkpoints (`model.language_model.*`, `model.visual.*`);
`canonical` brings other exports to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from kestrel_cuda.config import TextConfig, VisionConfig
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
PATCH_EMBED = VISION_PREFIX + "patch_embed.proj"
POSITION_TABLE = VISION_PREFIX + "pos_embed.weight"

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


class BlockPart(StrEnum):
    """The linears and norms of a vision block, by the module's name; each has a weight and a bias."""

    NORM1 = "norm1"
    QKV = "attn.qkv"
    PROJ = "attn.proj"
    NORM2 = "norm2"
    FC1 = "mlp.linear_fc1"
    FC2 = "mlp.linear_fc2"


class MergerPart(StrEnum):
    """The norm and the linears of a merger, by the module's name; each has a weight and a bias."""

    NORM = "norm"
    FC1 = "linear_fc1"
    FC2 = "linear_fc2"


def linear_name(key: WeightKey) -> str:
    """The tensor of one plain weight. Raises KeyError for a fused one, which no checkpoint stores."""
    if key.projection is Projection.LM_HEAD:
        return LM_HEAD_WEIGHT
    return f"{LAYER_PREFIX}{key.layer}.{_PROJECTIONS[key.projection]}.weight"


def norm_name(layer: int, norm: Norm) -> str:
    """The tensor of one norm of a decoder layer."""
    return f"{LAYER_PREFIX}{layer}.{norm}.weight"


def block_part_name(block: int, part: BlockPart) -> str:
    """One module of a vision block; `.weight` and `.bias` make its tensors."""
    return f"{VISION_BLOCK_PREFIX}{block}.{part}"


def merger_part_name(merger: int | None, part: MergerPart) -> str:
    """One module of a deepstack merger, or of the final one for None; `.weight` and `.bias` make its tensors."""
    prefix = f"{VISION_PREFIX}merger." if merger is None else f"{VISION_MERGER_PREFIX}{merger}."
    return prefix + part


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


def vision_shapes(vision: VisionConfig) -> dict[str, Shape]:
    """Every tensor of the vision tower, with its shape."""
    hidden, merged, patch = vision.hidden_size, vision.merged_size, vision.patch_size
    shapes: dict[str, Shape] = {
        PATCH_EMBED + ".weight": (hidden, vision.in_channels, vision.temporal_patch_size, patch, patch),
        PATCH_EMBED + ".bias": (hidden,),
        POSITION_TABLE: (vision.position_side**2, hidden),
    }
    for block in range(vision.depth):
        for part, shape in {
            BlockPart.NORM1: (hidden,),
            BlockPart.QKV: (3 * hidden, hidden),
            BlockPart.PROJ: (hidden, hidden),
            BlockPart.NORM2: (hidden,),
            BlockPart.FC1: (vision.intermediate_size, hidden),
            BlockPart.FC2: (hidden, vision.intermediate_size),
        }.items():
            shapes |= _affine(block_part_name(block, part), shape)
    for merger in (None, *range(len(vision.deepstack_blocks))):
        for merger_part, shape in {
            # The final merger normalises each patch before they are put side by side, the deepstack ones after it.
            MergerPart.NORM: (hidden,) if merger is None else (merged,),
            MergerPart.FC1: (merged, merged),
            MergerPart.FC2: (vision.out_hidden_size, merged),
        }.items():
            shapes |= _affine(merger_part_name(merger, merger_part), shape)
    return shapes


def _affine(name: str, shape: Shape) -> dict[str, Shape]:
    """Weight and bias of a linear or a norm."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
