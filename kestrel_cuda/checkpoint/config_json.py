"""config.json of a checkpoint to a `ModelConfig`, in every spelling in use. Knows no tensors, guesses no value."""

from __future__ import annotations

from math import isqrt
from pathlib import Path

from kestrel_cuda.checkpoint.files import printable
from kestrel_cuda.checkpoint.json_file import JsonObject, read_json, shown
from kestrel_cuda.config import ModelConfig, TextConfig, VisionConfig
from kestrel_cuda.errors import CheckpointError

SUPPORTED_ARCHITECTURE = "Qwen3VLForConditionalGeneration"

_CHANNELS = 3

VISION_ROPE_THETA = 10000.0
"""The tower's rotary base, which checkpoints of transformers 4 do not name (modeling_qwen3_vl.py has it)."""


def read_config(path: Path) -> ModelConfig:
    """The model that `path` (a config.json) describes.

    Raises CheckpointError when it is another architecture, quantised, lacks a value that changes the result, or
    contradicts itself. The few values with an undisputed default are taken from it and named in `defaults_used`.
    """
    root = read_json(path)
    defaults: list[str] = []
    _check_architecture(root)
    # transformers nests the decoder's values in text_config; some fine-tuning tools save them flat.
    text = root.child("text_config") or root
    if text is root and "hidden_size" not in root:
        raise root.missing("text_config")
    for section in (root, text):
        _check_unquantized(section)
    text_config = _text_config(text, defaults)
    vision = root.child("vision_config")
    return ModelConfig(
        architecture=SUPPORTED_ARCHITECTURE,
        text=text_config,
        tie_word_embeddings=_tied(root, text, defaults),
        vision=None if vision is None else _vision_config(vision, text_config, defaults),
        image_token_id=None if vision is None else root.integer("image_token_id"),
        video_token_id=None if vision is None else root.integer("video_token_id"),
        eos_ids=tuple(dict.fromkeys(text.ids("eos_token_id") + root.ids("eos_token_id"))),
        defaults_used=tuple(defaults),
        vision_start_token_id=_token_id(root, "vision_start_token_id"),
        vision_end_token_id=_token_id(root, "vision_end_token_id"),
    )


def _token_id(root: JsonObject, key: str) -> int | None:
    return root.integer(key) if key in root else None


def _check_architecture(root: JsonObject) -> None:
    architectures = root.get("architectures")
    if architectures is None or architectures == []:
        raise root.missing("architectures")
    if not isinstance(architectures, list):
        raise root.wrong("architectures", "a list of names")
    if architectures != [SUPPORTED_ARCHITECTURE]:
        found = printable(", ".join(item if isinstance(item, str) else shown(item) for item in architectures))
        raise CheckpointError(
            f"{root.path}: {found} is not supported; supported: {SUPPORTED_ARCHITECTURE}, the "
            "dense ones (2B, 4B, 8B, 32B)"
        )


def _check_unquantized(section: JsonObject) -> None:
    quantization = section.child("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") or "unnamed method"
        method = printable(method) if isinstance(method, str) else shown(method)
        raise CheckpointError(
            f"{section.path}: the weights are quantised already ({section.prefix}quantization_config: {method}); "
            "use the original BF16, F16 or F32 checkpoint"
        )


def _text_config(text: JsonObject, defaults: list[str]) -> TextConfig:
    activation = _with_default(text, "hidden_act", "silu", defaults)
    if activation != "silu":
        raise text.wrong("hidden_act", '"silu"')
    if _with_default(text, "attention_bias", False, defaults) is not False:
        raise text.wrong("attention_bias", "false: attention with biases is not supported")
    rope_theta, mrope_section = _rope(text, defaults)
    config = TextConfig(
        hidden_size=text.integer("hidden_size"),
        num_layers=text.integer("num_hidden_layers"),
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=text.integer("head_dim", least=2),
        intermediate_size=text.integer("intermediate_size"),
        vocab_size=text.integer("vocab_size"),
        rms_norm_eps=text.number("rms_norm_eps"),
        rope_theta=rope_theta,
        mrope_section=mrope_section,
        max_positions=text.integer("max_position_embeddings"),
    )
    if config.num_heads % config.num_kv_heads:
        raise text.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({config.num_heads})")
    if config.head_dim != 2 * sum(mrope_section):
        raise text.wrong("head_dim", f"twice the sum of mrope_section ({', '.join(map(str, mrope_section))})")
    return config


def _rope(text: JsonObject, defaults: list[str]) -> tuple[float, tuple[int, int, int]]:
    """rope_theta and mrope_section, from `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta`."""
    new, old = text.child("rope_parameters"), text.child("rope_scaling")
    rope = new or old
    if rope is None:
        raise text.missing("rope_scaling (or rope_parameters)")
    if new is not None and old is not None:
        _check_agree(new, old)
    kind_key = "rope_type" if "rope_type" in rope else "type"
    if _with_default(rope, kind_key, "default", defaults) != "default":
        raise rope.wrong(kind_key, '"default": no other kind of rotary embedding is supported')
    if _with_default(rope, "mrope_interleaved", True, defaults) is not True:
        raise rope.wrong("mrope_interleaved", "true: Qwen3-VL interleaves its rotary sections")
    if "rope_theta" in rope and "rope_theta" in text:
        _check_agree(rope, text)
    theta = (rope if "rope_theta" in rope else text).number("rope_theta")
    section = rope.integers("mrope_section")
    if len(section) != 3:
        raise rope.wrong("mrope_section", "three whole numbers (temporal, height, width)")
    return theta, (section[0], section[1], section[2])


def _vision_config(vision: JsonObject, text: TextConfig, defaults: list[str]) -> VisionConfig:
    if _with_default(vision, "hidden_act", "gelu_pytorch_tanh", defaults) != "gelu_pytorch_tanh":
        raise vision.wrong("hidden_act", '"gelu_pytorch_tanh": no other activation of the tower is supported')
    num_positions = vision.integer("num_position_embeddings")
    if vision.integer("in_channels") != _CHANNELS:
        raise vision.wrong("in_channels", f"{_CHANNELS}: pixels are red, green and blue")
    config = VisionConfig(
        depth=vision.integer("depth"),
        hidden_size=vision.integer("hidden_size"),
        num_heads=vision.integer("num_heads"),
        intermediate_size=vision.integer("intermediate_size"),
        out_hidden_size=vision.integer("out_hidden_size"),
        in_channels=_CHANNELS,
        patch_size=_patch_size(vision),
        temporal_patch_size=vision.integer("temporal_patch_size"),
        merge_size=vision.integer("spatial_merge_size"),
        position_side=isqrt(num_positions),
        deepstack_blocks=vision.integers("deepstack_visual_indexes"),
        rope_theta=_vision_rope_theta(vision, defaults),
    )
    if config.hidden_size % config.num_heads:
        raise vision.wrong("num_heads", f"a divisor of hidden_size ({config.hidden_size})")
    if config.head_dim % 4:
        raise vision.wrong("num_heads", f"such that hidden_size ({config.hidden_size}) over it is a multiple of 4")
    if config.position_side**2 != num_positions:
        raise vision.wrong("num_position_embeddings", "the square of a whole number")
    if config.out_hidden_size != text.hidden_size:
        raise vision.wrong("out_hidden_size", f"the decoder's hidden_size ({text.hidden_size})")
    blocks = config.deepstack_blocks
    if len(set(blocks)) != len(blocks) or any(block >= config.depth for block in blocks):
        raise vision.wrong("deepstack_visual_indexes", f"different blocks below depth ({config.depth})")
    return config


def _vision_rope_theta(vision: JsonObject, defaults: list[str]) -> float:
    rope = vision.child("rope_parameters")
    if rope is None:
        return VISION_ROPE_THETA
    if _with_default(rope, "rope_type", "axial", defaults) != "axial":
        raise rope.wrong("rope_type", '"axial": no other kind of rotary embedding of the tower is supported')
    return rope.number("rope_theta")


def _patch_size(vision: JsonObject) -> int:
    """A patch side given as one number or as two equal ones."""
    if not isinstance(vision.get("patch_size"), list):
        return vision.integer("patch_size")
    sides = vision.integers("patch_size")
    if len(sides) != 2 or sides[0] != sides[1] or sides[0] < 1:
        raise vision.wrong("patch_size", "one whole number, or two equal ones")
    return sides[0]


def _check_agree(first: JsonObject, second: JsonObject) -> None:
    """Raise when two objects that may hold the same rotary values hold different ones."""
    for key in ("rope_theta", "rope_type", "type", "mrope_section", "mrope_interleaved"):
        if key in first and key in second and first.get(key) != second.get(key):
            raise first.wrong(key, f"the same as {second.prefix}{key}, which is {shown(second.get(key))}")


def _tied(root: JsonObject, text: JsonObject, defaults: list[str]) -> bool:
    """Whether a checkpoint without lm_head.weight may use the embedding instead; the top level decides."""
    for section in (root, text):
        if "tie_word_embeddings" in section:
            return section.boolean("tie_word_embeddings")
    return bool(_with_default(root, "tie_word_embeddings", True, defaults))


def _with_default(section: JsonObject, key: str, default: object, defaults: list[str]) -> object:
    """The value of `key`, or `default`, recorded as taken."""
    if key in section:
        return section.get(key)
    taken = str(default).lower() if isinstance(default, bool) else default
    defaults.append(f"{section.prefix}{key} = {taken}")
    return default
