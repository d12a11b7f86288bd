"""preprocessor_config.json and its like in every spelling, and every way to be refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kestrel_cuda.checkpoint.config_json import read_config
from kestrel_cuda.checkpoint.processor_json import check_processor, read_image_processor, read_video_processor
from kestrel_cuda.errors import CheckpointError
from kestrel_cuda.inputs.frames import take_frames, video_patches
from kestrel_cuda.inputs.pictures import Picture
from kestrel_cuda.inputs.pixels import image_patches
from tests import checkpoints
from tests.checkpoints import edit_json


@pytest.fixture
def directory(oracle: Path, tmp_path: Path) -> Path:
    """An editable copy of a checkpoint whose limits are spelled as `size`."""
    return checkpoints.copy(oracle / "checkpoints/tiny-dense-tied", tmp_path / "checkpoint")


def error_of(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_image_processor(directory)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_values_are_the_files_own(directory: Path) -> None:
    rules = read_image_processor(directory)
    assert (rules.min_pixels, rules.max_pixels) == (4096, 32768)
    assert (rules.patch_size, rules.temporal_patch_size, rules.merge_size) == (16, 2, 2)
    assert (rules.image_mean, rules.image_std, rules.rescale_factor) == ((0.5,) * 3, (0.5,) * 3, 1 / 255)
    assert (rules.factor, rules.pixels_per_token) == (32, 1024)


def test_min_pixels_and_max_pixels_mean_the_same_as_size(oracle: Path, directory: Path) -> None:
    narrow = read_image_processor(oracle / "checkpoints/tiny-dense-untied-sharded")
    assert (narrow.min_pixels, narrow.max_pixels) == (1024, 16384)
    path = directory / "preprocessor_config.json"
    edit_json(path, {"size.shortest_edge": 1024, "size.longest_edge": 16384})
    assert read_image_processor(directory) == narrow


def test_of_both_spellings_min_pixels_and_max_pixels_count(directory: Path) -> None:
    """As in the reference, one by one."""
    edit_json(directory / "preprocessor_config.json", {"max_pixels": 8192, "min_pixels": None})
    rules = read_image_processor(directory)
    assert (rules.min_pixels, rules.max_pixels) == (4096, 8192)


def test_what_transformers_5_saves(directory: Path) -> None:
    before = read_image_processor(directory), read_video_processor(directory)
    image = json.loads((directory / "preprocessor_config.json").read_text())
    video = json.loads((directory / "video_preprocessor_config.json").read_text())
    steps = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
    image |= {**steps, "resample": 3, "rescale_factor": 1 / 255, "min_pixels": None, "max_pixels": None}
    both = {"image_processor": image, "video_processor": video, "processor_class": "Qwen3VLProcessor"}
    (directory / "processor_config.json").write_text(json.dumps(both))
    # The nested form is the one that counts, whatever else is there.
    (directory / "preprocessor_config.json").write_text("{}")
    (directory / "video_preprocessor_config.json").unlink()
    assert (read_image_processor(directory), read_video_processor(directory)) == before


def test_a_processor_config_without_the_nested_form_is_passed_over(directory: Path) -> None:
    (directory / "processor_config.json").write_text('{"processor_class": "Qwen3VLProcessor"}')
    assert read_image_processor(directory).max_pixels == 32768


def test_no_limit_and_no_size_is_guessed(directory: Path) -> None:
    (directory / "preprocessor_config.json").unlink()
    assert "lacks preprocessor_config.json (or image_processor in processor_config.json)" in error_of(directory)
    (directory / "video_preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks video_preprocessor_config\.json \(or video_processor in"):
        read_video_processor(directory)


@pytest.mark.parametrize("key", ["patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"])
def test_a_missing_key_is_named(directory: Path, key: str) -> None:
    edit_json(directory / "preprocessor_config.json", {}, drop=(key,))
    assert f"preprocessor_config.json lacks {key};" in error_of(directory)


@pytest.mark.parametrize(("key", "named"), [("shortest_edge", "(or min_pixels)"), ("longest_edge", "(or max_pixels)")])
def test_a_missing_limit_is_named(directory: Path, key: str, named: str) -> None:
    edit_json(directory / "preprocessor_config.json", {}, drop=(f"size.{key}",))
    assert f"lacks size.{key} {named}" in error_of(directory)
    edit_json(directory / "preprocessor_config.json", {}, drop=("size",))
    assert "lacks size.shortest_edge (or min_pixels)" in error_of(directory)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("size", 224, "size is 224; it has to be an object"),
        ("size.shortest_edge", "65536", "size.shortest_edge is"),
        ("size.shortest_edge", 0, "size.shortest_edge is 0"),
        ("size.longest_edge", 4095, "4096 pixels at least and 4095 at most"),
        ("max_pixels", 512, "4096 pixels at least and 512 at most"),
        ("min_pixels", -1, "min_pixels is -1"),
        ("max_pixels", 2**40, "at most 2147483647"),
        ("patch_size", 0, "patch_size is 0"),
        ("patch_size", [16, 16], "patch_size is [16, 16]"),
        ("patch_size", 16.0, "patch_size is 16.0"),
        ("merge_size", True, "merge_size is true"),
        ("image_mean", [0.5, 0.5], "image_mean is [0.5, 0.5]; it has to be three numbers from -1000 to 1000"),
        ("image_mean", ["a", 0, 0], "image_mean is"),
        ("image_std", [0.5, 0.5, 0], "image_std is [0.5, 0.5, 0]; it has to be three numbers from 1e-06 to 1000"),
        ("image_std", float("nan"), "image_std is NaN"),
        ("image_std", 3e38, "image_std is 3e+38; it has to be three numbers from 1e-06 to 1000"),
        ("image_mean", [3e38, 0, 0], "image_mean is [3e+38, 0, 0]; it has to be three numbers from -1000 to 1000"),
        ("rescale_factor", 0, "rescale_factor is 0"),
        ("rescale_factor", 3e38, "rescale_factor is 3e+38; it has to be a number from 1e-06 to 1000"),
        ("rescale_factor", 1e-40, "rescale_factor is 1e-40"),
        ("rescale_factor", True, "rescale_factor is true"),
        ("do_resize", False, "do_resize is false; it has to be true"),
        ("do_normalize", False, "do_normalize is false"),
        ("do_rescale", "yes", "do_rescale is"),
        ("resample", 2, "resample is 2; it has to be 3 (bicubic)"),
        ("image_processor_type", "CLIPImageProcessor", "image_processor_type is"),
        ("image_processor_type", 7, "image_processor_type is 7"),
    ],
)
def test_nonsense_is_refused(directory: Path, key: str, value: object, complaint: str) -> None:
    edit_json(directory / "preprocessor_config.json", {key: value})
    message = error_of(directory)
    assert complaint in message
    assert "preprocessor_config.json" in message


def test_one_mean_for_all_channels(directory: Path) -> None:
    before = read_image_processor(directory)
    edit_json(directory / "preprocessor_config.json", {"image_mean": 0.5, "image_std": 0.25})
    assert read_image_processor(directory) == replace(before, image_std=(0.25,) * 3)


@pytest.mark.parametrize("kind", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", None])
def test_processor_types(directory: Path, kind: str | None) -> None:
    before = read_image_processor(directory)
    edit_json(directory / "preprocessor_config.json", {"image_processor_type": kind})
    assert read_image_processor(directory) == before


def test_video_rules(directory: Path) -> None:
    rules = read_video_processor(directory)
    assert (rules.min_pixels, rules.max_pixels) == (4096, 65536)
    assert (rules.fps, rules.min_frames, rules.max_frames) == (2.0, 4, 768)
    path = directory / "video_preprocessor_config.json"
    edit_json(path, {"fps": 1.5, "min_frames": 2, "max_frames": 8})
    rules = read_video_processor(directory)
    assert (rules.fps, rules.min_frames, rules.max_frames) == (1.5, 2, 8)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("min_frames", 1000, "min_frames is 1000; it has to be at most max_frames, which is 768 where it"),
        ("max_frames", 1, "max_frames is 1; it has to be at least 4, which min_frames is where it is not given"),
        ("fps", 0, "fps is 0; it has to be a number from 0.001 to 1000000, of frames a second"),
        ("fps", 1e-300, "fps is 1e-300; it has to be a number from 0.001"),
        ("fps", 1e7, "fps is 10000000.0; it has to be a number from 0.001"),
        ("fps", True, "fps is true"),
        ("video_processor_type", "Qwen2VLVideoProcessor", "video_processor_type is"),
        ("cap_pixels_per_frame", True, "cap_pixels_per_frame is true"),
        ("temporal_patch_size", 0, "temporal_patch_size is 0"),
    ],
)
def test_nonsense_for_videos_is_refused(directory: Path, key: str, value: object, complaint: str) -> None:
    edit_json(directory / "video_preprocessor_config.json", {key: value})
    with pytest.raises(CheckpointError, match=complaint):
        read_video_processor(directory)


def test_least_and_most_frames_that_are_both_given(directory: Path) -> None:
    edit_json(directory / "video_preprocessor_config.json", {"min_frames": 9, "max_frames": 8})
    with pytest.raises(CheckpointError, match=r"min_frames is 9; it has to be at most max_frames, which is 8$"):
        read_video_processor(directory)


def test_the_tower_has_to_take_the_patches(directory: Path) -> None:
    rules = read_image_processor(directory)
    model = read_config(directory / "config.json")
    check_processor(rules, model, directory)
    said = r"/preprocessor_config\.json has patch_size 14, and config\.json beside it vision_config\.patch_size 16;"
    with pytest.raises(CheckpointError, match=said):
        check_processor(replace(rules, patch_size=14), model, directory)
    said = r"video_preprocessor_config\.json has merge_size 4, and .* vision_config\.spatial_merge_size 2; both have to"
    with pytest.raises(CheckpointError, match=said):
        check_processor(replace(read_video_processor(directory), merge_size=4), model, directory)
    with pytest.raises(CheckpointError, match="lacks vision_config: this checkpoint takes text only"):
        check_processor(rules, replace(model, vision=None), directory)


@pytest.mark.parametrize(("least", "most"), [((1e-6, -1000, 1e-6), (1000, 1000, 1e-6)), ((1e-6, 1000, 1e-6),) * 2])
def test_the_widest_numbers_that_are_taken_make_finite_patches(
    directory: Path, least: tuple[float, ...], most: tuple[float, ...]
) -> None:
    """What NumPy has to warn of would be an error here."""
    for factor, mean, deviation in (least, most):
        numbers = {"rescale_factor": factor, "image_mean": mean, "image_std": deviation}
        for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
            edit_json(directory / name, numbers)
        rules, video_rules = read_image_processor(directory), read_video_processor(directory)
        picture = Picture("a.png", Image.new("RGB", (64, 64), (0, 128, 255)))
        assert np.isfinite(image_patches(picture, rules).pixel_values).all()
        clip = take_frames([picture] * 2, range(2), 2, 2.0, "clip", video_rules)
        assert np.isfinite(video_patches(clip, video_rules).pixel_values).all()
