"""Writes small random Qwen3-VL checkpoints in the Hugging Face layout, for tests and as the start of a trained one.

Needs NumPy alone, and `PYTHONPATH=.` or an installed checkout. Each tensor is drawn from a generator seeded with (seed,
tensor name), so a tensor does not depend on which others exist. Values are rounded to bfloat16 whatever dtype stores
them: the same model in every dtype.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scripts import arguments as kinds

Array = NDArray[np.float32]
Tensors = dict[str, Array]
Edit = Callable[[Tensors], None]

REFERENCE = Path(__file__).resolve().parent.parent / "tests/data/oracle/checkpoints/tiny-dense-tied"
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
PATCH_SIZE, TEMPORAL_PATCH_SIZE, MERGE_SIZE = 16, 2, 2
TEXT, VISION = "model.language_model.", "model.visual."


@dataclass(frozen=True)
class TinyModel:
    """Sizes of a checkpoint; the defaults are those of tests/data/tiny-random."""

    num_layers: int = 12
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 192
    vocab_padding: int = 16
    rms_norm_eps: float = 1e-6
    rope_theta: int = 5_000_000
    tied: bool = True
    dtype: str = "bfloat16"
    num_shards: int = 1
    with_vision: bool = True
    vision_depth: int = 4
    vision_hidden_size: int = 32
    vision_num_heads: int = 2
    vision_intermediate_size: int = 64
    num_positions: int = 64
    deepstack: tuple[int, ...] = (1, 2, 3)

    @property
    def mrope_section(self) -> tuple[int, int, int]:
        """Split as the released models split 64 into 24, 20, 20."""
        half = self.head_dim // 2
        side = half * 5 // 16
        return half - 2 * side, side, side


T0 = TinyModel(
    num_layers=4,
    hidden_size=256,
    head_dim=128,
    intermediate_size=512,
    vocab_padding=13,
    tied=False,
    vision_hidden_size=64,
    vision_num_heads=4,
    vision_intermediate_size=96,
    num_positions=2304,
    deepstack=(0, 1, 2),
)
"""heads x head_dim is twice the hidden size, and the vocabulary is no multiple of 4."""


def make_tiny_checkpoint(
    out_dir: Path, seed: int = 0, *, base: TinyModel = TinyModel(), edit: Edit | None = None, **overrides: Any
) -> Path:
    """Writes a checkpoint of `base` with `overrides` (fields of TinyModel) into `out_dir`, which it returns.

    `edit` may change, add or remove tensors before they are written.
    """
    model = replace(base, **overrides)
    tensors = {spec.name: draw(spec, seed) for spec in tensor_specs(model, vocab_size(model))}
    if edit is not None:
        edit(tensors)
    out_dir.mkdir(parents=True, exist_ok=True)
    write_tensors(out_dir, tensors, model)
    write_json(out_dir / "config.json", config(model))
    for name in COPIED:
        shutil.copyfile(REFERENCE / name, out_dir / name)
    return out_dir


def make_t0(out_dir: Path, seed: int = 0, *, edit: Edit | None = None, **overrides: Any) -> Path:
    """The tests' common checkpoint, about 8 MB."""
    return make_tiny_checkpoint(out_dir, seed, base=T0, edit=edit, **overrides)


def make_chain(
    out_dir: Path, sequence_of_ids: Sequence[int], *, start_id: int | None = None, edit: Edit | None = None
) -> Path:
    """T0 changed so that greedy decoding writes `sequence_of_ids`, then the same again, without end.

    The sequence begins after a prompt whose last token is `start_id`: by default the line end that closes the chat
    template's prompt. All ids must differ.

    No layer adds anything (o_proj and down_proj are zero), so the final hidden state is the last token's embedding;
    each embedding used is its own axis, and lm_head maps it to the token that follows.
    """
    start = read_reference("tokenizer.json")["model"]["vocab"]["Ċ"] if start_id is None else start_id
    path = [start, *sequence_of_ids]
    if len(set(path)) != len(path):
        raise ValueError(f"the ids of a chain must differ, the start {start} included: {path}")
    if len(path) > T0.hidden_size:
        raise ValueError(f"a chain of {len(path)} ids does not fit {T0.hidden_size} axes")

    def chain(tensors: Tensors) -> None:
        for name, values in tensors.items():
            if name.startswith(TEXT) and name.endswith(("o_proj.weight", "down_proj.weight")):
                values[:] = 0
        embed, head = tensors[TEXT + "embed_tokens.weight"], tensors["lm_head.weight"]
        axes = np.eye(len(path), T0.hidden_size, dtype=np.float32)
        head[:] = 0
        embed[path] = axes
        head[path[1:]] = axes[:-1]
        head[path[1]] += axes[-1]
        if edit is not None:
            edit(tensors)

    return make_t0(out_dir, edit=chain)


class TensorSpec(NamedTuple):
    """A tensor to draw: normal values around `mean`."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def tensor_specs(model: TinyModel, num_tokens: int) -> Iterator[TensorSpec]:
    """Every tensor, at scales that keep activations to a few units and logits about three units wide."""
    hidden, inner = model.hidden_size, model.intermediate_size
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    logit_std = 3 * hidden**-0.5
    yield TensorSpec(TEXT + "embed_tokens.weight", (num_tokens, hidden), logit_std)
    for layer in range(model.num_layers):
        prefix = f"{TEXT}layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        yield TensorSpec(prefix + "input_layernorm.weight", (hidden,), 0.1, mean=1)
        yield TensorSpec(attention + "q_proj.weight", (q_size, hidden), hidden**-0.5)
        yield TensorSpec(attention + "k_proj.weight", (kv_size, hidden), hidden**-0.5)
        yield TensorSpec(attention + "v_proj.weight", (kv_size, hidden), hidden**-0.5)
        yield TensorSpec(attention + "o_proj.weight", (hidden, q_size), 0.8 * q_size**-0.5)
        yield TensorSpec(attention + "q_norm.weight", (model.head_dim,), 0.1, mean=1.2)
        yield TensorSpec(attention + "k_norm.weight", (model.head_dim,), 0.1, mean=1.2)
        yield TensorSpec(prefix + "post_attention_layernorm.weight", (hidden,), 0.1, mean=1)
        yield TensorSpec(mlp + "gate_proj.weight", (inner, hidden), hidden**-0.5)
        yield TensorSpec(mlp + "up_proj.weight", (inner, hidden), hidden**-0.5)
        yield TensorSpec(mlp + "down_proj.weight", (hidden, inner), 1.6 * inner**-0.5)
    yield TensorSpec(TEXT + "norm.weight", (hidden,), 0.1, mean=1)
    if not model.tied:
        yield TensorSpec("lm_head.weight", (num_tokens, hidden), logit_std)
    if model.with_vision:
        yield from vision_specs(model)


def vision_specs(model: TinyModel) -> Iterator[TensorSpec]:
    """The vision tower: patch embedding, blocks, and one merger for the output and for each deepstack level."""
    hidden, inner = model.vision_hidden_size, model.vision_intermediate_size
    patch = (3, TEMPORAL_PATCH_SIZE, PATCH_SIZE, PATCH_SIZE)

    def linear(name: str, num_outputs: int, num_inputs: int, gain: float = 1.0) -> Iterator[TensorSpec]:
        yield TensorSpec(name + ".weight", (num_outputs, num_inputs), gain * num_inputs**-0.5)
        yield TensorSpec(name + ".bias", (num_outputs,), 0.02)

    def norm(name: str, size: int) -> Iterator[TensorSpec]:
        yield TensorSpec(name + ".weight", (size,), 0.1, mean=1)
        yield TensorSpec(name + ".bias", (size,), 0.02)

    yield TensorSpec(VISION + "patch_embed.proj.weight", (hidden, *patch), float(np.prod(patch)) ** -0.5)
    yield TensorSpec(VISION + "patch_embed.proj.bias", (hidden,), 0.02)
    yield TensorSpec(VISION + "pos_embed.weight", (model.num_positions, hidden), 0.3)
    for block in range(model.vision_depth):
        prefix = f"{VISION}blocks.{block}."
        yield from norm(prefix + "norm1", hidden)
        yield from linear(prefix + "attn.qkv", 3 * hidden, hidden)
        yield from linear(prefix + "attn.proj", hidden, hidden, gain=0.8)
        yield from norm(prefix + "norm2", hidden)
        yield from linear(prefix + "mlp.linear_fc1", inner, hidden)
        yield from linear(prefix + "mlp.linear_fc2", hidden, inner, gain=1.2)
    merged = MERGE_SIZE**2 * hidden
    mergers = [("merger", hidden)] + [(f"deepstack_merger_list.{i}", merged) for i in range(len(model.deepstack))]
    for name, norm_size in mergers:
        yield from norm(f"{VISION}{name}.norm", norm_size)
        yield from linear(f"{VISION}{name}.linear_fc1", merged, merged)
        yield from linear(f"{VISION}{name}.linear_fc2", model.hidden_size, merged, gain=1.2)


def draw(spec: TensorSpec, seed: int) -> Array:
    """The tensor's values, each a bfloat16 that float16 holds too."""
    generator = np.random.Generator(np.random.Philox([seed, zlib.crc32(spec.name.encode())]))
    values = generator.standard_normal(spec.shape, dtype=np.float32) * np.float32(spec.std) + np.float32(spec.mean)
    rounded = (to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    # Below 2**-16 a float16 is too coarse for the eight significant bits of a bfloat16.
    rounded[np.abs(rounded) < 2.0**-16] = 0
    return rounded


def to_bfloat16(values: Array) -> NDArray[np.uint16]:
    """The upper halves of float32 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


STORED: dict[str, tuple[str, Callable[[Array], NDArray[Any]]]] = {
    "bfloat16": ("BF16", to_bfloat16),
    "float16": ("F16", lambda values: values.astype(np.float16)),
    "float32": ("F32", lambda values: values),
}


def write_tensors(out_dir: Path, tensors: Tensors, model: TinyModel) -> None:
    """One model.safetensors, or `num_shards` files of consecutive tensors and an index."""
    if model.num_shards == 1:
        write_safetensors(out_dir / "model.safetensors", tensors, model.dtype)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(model.num_shards):
        members = names[shard * len(names) // model.num_shards : (shard + 1) * len(names) // model.num_shards]
        file_name = f"model-{shard + 1:05d}-of-{model.num_shards:05d}.safetensors"
        write_safetensors(out_dir / file_name, {name: tensors[name] for name in members}, model.dtype)
        weight_map |= dict.fromkeys(members, file_name)
    total_size = sum(values.size for values in tensors.values()) * (4 if model.dtype == "float32" else 2)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    write_json(out_dir / "model.safetensors.index.json", index)


def write_safetensors(path: Path, tensors: Tensors, dtype: str) -> None:
    """The safetensors format by hand: its NumPy writer has no bfloat16."""
    code, store = STORED[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks: list[bytes] = []
    offset = 0
    for name, values in tensors.items():
        chunks.append(store(values).tobytes())
        end = offset + len(chunks[-1])
        header[name] = {"dtype": code, "shape": list(values.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(chunks))


def config(model: TinyModel) -> dict[str, Any]:
    """The reference checkpoint's config.json, its token ids kept, with the sizes of `model`."""
    content = read_reference("config.json")
    content["tie_word_embeddings"] = model.tied
    content["text_config"] |= {
        "dtype": model.dtype,
        "head_dim": model.head_dim,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.num_heads,
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.num_kv_heads,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tied,
        "vocab_size": vocab_size(model),
    }
    content["text_config"]["rope_scaling"]["mrope_section"] = list(model.mrope_section)
    content["vision_config"] |= {
        "deepstack_visual_indexes": list(model.deepstack),
        "depth": model.vision_depth,
        "hidden_size": model.vision_hidden_size,
        "intermediate_size": model.vision_intermediate_size,
        "num_heads": model.vision_num_heads,
        "num_position_embeddings": model.num_positions,
        "out_hidden_size": model.hidden_size,
    }
    return content


def vocab_size(model: TinyModel) -> int:
    """Rows of the embedding: one for each token, and the padding that names none."""
    tokenizer = read_reference("tokenizer.json")
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    return int(max(ids)) + 1 + model.vocab_padding


def read_reference(name: str) -> dict[str, Any]:
    """A JSON file of the reference checkpoint, which lends its tokenizer and its spelling of the configuration."""
    content: dict[str, Any] = json.loads((REFERENCE / name).read_text(encoding="utf-8"))
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write(args: argparse.Namespace) -> None:
    """The checkpoint in a folder beside the one that is asked for, then in its place: there is a whole one or none."""
    out: Path = args.out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        made = Path(folder)
        if args.chain:
            make_chain(made, args.chain)
        else:
            overrides = {"num_layers": args.layers, "dtype": args.dtype, "num_shards": args.shards}
            overrides |= {"tied": False if args.untied else None, "with_vision": False if args.no_vision else None}
            chosen = {name: value for name, value in overrides.items() if value is not None}
            make_tiny_checkpoint(made, args.seed, base=T0 if args.t0 else TinyModel(), **chosen)
        size = sum(path.stat().st_size for path in made.iterdir())
        out.mkdir(exist_ok=True)
        for path in made.iterdir():
            path.replace(out / path.name)
    print(f"{out}: {size / 1e6:.2f} MB")


def main() -> int:
    parser = kinds.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=kinds.out_folder, help="folder to write")
    parser.add_argument("--seed", type=kinds.whole(0), default=0)
    parser.add_argument("--t0", action="store_true", help="the tests' checkpoint of about 8 MB")
    parser.add_argument("--chain", type=kinds.lengths, metavar="IDS", help="the tests' that answers these ids: 72,105")
    parser.add_argument("--layers", type=kinds.whole(1), help="number of decoder layers")
    parser.add_argument("--dtype", choices=sorted(STORED), help="how tensors are stored")
    parser.add_argument("--shards", type=kinds.whole(1), help="number of files")
    parser.add_argument("--untied", action="store_true", help="give lm_head its own tensor")
    parser.add_argument("--no-vision", action="store_true", help="leave the vision tower's tensors out")
    args = parser.parse_args()
    if any(args.out.glob("*.safetensors")) or any(args.out.glob("*.safetensors.index.json")):
        parser.error(f"{args.out} holds a checkpoint already; name another folder, or remove that one")
    return kinds.finish(write, args)


if __name__ == "__main__":
    sys.exit(main())
