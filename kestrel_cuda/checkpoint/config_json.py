"""config.json of a checkpoint to a `ModelConfig`, in every spelling in use. Knows no tensors, guesses no value."""

from __future__ import annotations

from pathlib import Path

from kestrel_cuda.checkpoint.files import printable
from kestrel_cuda.checkpoint.json_file import JsonObject, read_json, shown
from kestrel_cuda.config import ModelConfig, TextConfig
from kestrel_cuda.errors import CheckpointError

SUPPORTED_ARCHITECTURE = "Qwen3VLForConditionalGeneration"


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
    vision = root.child("vision_config")
    return ModelConfig(
        architecture=SUPPORTED_ARCHITECTURE,
        text=_text_config(text, defaults),
        tie_word_embeddings=_tied(root, text, defaults),
        vision=None if vision is None else dict(vision.values),
        image_token_id=None if vision is None else root.integer("image_token_id"),
        video_token_id=None if vision is None else root.integer("video_token_id"),
        eos_ids=tuple(dict.fromkeys(text.ids("eos_token_id") + root.ids("eos_token_id"))),
        defaults_used=tuple(defaults),
    )


def _check_architecture(root: JsonObject) -> None:
    architectures = root.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise root.missing("architectures")
    if architectures != [SUPPORTED_ARCHITECTURE]:
        found = printable(", ".join(item if isinstance(item, str) else shown(item) for item in architectures))
        raise CheckpointError(f"{root.path}: {found} is not supported; supported: {SUPPORTED_ARCHITECTURE}")


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
