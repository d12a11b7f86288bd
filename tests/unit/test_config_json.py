"""config.json in every spelling in use, and every way to be refused. Opens no tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kestrel_cuda.checkpoint.config_json import read_config
from kestrel_cuda.config import VisionConfig
from kestrel_cuda.errors import CheckpointError
from tests.checkpoints import edit_json


@pytest.fixture
def config(oracle: Path, tmp_path: Path) -> Path:
    """An editable copy of a config.json in the spelling of transformers 4.57."""
    path = tmp_path / "config.json"
    path.write_text((oracle / "checkpoints/tiny-dense-tied/config.json").read_text())
    return path


def error_of(path: Path) -> str:
    """What `read_config` complains of, in one line."""
    with pytest.raises(CheckpointError) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_values_are_the_files_own(oracle: Path) -> None:
    model = read_config(oracle / "checkpoints/tiny-dense-untied-sharded/config.json")
    text = model.text
    assert (text.hidden_size, text.num_layers, text.num_heads, text.num_kv_heads) == (96, 4, 4, 2)
    assert (text.intermediate_size, text.vocab_size, text.max_positions) == (192, 640, 4096)
    assert (text.rms_norm_eps, text.rope_theta, text.mrope_section) == (1e-3, 10000.0, (12, 10, 10))
    assert not model.tie_word_embeddings
    assert (model.image_token_id, model.video_token_id, model.eos_ids) == (626, 627, (616,))
    assert model.vision == VisionConfig(
        depth=3,
        hidden_size=48,
        num_heads=3,
        intermediate_size=100,
        out_hidden_size=96,
        in_channels=3,
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        position_side=5,
        deepstack_blocks=(0, 2),
        rope_theta=10000.0,
    )
    assert (model.vision.head_dim, model.vision.patch_inputs, model.vision.merged_size) == (16, 1536, 192)
    assert model.vision.num_tokens((2, 4, 6)) == 12
    assert model.defaults_used == ()


def test_head_dim_is_the_configs(oracle: Path) -> None:
    text = read_config(oracle / "checkpoints/tiny-dense-untied-sharded/config.json").text
    assert text.head_dim == 64 != text.hidden_size // text.num_heads
    assert (text.q_size, text.kv_size) == (256, 128)


def test_rope_parameters_and_rope_scaling_mean_the_same(config: Path) -> None:
    old = read_config(config)
    rope = {"rope_theta": 5000000, "rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    drop = ("text_config.rope_scaling", "text_config.rope_theta")
    edit_json(config, {"text_config.rope_parameters": rope}, drop)
    assert read_config(config) == old


def test_type_is_an_alias_of_rope_type(config: Path) -> None:
    before = read_config(config)
    edit_json(config, {"text_config.rope_scaling.type": "default"}, ("text_config.rope_scaling.rope_type",))
    assert read_config(config) == before
    edit_json(config, {"text_config.rope_scaling.type": "mrope"})
    assert "rope_scaling.type" in error_of(config)


def test_flat_text_config(config: Path) -> None:
    nested = read_config(config)
    root = json.loads(config.read_text())
    config.write_text(json.dumps(root.pop("text_config") | root))
    assert read_config(config) == nested


@pytest.mark.parametrize("spelling", ["bfloat16", "torch.bfloat16", None])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", "text_config.torch_dtype"])
def test_dtype_keys_do_not_matter(config: Path, key: str, spelling: str | None) -> None:
    before = read_config(config)
    edit_json(config, {key: spelling}, ("text_config.dtype",))
    assert read_config(config) == before


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_scaling.mrope_section",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("as_null", [False, True])
def test_a_missing_key_is_named(config: Path, key: str, as_null: bool) -> None:
    dotted = f"text_config.{key}"
    edit_json(config, {dotted: None} if as_null else {}, () if as_null else (dotted,))
    assert f"lacks {dotted}" in error_of(config)


def test_defaults_are_recorded(config: Path) -> None:
    drop = (
        "text_config.hidden_act",
        "text_config.attention_bias",
        "text_config.rope_scaling.rope_type",
        "text_config.rope_scaling.mrope_interleaved",
        "text_config.tie_word_embeddings",
        "tie_word_embeddings",
    )
    edit_json(config, {}, drop)
    assert set(read_config(config).defaults_used) == {
        "text_config.hidden_act = silu",
        "text_config.attention_bias = false",
        "text_config.rope_scaling.type = default",
        "text_config.rope_scaling.mrope_interleaved = true",
        "tie_word_embeddings = true",
    }


def test_the_top_level_decides_on_tying(config: Path) -> None:
    edit_json(config, {"tie_word_embeddings": False, "text_config.tie_word_embeddings": True})
    assert not read_config(config).tie_word_embeddings
    edit_json(config, {"text_config.tie_word_embeddings": False}, ("tie_word_embeddings",))
    assert not read_config(config).tie_word_embeddings


@pytest.mark.parametrize(
    "architecture", ["Qwen3VLMoeForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM"]
)
def test_another_architecture_is_refused_by_name(config: Path, architecture: str) -> None:
    edit_json(config, {"architectures": [architecture]})
    message = error_of(config)
    assert f"{architecture} is not supported" in message
    assert "supported: Qwen3VLForConditionalGeneration, the dense ones (2B, 4B, 8B, 32B)" in message


def test_absent_architectures_are_named(config: Path) -> None:
    edit_json(config, {}, ("architectures",))
    assert "lacks architectures" in error_of(config)


def test_an_architecture_outside_a_list_is_not_called_absent(config: Path) -> None:
    edit_json(config, {"architectures": "Qwen3VLForConditionalGeneration"})
    assert 'architectures is "Qwen3VLForConditionalGeneration"; it has to be a list of names' in error_of(config)


@pytest.mark.parametrize("where", ["quantization_config", "text_config.quantization_config"])
def test_quantised_weights_are_refused_by_name(config: Path, where: str) -> None:
    edit_json(config, {where: {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    message = error_of(config)
    assert "fp8" in message
    assert where in message


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("rope_scaling.rope_type", "yarn", '"yarn"'),
        ("rope_scaling.mrope_interleaved", False, "mrope_interleaved is false"),
        ("rope_scaling.mrope_section", [6, 5], "mrope_section is [6, 5]"),
        ("rope_scaling.mrope_section", [24, 20, 20], "head_dim is 32"),
        ("rope_scaling.rope_theta", 1, "rope_theta is 1"),
        ("attention_bias", True, "attention_bias is true"),
        ("hidden_act", "gelu", 'hidden_act is "gelu"'),
        ("num_key_value_heads", 3, "num_key_value_heads is 3"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0"),
        ("num_hidden_layers", "4", 'num_hidden_layers is "4"'),
        ("vocab_size", True, "vocab_size is true"),
        ("rms_norm_eps", -1e-6, "rms_norm_eps is -1e-06"),
        ("eos_token_id", "616", 'eos_token_id is "616"'),
        ("eos_token_id", [616, 2**31], "at most 2147483647"),
        ("rms_norm_eps", 10**400, "a number above zero, at most 3.4e+38"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is NaN"),
        ("rms_norm_eps", 1e300, "at most 3.4e+38"),
        ("hidden_size", 10**400, "at most 2147483647"),
        ("rope_scaling.mrope_section", [10**400, 6, 5], "at most 2147483647"),
    ],
)
def test_a_value_that_cannot_be_is_named(config: Path, key: str, value: object, named: str) -> None:
    edit_json(config, {f"text_config.{key}": value})
    assert named in error_of(config)


def test_both_rope_spellings_have_to_agree(config: Path) -> None:
    edit_json(config, {"text_config.rope_parameters": {"rope_theta": 5000000, "mrope_section": [8, 4, 4]}})
    assert "rope_parameters.mrope_section" in error_of(config)


def test_tokens_around_a_picture_may_be_absent(config: Path) -> None:
    model = read_config(config)
    assert (model.vision_start_token_id, model.vision_end_token_id) == (623, 624)
    edit_json(config, {}, ("vision_start_token_id", "vision_end_token_id"))
    model = read_config(config)
    assert (model.vision_start_token_id, model.vision_end_token_id) == (None, None)
    edit_json(config, {"vision_end_token_id": "624"})
    assert "vision_end_token_id is" in error_of(config)


def test_image_token_is_needed_with_a_vision_tower_only(config: Path) -> None:
    edit_json(config, {}, ("image_token_id",))
    assert "lacks image_token_id" in error_of(config)
    edit_json(config, {}, ("vision_config",))
    assert read_config(config).vision is None


@pytest.mark.parametrize(
    "key",
    [
        "depth",
        "hidden_size",
        "num_heads",
        "intermediate_size",
        "out_hidden_size",
        "in_channels",
        "patch_size",
        "temporal_patch_size",
        "spatial_merge_size",
        "num_position_embeddings",
        "deepstack_visual_indexes",
    ],
)
@pytest.mark.parametrize("as_null", [False, True])
def test_a_missing_vision_key_is_named(config: Path, key: str, as_null: bool) -> None:
    dotted = f"vision_config.{key}"
    edit_json(config, {dotted: None} if as_null else {}, () if as_null else (dotted,))
    assert f"lacks {dotted}" in error_of(config)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("depth", 0, "vision_config.depth is 0"),
        ("depth", "4", 'vision_config.depth is "4"'),
        ("hidden_size", 2.5, "vision_config.hidden_size is 2.5"),
        ("num_heads", 3, "num_heads is 3; it has to be a divisor of hidden_size (64)"),
        ("num_heads", 32, "num_heads is 32; it has to be such that hidden_size (64) over it is a multiple of 4"),
        ("num_position_embeddings", 63, "num_position_embeddings is 63; it has to be the square"),
        ("out_hidden_size", 64, "out_hidden_size is 64; it has to be the decoder's hidden_size (128)"),
        ("deepstack_visual_indexes", 1, "vision_config.deepstack_visual_indexes is 1"),
        ("deepstack_visual_indexes", [1, -1], "vision_config.deepstack_visual_indexes is [1, -1]"),
        ("deepstack_visual_indexes", [1, 4], "is [1, 4]; it has to be different blocks below depth (4)"),
        ("deepstack_visual_indexes", [1, 1], "is [1, 1]; it has to be different blocks below depth (4)"),
        ("hidden_act", "gelu", 'vision_config.hidden_act is "gelu"'),
        ("patch_size", [16, 8], "vision_config.patch_size is [16, 8]"),
        ("patch_size", [16], "vision_config.patch_size is [16]"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, 'rope_type is "default"'),
        ("rope_parameters", {"rope_type": "axial"}, "lacks vision_config.rope_parameters.rope_theta"),
        ("rope_parameters", 7, "vision_config.rope_parameters is 7"),
    ],
)
def test_a_vision_value_that_cannot_be_is_named(config: Path, key: str, value: object, named: str) -> None:
    edit_json(config, {f"vision_config.{key}": value})
    assert named in error_of(config)


def test_patch_size_may_be_two_equal_numbers(config: Path) -> None:
    before = read_config(config)
    edit_json(config, {"vision_config.patch_size": [16, 16]})
    assert read_config(config) == before


def test_vision_values_are_the_files_own(config: Path, oracle: Path) -> None:
    """In both spellings: transformers 5 writes rope_parameters."""
    new = json.loads((oracle / "checkpoints/tiny-28L/config.json").read_text())["vision_config"]
    assert new["rope_parameters"]["rope_type"] == "axial"
    edit_json(config, {"vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 500}})
    vision = read_config(config).vision
    assert vision is not None
    assert vision.rope_theta == 500
    edit_json(config, {"vision_config.deepstack_visual_indexes": [3, 0]}, ("vision_config.hidden_act",))
    model = read_config(config)
    assert model.vision is not None
    assert model.vision.deepstack_blocks == (3, 0)
    assert model.defaults_used == ("vision_config.hidden_act = gelu_pytorch_tanh",)


@pytest.mark.parametrize(
    ("eos", "ids"), [(616, (616,)), ([614, 616], (616, 614)), ([616, 616, 614], (616, 614)), (None, (616,))]
)
def test_eos_ids_are_a_number_or_a_list(config: Path, eos: object, ids: tuple[int, ...]) -> None:
    edit_json(config, {"eos_token_id": eos})
    assert read_config(config).eos_ids == ids


@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html>", b"\xff\xfe{}", b'{"a": '])
def test_what_is_not_json_is_named(config: Path, content: bytes) -> None:
    config.write_bytes(content)
    assert f"{config} is not JSON ({len(content)} bytes)" in error_of(config)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[" * 100_000, "it nests too deeply"),
        ('{"a": ' * 100_000, "it nests too deeply"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "it nests deeper than 64 levels"),
        ('{"architectures": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"a": 1, "b": {"c": [1], "c": [2]}}', 'it gives "c" two values, [1] and [2]'),
    ],
)
def test_json_that_no_tool_writes_is_named(config: Path, content: str, reason: str) -> None:
    config.write_text(content)
    assert f"{config} is not JSON ({len(content)} bytes): {reason}" in error_of(config)


def test_a_key_twice_with_one_value_is_taken(config: Path) -> None:
    before = read_config(config)
    config.write_text(config.read_text().rstrip().removesuffix("}") + ', "tie_word_embeddings": true}')
    assert read_config(config) == before


def test_odd_values_are_shown_on_one_line(config: Path) -> None:
    edit_json(config, {"architectures": ["a\n\ud800", 10**400]})
    assert error_of(config).isprintable()
    edit_json(config, {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config.hidden_act": ["\ud800"]})
    assert error_of(config).isprintable()
    edit_json(config, {"text_config.quantization_config": {"quant_method": {"\n": 1}}})
    assert error_of(config).isprintable()


@pytest.mark.parametrize(
    ("content", "found"),
    [("[]", "a list"), ("null", "null"), ("true", "true or false"), ('"a"', "a string"), ("1.5", "a number")],
)
def test_json_that_is_no_object_is_refused(config: Path, content: str, found: str) -> None:
    config.write_text(content)
    assert error_of(config) == f"{config} holds {found}; an object is needed: fetch it again"


def test_a_byte_order_mark_is_dropped(config: Path) -> None:
    before = read_config(config)
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert read_config(config) == before


def test_pixels_have_three_colours(config: Path) -> None:
    edit_json(config, {"vision_config.in_channels": 1})
    assert "in_channels is 1; it has to be 3" in error_of(config)
