"""Tensor names and shapes against what the reference checkpoints store."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrel_cuda.checkpoint.config_json import read_config
from kestrel_cuda.checkpoint.names import (
    LM_HEAD_WEIGHT,
    BlockPart,
    MergerPart,
    Norm,
    block_part_name,
    canonical,
    linear_name,
    linear_shape,
    merger_part_name,
    norm_name,
    text_shapes,
    vision_shapes,
)
from kestrel_cuda.weight_keys import LM_HEAD, Projection, WeightKey
from tests.checkpoints import read_tensors


@pytest.mark.parametrize("name", ["tiny-dense-tied", "tiny-dense-untied-sharded", "tiny-28L"])
def test_needed_tensors_are_exactly_the_stored_ones(oracle: Path, name: str) -> None:
    directory = oracle / "checkpoints" / name
    config = read_config(directory / "config.json")
    assert config.vision is not None
    needed = text_shapes(config.text) | vision_shapes(config.vision)
    if not config.tie_word_embeddings:
        needed[LM_HEAD_WEIGHT] = linear_shape(config.text, Projection.LM_HEAD)
    assert needed == {name: tensor.shape for name, tensor in read_tensors(directory).items()}


def test_names_of_weights_and_norms() -> None:
    assert linear_name(WeightKey(3, Projection.O)) == "model.language_model.layers.3.self_attn.o_proj.weight"
    assert linear_name(WeightKey(0, Projection.DOWN)) == "model.language_model.layers.0.mlp.down_proj.weight"
    assert linear_name(LM_HEAD) == "lm_head.weight"
    assert norm_name(1, Norm.K) == "model.language_model.layers.1.self_attn.k_norm.weight"


def test_names_of_the_tower() -> None:
    assert block_part_name(2, BlockPart.QKV) == "model.visual.blocks.2.attn.qkv"
    assert block_part_name(0, BlockPart.FC2) == "model.visual.blocks.0.mlp.linear_fc2"
    assert merger_part_name(None, MergerPart.NORM) == "model.visual.merger.norm"
    assert merger_part_name(1, MergerPart.FC1) == "model.visual.deepstack_merger_list.1.linear_fc1"


def test_a_fused_weight_has_no_name() -> None:
    with pytest.raises(KeyError):
        linear_name(WeightKey(0, Projection.QKV))


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.language_model.norm.weight", "model.language_model.norm.weight"),
        ("model.norm.weight", "model.language_model.norm.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.language_model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("visual.merger.norm.bias", "model.visual.merger.norm.bias"),
        ("model.visual.merger.norm.bias", "model.visual.merger.norm.bias"),
        ("foo.bar", "foo.bar"),
    ],
)
def test_spellings_of_other_exports(stored: str, name: str) -> None:
    assert canonical(stored) == name
