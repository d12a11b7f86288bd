"""The trained model's sizes and its folder in the Hugging Face layout: all but how the weights come about.

Needs NumPy and tokenizers; a folder can be written with random weights too, which is what tests do.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from kestrel_cuda.config import ImageProcessorConfig
from scripts.make_tiny_model import TinyModel, config, draw, read_reference, tensor_specs, write_json, write_safetensors
from scripts.tiny_model.tokenizer import train_tokenizer, write_tokenizer

MODEL = TinyModel(
    num_layers=12,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=384,
    vision_depth=9,
    vision_hidden_size=128,
    vision_num_heads=4,
    vision_intermediate_size=512,
    num_positions=400,
    deepstack=(2, 4, 6),
)
MOST_BYTES = 12_000_000
"""What the folder may take, weights, tokenizer and configurations together."""
MOST_POSITIONS = 2048
MIN_PIXELS, MAX_PIXELS = 192**2, 320**2
"""Smaller pictures are enlarged: of words on fewer pixels the tower makes too few tokens to read them by."""
MAX_VIDEO_PIXELS = 8 * MAX_PIXELS
RULES = ImageProcessorConfig(MIN_PIXELS, MAX_PIXELS, 16, 2, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)
"""What preprocessor_config.json says, as the product reads it."""

_ROWS_A_STEP = 64
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


@cache
def the_tokenizer() -> tokenizers.Tokenizer:
    return train_tokenizer()


def num_rows(tokenizer: tokenizers.Tokenizer) -> int:
    """Rows of the embedding: a multiple of 64, the last ones unused."""
    return math.ceil(tokenizer.get_vocab_size() / _ROWS_A_STEP) * _ROWS_A_STEP


def num_parameters(model: TinyModel, num_tokens: int) -> int:
    return sum(math.prod(spec.shape) for spec in tensor_specs(model, num_tokens))


def model_config(model: TinyModel, tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """config.json, with the token ids of `tokenizer`."""
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("endoftext", "im_end", "image_pad", "video_pad")}
    content = config(model)
    content |= {
        "image_token_id": ids["image_pad"],
        "video_token_id": ids["video_pad"],
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
    }
    content["text_config"] |= {
        "bos_token_id": ids["endoftext"],
        "eos_token_id": ids["im_end"],
        "max_position_embeddings": MOST_POSITIONS,
        "vocab_size": num_rows(tokenizer),
    }
    return content


def random_tensors(model: TinyModel, num_tokens: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Weights as `make_tiny_model` draws them, for a folder that was not trained."""
    return {spec.name: draw(spec, seed) for spec in tensor_specs(model, num_tokens)}


def write_checkpoint(
    out_dir: Path,
    tensors: Mapping[str, NDArray[np.float32]],
    model: TinyModel = MODEL,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> int:
    """Write the folder and return its size in bytes.

    `tensors` are float32, stored as bfloat16. Raises ValueError unless they are exactly those of `model`.
    """
    tokenizer = tokenizer or the_tokenizer()
    wanted = {spec.name: spec.shape for spec in tensor_specs(model, num_rows(tokenizer))}
    found = {name: values.shape for name, values in tensors.items()}
    if found != wanted:
        odd = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise ValueError(f"{len(odd)} tensors are not those of the model, the first is {odd[0]}")
    out_dir.mkdir(parents=True, exist_ok=True)
    write_safetensors(out_dir / "model.safetensors", {name: tensors[name] for name in wanted}, "bfloat16")
    write_tokenizer(tokenizer, out_dir)
    write_json(out_dir / "config.json", model_config(model, tokenizer))
    shutil.copyfile(_TEMPLATE, out_dir / "chat_template.jinja")
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    generation = {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad, "bos_token_id": pad}
    write_json(out_dir / "generation_config.json", generation)
    for name, most_pixels in (
        ("preprocessor_config.json", MAX_PIXELS),
        ("video_preprocessor_config.json", MAX_VIDEO_PIXELS),
    ):
        content = read_reference(name)
        content["size"] = {"shortest_edge": MIN_PIXELS, "longest_edge": most_pixels}
        write_json(out_dir / name, content)
    return sum(path.stat().st_size for path in out_dir.iterdir())
