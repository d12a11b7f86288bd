"""The frames of a video to patches and timestamps. Knows no video format: frames come as pictures.

Frames that are given are taken as they are; `sampled` says which of a video file's to decode. Where the reference
resizes frames by torch, Pillow does it here: at most two of 255 levels apart, in few values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.config import VideoProcessorConfig
from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.image_size import ImageSize, check_aspect_ratio, size_of, smart_resize
from kestrel_cuda.inputs.pictures import Picture, open_picture
from kestrel_cuda.inputs.pixels import Patches, cut, resize

LEAST_FRAMES = 2


@dataclass(frozen=True)
class Video:
    """Frames of `height` x `width`, each resized to `size`.

    `indices` are their numbers among the `num_source_frames` of a video of `fps` frames a second; `notes` say what was
    done to them, `warnings` what may be wrong with them.
    """

    height: int
    width: int
    size: ImageSize
    frames_hwc: tuple[NDArray[np.uint8], ...]
    indices: tuple[int, ...]
    num_source_frames: int
    fps: float
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def taken_fps(self) -> float:
        """Frames taken for each second of the video."""
        return self.fps * len(self.indices) / self.num_source_frames


def frame_files(folder: Path) -> list[Path]:
    """The files in a folder by name, numbers in names by value (2 before 10); hidden ones are left out."""
    try:
        files = [file for file in folder.iterdir() if not file.name.startswith(".")]
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror}; a folder of frames is needed") from error
    return sorted(files, key=lambda file: [(len(part), part) if part.isdigit() else (0, part) for part in _parts(file)])


def open_frames(files: Sequence[Path | str], fps: float, where: str, rules: VideoProcessorConfig) -> Video:
    """The video of the frames in picture files, none left out. Raises InputError, which calls the video `where`."""
    check_frame_count(len(files), where)
    return take_frames(map(open_picture, files), range(len(files)), len(files), fps, where, rules)


def take_frames(
    pictures: Iterable[Picture],
    indices: Sequence[int],
    num_source_frames: int,
    fps: float,
    where: str,
    rules: VideoProcessorConfig,
) -> Video:
    """The video of as many pictures as there are indices; each is resized as it comes, and then let go.

    Raises InputError, which calls the video `where`, unless they are of one size that a video may have.
    """
    first: Picture | None = None
    frames_hwc: list[NDArray[np.uint8]] = []
    done: Counter[str] = Counter()
    for picture in pictures:
        if first is None:
            first = picture
            size = video_size(len(indices), first.height, first.width, rules, where)
        if (picture.height, picture.width) != (first.height, first.width):
            raise InputError(
                f"{where}: {picture.path} is {picture.height} x {picture.width} pixels (height x width), "
                f"{first.path} is {first.height} x {first.width}; frames of one size are needed"
            )
        frames_hwc.append(resize(picture.rgb, size))
        done.update(picture.notes)
    assert first is not None
    assert len(frames_hwc) == len(indices)
    notes = tuple(f"{count} of {len(indices)} frames: {note}" for note, count in done.items())
    height, width = first.height, first.width
    return Video(height, width, size, tuple(frames_hwc), tuple(indices), num_source_frames, fps, notes)


def check_frame_count(num_frames: int, where: str) -> None:
    if num_frames < LEAST_FRAMES:
        found = "1 frame" if num_frames else "no frames"
        do = "give a single one as a picture" if num_frames else "check that it is the one meant"
        raise InputError(f"{where} has {found}; at least {LEAST_FRAMES} are needed: {do}")


def video_size(num_frames: int, height: int, width: int, rules: VideoProcessorConfig, where: str) -> ImageSize:
    """What so many frames of this size become. Raises InputError for frames too long for their width."""
    factor, frames_a_patch = rules.factor, rules.temporal_patch_size
    given_hw = height, width
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    check_aspect_ratio(height, width, where, given_hw)
    # The limits look at a rounded count of frames, halves to even; the patches at one that is rounded up.
    num_counted = round(num_frames / frames_a_patch) * frames_a_patch
    resized = smart_resize(height, width, num_frames, num_counted, rules)
    return size_of(-(-num_frames // frames_a_patch), *resized, rules)


def video_patches(video: Video, rules: VideoProcessorConfig) -> Patches:
    """The patches of a video; the last frame is repeated where a temporal patch is not full."""
    num_padded = video.size.grid_thw[0] * rules.temporal_patch_size
    frames_hwc = [*video.frames_hwc, *[video.frames_hwc[-1]] * (num_padded - len(video.frames_hwc))]
    return Patches(cut(frames_hwc, video.size, rules, _values(rules)), video.size)


def _values(rules: VideoProcessorConfig) -> NDArray[np.float32]:
    """Mean and deviation are scaled, not pixels, as the reference does for videos: a last bit apart from pictures."""
    scale = np.float32(1 / rules.rescale_factor)
    mean = np.array(rules.image_mean, np.float32)[:, None] * scale
    deviation = np.array(rules.image_std, np.float32)[:, None] * scale
    values: NDArray[np.float32] = (np.arange(256, dtype=np.float32)[None, :] - mean) / deviation
    return values


def timestamps(indices: Iterable[int], fps: float, frames_a_patch: int) -> list[float]:
    """Seconds of each temporal patch: the mean of its first and last frame's time."""
    padded = list(indices)
    padded += [padded[-1]] * (-len(padded) % frames_a_patch)
    times = [index / fps for index in padded]
    return [(times[i] + times[i + frames_a_patch - 1]) / 2 for i in range(0, len(times), frames_a_patch)]


def sampled(total: int, source_fps: float, rules: VideoProcessorConfig) -> list[int]:
    """Which frames of a video file the reference takes: evenly spread, `rules.fps` a second within its bounds."""
    wanted = int(total / source_fps * rules.fps)
    num_frames = min(max(wanted, rules.min_frames), rules.max_frames, total)
    indices: list[int] = np.linspace(0, total - 1, num_frames).round().astype(int).tolist()
    return indices


def _parts(file: Path) -> list[str]:
    """A name cut at its numbers: texts and numbers by turns, leading zeros off."""
    parts = re.split(r"([0-9]+)", file.name)
    return [part.lstrip("0") or "0" if i % 2 else part for i, part in enumerate(parts)]
