"""Pictures and videos of a prompt: opened and sized before anything is loaded, cut into patches when they are encoded.

Knows no tower and no prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from kestrel_cuda.backends.vision import PixelCodes
from kestrel_cuda.checkpoint.processor_json import check_processor, read_image_processor, read_video_processor
from kestrel_cuda.config import ImageProcessorConfig, ModelConfig, VideoProcessorConfig
from kestrel_cuda.errors import InputError, SettingError
from kestrel_cuda.inputs.frames import Video, frame_files, open_frames, timestamps, video_patches
from kestrel_cuda.inputs.image_size import FLAGS, ImageSize, LimitNames, fitting_tokens, image_size, with_limits
from kestrel_cuda.inputs.pictures import SCALE_DOWN, NoPictureError, Picture, naming_file, open_picture
from kestrel_cuda.inputs.pixels import image_patches
from kestrel_cuda.inputs.placeholders import Placeholder
from kestrel_cuda.inputs.video_file import open_video
from kestrel_cuda.inputs.visual_source import VisualSource, refuse_url
from kestrel_cuda.paths import shown_path

FEWER_FRAMES = "take fewer frames (of a file, by a lower --fps), or free host memory"
"""What to do about a video that host memory does not hold."""


@dataclass(frozen=True)
class VisualLimits:
    """What a user chose for every picture, and the rate of videos that come without one; None is the checkpoint's."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    image_tokens: int | None = None
    fps: float | None = None


NO_LIMITS = VisualLimits()


@dataclass(frozen=True)
class OpenedPicture:
    """A picture, and the size that it gets by `rules`. `limited_alone` says that it brought limits of its own."""

    path: str
    picture: Picture
    rules: ImageProcessorConfig
    size: ImageSize
    limited_alone: bool
    warnings: tuple[str, ...] = ()
    kind: Literal["image"] = "image"

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to it, and that it is over its limit: a line for each."""
        done = [f"{self.path}: {'; '.join(self.picture.notes)}"] if self.picture.notes else []
        if self.size.height * self.size.width > self.rules.max_pixels:
            most = self.rules.max_pixels // self.rules.pixels_per_token
            done.append(
                f"{self.path}: {self.size.num_tokens} tokens, more than the {most} that pictures are limited to: "
                f"enlarged to {self.rules.min_pixels} pixels, whole tokens are more"
            )
        return tuple(done)

    @property
    def placeholder(self) -> Placeholder:
        return Placeholder("image", self.size.num_tokens)

    def pixels(self) -> PixelCodes:
        """Its patches, a row each."""
        with naming_file(self.path, SCALE_DOWN):
            return image_patches(self.picture, self.rules).pixels


@dataclass(frozen=True)
class OpenedVideo:
    """A video whose frames have the size that they get by `rules`; `seconds` are the times of its frame pairs."""

    path: str | tuple[str, ...]
    video: Video
    rules: VideoProcessorConfig
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    kind: Literal["video"] = "video"

    @property
    def size(self) -> ImageSize:
        return self.video.size

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(timestamps(self.video.indices, self.video.fps, self.rules.temporal_patch_size))

    @property
    def placeholder(self) -> Placeholder:
        return Placeholder("video", self.size.num_tokens // self.size.grid_thw[0], self.seconds)

    def facts(self) -> dict[str, object]:
        """What it is and what it becomes, in plain JSON types; sizes are [height, width]."""
        video, size = self.video, self.size
        return {
            "path": self.path,
            "frames": len(video.indices),
            "fps": video.taken_fps,
            "orig": [video.height, video.width],
            "resized": [size.height, size.width],
            "grid": list(size.grid_thw),
            "tokens": size.num_tokens,
            "timestamps": list(self.seconds),
        }

    def pixels(self) -> PixelCodes:
        """Its patches, a row each, frame pair after frame pair."""
        with naming_file(_name(self.path), FEWER_FRAMES):
            return video_patches(self.video, self.rules).pixels


OpenedVisual: TypeAlias = OpenedPicture | OpenedVideo


def open_visuals(
    sources: Sequence[VisualSource], limits: VisualLimits, directory: Path, model: ModelConfig
) -> tuple[OpenedVisual, ...]:
    """Decode what `sources` name, by the rules of the checkpoint in `directory`, in their order.

    Rules are read only for what there is: a checkpoint without those for videos takes pictures. Raises InputError for
    a file, CheckpointError for the rules, SettingError for the limits.
    """
    image_rules: ImageProcessorConfig | None = None
    video_rules: VideoProcessorConfig | None = None
    opened: list[OpenedVisual] = []
    if any(source.kind == "image" for source in sources):
        image_rules = read_image_processor(directory)
        check_processor(image_rules, model, directory)
        image_rules = with_limits(image_rules, limits.min_pixels, limits.max_pixels, limits.image_tokens)
    if any(source.kind == "video" for source in sources):
        video_rules = read_video_processor(directory)
        check_processor(video_rules, model, directory)
    for source in sources:
        if source.kind == "image":
            assert image_rules is not None
            opened.append(_open_picture(source, image_rules, limits))
        else:
            assert video_rules is not None
            opened.append(_open_video(source, source.fps or limits.fps, video_rules))
    return tuple(opened)


def image_tokens_that_fit(visuals: Sequence[OpenedVisual], room: int) -> int | None:
    """The largest --image-tokens at which pictures and videos that take more than `room` tokens take at most that.

    None where no limit on the pictures does it.
    """
    limited: list[OpenedPicture] = []
    for visual in visuals:
        if visual.kind == "image" and not visual.limited_alone:
            limited.append(visual)
        else:
            room -= visual.size.num_tokens
    if not limited:
        return None
    sizes_hw = [(visual.picture.height, visual.picture.width) for visual in limited]
    return fitting_tokens(sizes_hw, room, limited[0].rules)


def least_image_tokens(visuals: Sequence[OpenedVisual]) -> int | None:
    """The smallest --image-tokens that each picture of these keeps to; None where none goes by it."""
    limited = [visual for visual in visuals if visual.kind == "image" and not visual.limited_alone]
    if not limited:
        return None
    rules = limited[0].rules
    least = math.ceil(rules.min_pixels / rules.pixels_per_token)
    lowest = replace(rules, max_pixels=least * rules.pixels_per_token)
    # Sides are rounded up where a picture is enlarged.
    smallest = (image_size(visual.picture.height, visual.picture.width, lowest).num_tokens for visual in limited)
    return max(least, *smallest)


def fits_unenlarged(visuals: Sequence[OpenedVisual], room: int) -> bool:
    """Whether they would take at most `room` tokens if no picture without limits of its own were enlarged."""
    taken = 0
    for visual in visuals:
        if visual.kind == "image" and not visual.limited_alone:
            rules = replace(visual.rules, min_pixels=1)
            taken += image_size(visual.picture.height, visual.picture.width, rules).num_tokens
        else:
            taken += visual.size.num_tokens
    return taken <= room


def _own_names(path: str, limits: VisualLimits) -> LimitNames:
    """What messages call the limits of a single picture, which hold before those of all."""
    if limits.image_tokens is not None:
        most_otherwise = "--image-tokens"
    else:
        most_otherwise = FLAGS.most_otherwise if limits.max_pixels is None else FLAGS.max_pixels
    return LimitNames(
        f"min_pixels of {path}",
        f"max_pixels of {path}",
        image_tokens=None,
        least_otherwise=FLAGS.least_otherwise if limits.min_pixels is None else FLAGS.min_pixels,
        most_otherwise=most_otherwise,
    )


def _open_picture(source: VisualSource, rules: ImageProcessorConfig, limits: VisualLimits) -> OpenedPicture:
    assert isinstance(source.path, str)
    limited_alone = source.min_pixels is not None or source.max_pixels is not None
    if limited_alone:
        try:
            rules = with_limits(
                rules, source.min_pixels, source.max_pixels, names=_own_names(shown_path(source.path), limits)
            )
        except SettingError as error:
            raise InputError(str(error)) from error
    picture = open_picture(source.path)
    size = image_size(picture.height, picture.width, rules, picture.path)
    return OpenedPicture(source.path, picture, rules, size, limited_alone)


def _open_video(source: VisualSource, fps: float | None, rules: VideoProcessorConfig) -> OpenedVideo:
    path = source.path
    if isinstance(path, str):
        refuse_url(path)
        if not Path(path).is_dir():
            with naming_file(path, FEWER_FRAMES):
                video = open_video(path, rules if fps is None else replace(rules, fps=fps))
            notes, warnings = (tuple(f"{path}: {text}" for text in texts) for texts in (video.notes, video.warnings))
            return OpenedVideo(path, video, rules, notes, warnings)
    name = _name(path)
    files = frame_files(Path(path)) if isinstance(path, str) else path
    with naming_file(name, FEWER_FRAMES):
        try:
            video = open_frames(files, fps or rules.fps, name, rules)
        except NoPictureError as error:
            if not isinstance(path, str):
                raise
            raise InputError(f"{error}; every file in a folder of frames has to be one: move this one") from error
    assumed = [] if fps else [f"no rate is given: taken as {rules.fps:g} frames a second (--fps)"]
    return OpenedVideo(path, video, rules, tuple(f"{name}: {note}" for note in [*assumed, *video.notes]))


def _name(path: str | tuple[str, ...]) -> str:
    """What messages call a video."""
    if isinstance(path, str):
        return path
    return f"the video of {len(path)} frames from {path[0]} on" if len(path) > 1 else f"the video of {path[0]} alone"
