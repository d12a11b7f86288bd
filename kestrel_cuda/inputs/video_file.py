"""A video file to the frames that the reference takes of it, decoded by PyAV, which is optional. Knows no patches.

Which frames those are goes by how many there are to decode: what a file says of itself may be absent or wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

from PIL import Image

from kestrel_cuda.checkpoint.files import printable
from kestrel_cuda.config import VideoProcessorConfig
from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.frames import LEAST_FRAMES, Video, check_frame_count, sampled, take_frames
from kestrel_cuda.inputs.pictures import OVER_WHITE, Picture, open_input, over_white, read_start, unreadable_input
from kestrel_cuda.inputs.signatures import other_kind, picture_kind
from kestrel_cuda.paths import shown_path

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.format import VideoFormat

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

_FORMATS_WITH_DURATION = ("mov", "mp4", "matroska", "webm", "flv")
"""Those that write how long they are; of others FFmpeg estimates it."""

_LEAST_SLACK_S, _SLACK_SHARE, _SLACK_FRAMES = 0.5, 0.02, 2
"""By how much a whole file may be shorter than it says: seconds, share, frames, whichever is the most."""


class _FewerFrames(Exception):
    """Not every frame that is stored can be shown: some lack the frames that they are differences to."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames


@dataclass(frozen=True)
class _Stored:
    """What a file holds (frames to decode, seconds up to the end of its last sound or frame) and says it holds."""

    num_frames: int
    num_said: int
    seconds: float
    seconds_said: float | None
    rate: float | None
    codec: str
    loses_alpha: bool
    """Says it is transparent, in a way that its codec's decoder passes over (WebM)."""

    @property
    def lacks_frames(self) -> bool:
        return self.num_frames < self.num_said

    @property
    def ends_early(self) -> bool:
        if self.seconds_said is None:
            return False
        slack = max(_LEAST_SLACK_S, _SLACK_SHARE * self.seconds_said, _SLACK_FRAMES / self.rate if self.rate else 0)
        return self.seconds_said - self.seconds > slack


def open_video(path: str, rules: VideoProcessorConfig) -> Video:
    """The frames of a video file, `rules.fps` a second within the bounds of `rules`, upright and resized.

    Raises InputError, one line with the path, for what is no video or is damaged, and where PyAV is missing. What can
    be read of a file that is cut off or damaged is taken, with a warning.
    """
    notes: list[str] = []
    with open_input(path, "video") as file:
        with _container(path, file) as container:
            stored = _look_through(container)
        if not stored.rate:
            notes.append(f"says nothing of its rate: taken as {_USUAL_FPS:g} frames a second")
        fps = stored.rate or _USUAL_FPS
        try:
            video, num_damaged = _sample(path, file, stored, fps, rules)
        except _FewerFrames as fewer:
            stored = replace(stored, num_frames=fewer.num_frames)
            video, num_damaged = _sample(path, file, stored, fps, rules)
    num_frames = video.num_source_frames
    notes.append(f"{len(video.indices)} of {num_frames} frames are taken ({fps:.5g} a second in the file)")
    return replace(video, notes=(*notes, *video.notes), warnings=tuple(_doubts(stored, num_damaged)))


def _look_through(container: InputContainer) -> _Stored:
    """Read a file to its end without decoding it."""
    stream = container.streams.video[0]
    rate = stream.average_rate or stream.guessed_rate
    num_frames, end_s = 0, 0.0
    for packet in container.demux():
        if packet.stream.index == stream.index and packet.size and not packet.is_discard:
            num_frames += 1
        if packet.pts is not None and packet.time_base:
            end_s = max(end_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
    says_duration = any(name in _FORMATS_WITH_DURATION for name in container.format.name.split(","))
    seconds_said = container.duration / 1e6 if says_duration and container.duration else None
    seconds = end_s - (container.start_time or 0) / 1e6
    return _Stored(
        num_frames,
        stream.frames,
        seconds,
        seconds_said,
        float(rate) if rate else None,
        stream.codec_context.name,
        loses_alpha=stream.metadata.get("alpha_mode") == "1" and not _may_have_alpha(stream.format),
    )


def _doubts(stored: _Stored, num_damaged: int) -> Iterator[str]:
    """What speaks for a file that is not whole, or is not taken whole."""
    if stored.lacks_frames:
        yield f"says it has {stored.num_said} frames, {stored.num_frames} can be read: it may be cut off"
    elif stored.ends_early:
        yield (f"says it lasts {stored.seconds_said:.3g} s, and ends after {stored.seconds:.3g} s: it may be cut off")
    if stored.loses_alpha:
        yield f"says it is transparent, which is not read from {stored.codec}: give a folder of its frames to have it"
    if num_damaged:
        frames = "1 frame is" if num_damaged == 1 else f"{num_damaged} frames are"
        yield f"{frames} damaged or incomplete, and taken as far as decoded: fetch the file again"


def _sample(path: str, file: BinaryIO, stored: _Stored, fps: float, rules: VideoProcessorConfig) -> tuple[Video, int]:
    """The video, and how many of the frames up to its last are damaged."""
    num_frames, where = stored.num_frames, shown_path(path)
    if num_frames < LEAST_FRAMES and (stored.lacks_frames or stored.ends_early):
        found = f"of {stored.num_said} frames " if stored.lacks_frames else ""
        raise InputError(
            f"{where} is a video that is cut off or damaged ({file.seek(0, 2)} bytes): {found}{num_frames or 'none'} "
            f"can be read, and at least {LEAST_FRAMES} are needed; fetch it again"
        )
    check_frame_count(num_frames, where)
    indices = sampled(num_frames, fps, rules)
    damaged: list[int] = []
    with _container(path, file) as container:
        video = take_frames(_pictures(container, indices, damaged), indices, num_frames, fps, where, rules)
    return video, len(damaged)


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
                found = "only sound" if container.streams.audio else "or one that is cut off or damaged"
                raise InputError(f"{shown_path(path)} holds no video, {found}; a video is needed")
            container.streams.video[0].thread_type = "AUTO"
            yield container
    except (InputError, MemoryError, _FewerFrames):
        raise
    except Exception as error:  # FFmpeg's are of a dozen classes, and decoders raise ValueError and EOFError too
        if isinstance(error, OSError) and not isinstance(error, av.FFmpegError):
            raise unreadable_input(path, error) from error
        found = picture_kind(start) or other_kind(start)
        if not is_open and not found.endswith("video") and found != "a GIF":
            raise InputError(f"{shown_path(path)} is {found}, not a video that is read; give {READ_FORMATS}") from error
        size = file.seek(0, 2)
        # What Python trips over is a header that makes no sense.
        is_pythons = isinstance(error, AttributeError | TypeError | UnicodeError)
        said = "" if is_pythons else getattr(error, "strerror", None) or str(error)
        reason = printable(said) or "it cannot be read"
        raise InputError(
            f"{shown_path(path)} is a video that is cut off or damaged ({size} bytes): {reason}; fetch it again"
        ) from error


def _pictures(container: InputContainer, indices: Sequence[int], damaged: list[int]) -> Iterator[Picture]:
    """The frames of these numbers, which ascend, upright; `damaged` gets the numbers of those that are.

    Raises _FewerFrames where there are not as many.
    """
    wanted = set(indices)
    num_decoded = 0
    for frame in container.decode(video=0):
        if frame.is_corrupt:
            damaged.append(num_decoded)
        if num_decoded in wanted:
            yield _picture(frame, f"frame {num_decoded}")
        num_decoded += 1
        if num_decoded > indices[-1]:
            return
    raise _FewerFrames(num_decoded)


def _may_have_alpha(pixels: VideoFormat | None) -> bool:
    # A palette may have an alpha, of which its one component says nothing.
    return pixels is not None and (pixels.has_palette or any(component.is_alpha for component in pixels.components))


def _picture(frame: VideoFrame, name: str) -> Picture:
    """A decoded frame, upright and without its alpha."""
    notes: list[str] = []
    rgb = None
    if _may_have_alpha(frame.format):
        rgba = Image.fromarray(frame.to_ndarray(format="rgba"))
        if rgba.getextrema()[-1] != (255, 255):
            rgb = over_white(rgba)
            notes.append(OVER_WHITE)
    if rgb is None:
        rgb = Image.fromarray(frame.to_ndarray(format="rgb24"))
    turn = _TURNS.get(round(frame.rotation) % 360)
    if turn is not None:
        rgb = rgb.transpose(turn[0])
        notes.insert(0, turn[1])
    return Picture(name, rgb, tuple(notes))
