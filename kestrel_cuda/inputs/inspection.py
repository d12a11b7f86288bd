"""What a checkpoint makes of a picture or a video, found out without its weights. Resizes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kestrel_cuda.checkpoint.config_json import read_config
from kestrel_cuda.checkpoint.locate import check_directory
from kestrel_cuda.checkpoint.processor_json import check_processor, read_image_processor
from kestrel_cuda.config import ImageProcessorConfig, VisionConfig
from kestrel_cuda.inputs.image_size import ImageSize, halving_tokens, image_size
from kestrel_cuda.inputs.pictures import open_picture
from kestrel_cuda.inputs.visual_source import VisualSource
from kestrel_cuda.inputs.visuals import OpenedVideo, VisualLimits, open_visuals


@dataclass(frozen=True)
class Half:
    """The largest limit that at least halves a picture's tokens, and how many it leaves."""

    image_tokens: int
    max_pixels: int
    tokens: int


@dataclass(frozen=True)
class Inspection:
    """One picture: upright height and width, what is done to it, what it becomes; `half` is None where no limit is."""

    path: str
    height: int
    width: int
    notes: tuple[str, ...]
    size: ImageSize
    half: Half | None


def picture_rules(directory: Path) -> tuple[ImageProcessorConfig, VisionConfig]:
    """How the checkpoint in `directory` takes pictures, and its tower. Raises CheckpointError where it takes none."""
    check_directory(directory)
    rules, config = read_image_processor(directory), read_config(directory / "config.json")
    check_processor(rules, config, directory)
    assert config.vision is not None
    return rules, config.vision


def inspect_picture(path: str, rules: ImageProcessorConfig) -> Inspection:
    """Decode the picture in a file whole, and work out the rest. Raises InputError as a run would."""
    picture = open_picture(path)
    height, width = picture.height, picture.width
    size = image_size(height, width, rules, picture.path)
    return Inspection(picture.path, height, width, picture.notes, size, _half(height, width, rules))


def inspect_video(path: str, fps: float | None, directory: Path) -> OpenedVideo:
    """Look through a video file, or open a folder of frames, by the rules of the checkpoint in `directory`.

    Raises InputError as a run would, and CheckpointError where the checkpoint takes no videos.
    """
    model = read_config(directory / "config.json")
    (opened,) = open_visuals([VisualSource("video", path)], VisualLimits(fps=fps), directory, model)
    assert isinstance(opened, OpenedVideo)
    return opened


def _half(height: int, width: int, rules: ImageProcessorConfig) -> Half | None:
    image_tokens = halving_tokens(height, width, rules)
    if image_tokens is None:
        return None
    max_pixels = image_tokens * rules.pixels_per_token
    halved = image_size(height, width, replace(rules, max_pixels=max_pixels))
    return Half(image_tokens, max_pixels, halved.num_tokens)
