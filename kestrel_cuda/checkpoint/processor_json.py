"""A checkpoint's rules for pictures and videos, read and checked. Guesses no limit and no size; opens no picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TypeGuard

from kestrel_cuda.checkpoint.files import is_present
from kestrel_cuda.checkpoint.json_file import JsonObject, read_json, read_json_if_present
from kestrel_cuda.config import LEAST_FPS, MOST_FPS, ImageProcessorConfig, ModelConfig, VideoProcessorConfig
from kestrel_cuda.errors import CheckpointError
from kestrel_cuda.paths import shown_path

_BOTH = "processor_config.json"
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_BICUBIC = 3
_RESCALE_FACTOR = 1 / 255
"""What every release leaves out: 8 bits to the range from 0 to 1."""

_LEAST_DIVISOR, _MOST_VALUE = 1e-6, 1000.0
"""Far outside what any release has (1/255, 0.5), and what is computed with them stays far inside a float32."""

_SOURCES = {
    "image": ("image_processor", "preprocessor_config.json"),
    "video": ("video_processor", "video_preprocessor_config.json"),
}
"""The key in processor_config.json, and the file of its own."""

_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def read_image_processor(directory: Path) -> ImageProcessorConfig:
    """How pictures are resized, normalized and cut for the checkpoint in `directory`.

    From `image_processor` in processor_config.json where that has one (transformers 5 saves it so), else from
    preprocessor_config.json. Raises CheckpointError for what is absent, contradicts itself or is not supported.
    """
    section = _section(directory, *_SOURCES["image"])
    _check_type(section, "image_processor_type", ("Qwen2VLImageProcessor", "Qwen3VLImageProcessor"))
    return _rules(section)


def read_video_processor(directory: Path) -> VideoProcessorConfig:
    """The same for videos: `video_processor` in processor_config.json, else video_preprocessor_config.json.

    A file without fps, min_frames or max_frames gets the values that every release has: 2, 4 and 768.
    """
    section = _section(directory, *_SOURCES["video"])
    _check_type(section, "video_processor_type", ("Qwen3VLVideoProcessor",))
    if section.get("cap_pixels_per_frame") not in (None, False):
        raise section.wrong("cap_pixels_per_frame", "false: a limit for each frame is not supported")
    min_frames = section.integer("min_frames") if "min_frames" in section else 4
    max_frames = section.integer("max_frames") if "max_frames" in section else 768
    if min_frames > max_frames:
        if "min_frames" not in section:
            raise section.wrong("max_frames", f"at least {min_frames}, which min_frames is where it is not given")
        unsaid = "" if "max_frames" in section else " where it is not given"
        raise section.wrong("min_frames", f"at most max_frames, which is {max_frames}{unsaid}")
    fps = _fps(section)
    return VideoProcessorConfig(**asdict(_rules(section)), fps=fps, min_frames=min_frames, max_frames=max_frames)


def check_processor(processor: ImageProcessorConfig, model: ModelConfig, directory: Path) -> None:
    """Raise CheckpointError unless the vision tower in config.json takes the patches that `processor` makes."""
    path, vision = directory / "config.json", model.vision
    if vision is None:
        raise CheckpointError(
            f"{shown_path(path)} lacks vision_config: this checkpoint takes text only; use one with a vision tower"
        )
    for key, of_vision, found, needed in (
        ("patch_size", "patch_size", vision.patch_size, processor.patch_size),
        ("temporal_patch_size", "temporal_patch_size", vision.temporal_patch_size, processor.temporal_patch_size),
        ("merge_size", "spatial_merge_size", vision.merge_size, processor.merge_size),
    ):
        if found != needed:
            rules = _section(directory, *_SOURCES["video" if isinstance(processor, VideoProcessorConfig) else "image"])
            raise CheckpointError(
                f"{shown_path(rules.path)} has {rules.prefix}{key} {needed}, and {path.name} beside it "
                f"vision_config.{of_vision} {found}; both have to be the same: take them from the original checkpoint"
            )


def _section(directory: Path, key: str, file_name: str) -> JsonObject:
    both = read_json_if_present(directory / _BOTH)
    nested = both.child(key)
    if nested is not None:
        return nested
    if not is_present(directory / file_name):
        raise CheckpointError(
            f"{shown_path(directory)} lacks {file_name} (or {key} in {_BOTH}), which says how to resize and cut; "
            "take it from the original checkpoint"
        )
    return read_json(directory / file_name)


def _check_type(section: JsonObject, key: str, known: tuple[str, ...]) -> None:
    kind = section.get(key)
    if kind is not None and not (isinstance(kind, str) and kind.removesuffix("Fast").removesuffix("Pil") in known):
        raise section.wrong(key, f"{' or '.join(known)}: no other way to cut pictures is supported")


def _rules(section: JsonObject) -> ImageProcessorConfig:
    for step in _STEPS:
        if step in section and not section.boolean(step):
            raise section.wrong(step, "true: leaving out a step is not supported")
    if section.get("resample") not in (None, _BICUBIC):
        raise section.wrong("resample", f"{_BICUBIC} (bicubic)")
    limits = {key: _limit(section, key, edge) for key, edge in _EDGES.items()}
    rules = ImageProcessorConfig(
        min_pixels=limits["min_pixels"],
        max_pixels=limits["max_pixels"],
        patch_size=section.integer("patch_size"),
        temporal_patch_size=section.integer("temporal_patch_size"),
        merge_size=section.integer("merge_size"),
        image_mean=_channels(section, "image_mean", least=-_MOST_VALUE),
        image_std=_channels(section, "image_std", least=_LEAST_DIVISOR),
        rescale_factor=_rescale_factor(section),
    )
    if rules.max_pixels < max(rules.min_pixels, rules.pixels_per_token):
        raise CheckpointError(
            f"{section.path} limits pictures to {rules.min_pixels} pixels at least and {rules.max_pixels} at most; "
            f"the most has to be no smaller than the least, nor than a token's {rules.pixels_per_token} pixels: "
            "take this file from the original checkpoint"
        )
    return rules


def _limit(section: JsonObject, key: str, edge: str) -> int:
    """A limit in pixels, as `min_pixels` or, where that is not given, as `size.shortest_edge`."""
    if key in section:
        return section.integer(key)
    size = section.child("size")
    if size is None or edge not in size:
        raise section.missing(f"size.{edge} (or {key})")
    return size.integer(edge)


def _rescale_factor(section: JsonObject) -> float:
    if "rescale_factor" not in section:
        return _RESCALE_FACTOR
    value = section.get("rescale_factor")
    if not _is_number(value, _LEAST_DIVISOR):
        raise section.wrong("rescale_factor", f"a number from {_LEAST_DIVISOR:g} to {_MOST_VALUE:g}")
    return float(value)


def _fps(section: JsonObject) -> float:
    if "fps" not in section:
        return 2.0
    value = section.get("fps")
    if not _is_number(value, LEAST_FPS, MOST_FPS):
        raise section.wrong("fps", f"a number from {LEAST_FPS} to {MOST_FPS}, of frames a second")
    return float(value)


def _channels(section: JsonObject, key: str, least: float) -> tuple[float, float, float]:
    """A number a channel, or one for all three."""
    if key not in section:
        raise section.missing(key)
    value = section.get(key)
    listed: list[object] = value if isinstance(value, list) else [value] * 3
    numbers = [float(item) for item in listed if _is_number(item, least)]
    if len(listed) != 3 or len(numbers) != 3:
        raise section.wrong(key, f"three numbers from {least:g} to {_MOST_VALUE:g}, one a channel")
    return numbers[0], numbers[1], numbers[2]


def _is_number(value: object, least: float, most: float = _MOST_VALUE) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
