"""A video file to the frames that the reference takes of it, decoded by PyAV, which is optional. Knows no patches.

Which frames those are goes by how many there are to decode: what a file says of itself may be absent or wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO

from PIL import Image

from kestrel_cuda.checkpoint.files import printable
from kestrel_cuda.config import VideoProcessorConfig
from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.frames import Video, check_frame_count, sampled, take_frames
from kestrel_cuda.inputs.pictures import Picture, open_input, read_start
from kestrel_cuda.inputs.signatures import other_kind, picture_kind
from kestrel_cuda.paths import shown_path

if TYPE_CHECKING:
    from av.container import InputContainer

READ_FORMATS = "MP4, MOV, Matroska, WebM, AVI, MPEG, FLV, Ogg or GIF"
# Named one by one: some of FFmpeg's others are lists of further files and addresses, which it would open.
_FORMATS = "mov,mp4,matroska,webm,avi,mpeg,mpegts,flv,ogg,gif"
_USUAL_FPS = 24.0
"""What the reference takes for the rate of a video that does not say."""

_TURNS = {
    90: (Image.Transpose.ROTATE_90, "turned by 90° counterclockwise"),
    180: (Image.Transpose.ROTATE_180, "turned by 180°"),
    270: (Image.Transpose.ROTATE_270, "turned by 90° clockwise"),
}
_START_BYTES = 512


class _FewerFrames(Exception):
    """Not every frame that is stored can be shown: some lack the frames that they are differences to."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames


def open_video(path: str, rules: VideoProcessorConfig) -> Video:
    """The frames of a video file, `rules.fps` a second within the bounds of `rules`, upright and resized.

    Raises InputError, one line with the path, for what is no video or is damaged, and where PyAV is missing.
    """
    notes: list[str] = []
    warnings: list[str] = []
    with open_input(path, "video") as file:
        with _container(path, file) as container:
            stream = container.streams.video[0]
            num_said = stream.frames
            rate = stream.average_rate or stream.guessed_rate
            num_frames = sum(1 for packet in container.demux(stream) if packet.size and not packet.is_discard)
        if not rate:
            notes.append(f"says nothing of its rate: taken as {_USUAL_FPS:g} frames a second")
        fps = float(rate) if rate else _USUAL_FPS
        try:
            video = _sample(path, file, num_frames, fps, rules)
        except _FewerFrames as fewer:
            video = _sample(path, file, fewer.num_frames, fps, rules)
    num_frames = video.num_source_frames
    if num_frames < num_said:
        warnings.append(f"says it has {num_said} frames, {num_frames} can be read: it may be cut off")
    notes.append(f"{len(video.indices)} of {num_frames} frames are taken ({fps:.5g} a second in the file)")
    return replace(video, notes=(*notes, *video.notes), warnings=tuple(warnings))


def _sample(path: str, file: BinaryIO, num_frames: int, fps: float, rules: VideoProcessorConfig) -> Video:
    check_frame_count(num_frames, shown_path(path))
    indices = sampled(num_frames, fps, rules)
    with _container(path, file) as container:
        return take_frames(_pictures(container, indices), indices, num_frames, fps, shown_path(path), rules)


@contextmanager
def _container(path: str, file: BinaryIO) -> Iterator[InputContainer]:
    """The video in a file, from its beginning; whatever PyAV raises over its bytes, as one line."""
    try:
        import av
    except ImportError as error:
        raise InputError(
            f"{shown_path(path)} takes PyAV to decode, which is not installed: run pip install av, or give a folder of "
            "the video's frames"
        ) from error
    file.seek(0)
    start = read_start(path, file, _START_BYTES)
    if not start:
        raise InputError(f"{shown_path(path)} is empty (0 bytes); a video is needed: fetch it again")
    file.seek(0)
    is_open = False
    try:
        # The open file, not its name, which FFmpeg would read addresses and protocols out of.
        with av.open(file, mode="r", options={"format_whitelist": _FORMATS}) as container:
            is_open = True
            if not container.streams.video:
                raise InputError(f"{shown_path(path)} holds no video, only sound; a video is needed")
            container.streams.video[0].thread_type = "AUTO"
            yield container
    except (InputError, MemoryError, _FewerFrames):
        raise
    except Exception as error:  # FFmpeg's are of a dozen classes, and decoders raise ValueError and EOFError too
        found = picture_kind(start) or other_kind(start)
        if not is_open and not found.endswith("video") and found != "a GIF":
            raise InputError(f"{shown_path(path)} is {found}, not a video that is read; give {READ_FORMATS}") from error
        size = file.seek(0, 2)
        reason = printable(getattr(error, "strerror", None) or str(error)) or type(error).__name__
        raise InputError(
            f"{shown_path(path)} is a video that is cut off or damaged ({size} bytes): {reason}; fetch it again"
        ) from error


def _pictures(container: InputContainer, indices: Sequence[int]) -> Iterator[Picture]:
    """The frames of these numbers, which ascend, upright. Raises _FewerFrames where there are not as many."""
    wanted = set(indices)
    num_decoded = 0
    for frame in container.decode(video=0):
        if num_decoded in wanted:
            rgb = Image.fromarray(frame.to_ndarray(format="rgb24"))
            turn = _TURNS.get(round(frame.rotation) % 360)
            if turn is None:
                yield Picture(f"frame {num_decoded}", rgb)
            else:
                yield Picture(f"frame {num_decoded}", rgb.transpose(turn[0]), (turn[1],))
        num_decoded += 1
        if num_decoded > indices[-1]:
            return
    raise _FewerFrames(num_decoded)
