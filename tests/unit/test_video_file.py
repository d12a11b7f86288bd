"""Video files to frames: which ones, upright, with the reference's timestamps; and what is no video, or half of one."""

from __future__ import annotations

import struct
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kestrel_cuda.checkpoint.processor_json import read_video_processor
from kestrel_cuda.config import VideoProcessorConfig
from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.frames import Video, timestamps, video_patches
from kestrel_cuda.inputs.video_file import open_video
from tests.goldens import ORACLE, checkpoint, golden

av = pytest.importorskip("av", reason="PyAV is not installed", exc_type=ImportError)

HALF = (0.5, 0.5, 0.5)
RELEASED = VideoProcessorConfig(4096, 25_165_824, 16, 2, 2, HALF, HALF, 1 / 255, 2.0, 4, 768)


def write(
    path: Path,
    frames: list[np.ndarray[Any, Any]],
    codec: str = "png",
    pixels: str = "rgb24",
    rate: Any = 24,
    gop: int = 0,
    **options: str,
) -> Path:
    """A video of RGB frames [height, width, 3], or RGBA ones; png keeps them to the bit."""
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        stream.gop_size = gop or stream.gop_size
        of_frames = "rgb24" if frames[0].shape[2] == 3 else "rgba"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format=of_frames)))
        container.mux(stream.encode())
    return path


def numbered(count: int, height: int = 64, width: int = 64) -> list[np.ndarray[Any, Any]]:
    """Frames of one red each, which is their number."""
    return [np.dstack([np.full((height, width), number), *np.zeros((2, height, width))]).astype(np.uint8)
            for number in range(count)]  # fmt: skip


def reds(video: Video) -> list[int]:
    return [int(frame_hwc[0, 0, 0]) for frame_hwc in video.frames_hwc]


def test_a_lossless_file_is_the_goldens_clip(tmp_path: Path) -> None:
    name = "tiny-dense-tied/vid-clip"
    arrays, info = golden(name)
    frames = [np.asarray(Image.open(ORACLE / "images" / file)) for file in info["videos"][0]["frames"]]
    rules = read_video_processor(checkpoint(name))
    video = open_video(str(write(tmp_path / "clip.avi", frames, rate=2)), rules)
    assert (video.indices, video.fps, video.taken_fps) == ((0, 1, 2, 3), 2.0, 2.0)
    assert np.array_equal(video_patches(video, rules).pixel_values, arrays["pixel_values_videos"])
    assert timestamps(video.indices, video.fps, 2) == [0.25, 1.25]


@pytest.mark.parametrize(
    ("name", "codec", "pixels"), [("a.avi", "png", "rgb24"), ("a.mov", "png", "rgb24"), ("a.mkv", "ffv1", "bgr0")]
)
def test_frames_are_the_reference_s_sample(tmp_path: Path, name: str, codec: str, pixels: str) -> None:
    """Two seconds at 24 frames a second: four frames, evenly spread from the first to the last."""
    video = open_video(str(write(tmp_path / name, numbered(48), codec, pixels)), RELEASED)
    assert video.indices == (0, 16, 31, 47)
    assert reds(video) == [0, 16, 31, 47]
    assert (video.fps, video.num_source_frames, video.taken_fps) == (24.0, 48, 2.0)
    assert video.notes == ("4 of 48 frames are taken (24 a second in the file)",)


@pytest.mark.parametrize(
    ("fps", "indices"), [(24.0, tuple(range(48))), (4.0, (0, 7, 13, 20, 27, 34, 40, 47)), (0.1, (0, 16, 31, 47))]
)
def test_the_rate_to_take(tmp_path: Path, fps: float, indices: tuple[int, ...]) -> None:
    video = open_video(str(write(tmp_path / "a.avi", numbered(48))), replace(RELEASED, fps=fps))
    assert video.indices == indices
    assert reds(video) == list(indices)


def test_compressed_files(tmp_path: Path) -> None:
    """Frames that are differences to others, in an order of their own; a WebM does not say how many there are."""
    for name, codec in (("a.mp4", "mpeg4"), ("a.webm", "libvpx-vp9"), ("b.mp4", "libx264"), ("a.ts", "mpeg2video")):
        bright = [np.full((64, 64, 3), 5 * number, np.uint8) for number in range(48)]
        path = write(tmp_path / name, bright, codec, "yuv420p", Fraction(24))
        video = open_video(str(path), RELEASED)
        assert video.indices == (0, 16, 31, 47), name
        assert np.allclose(reds(video), [0, 80, 155, 235], atol=6), name


def test_an_animation(tmp_path: Path) -> None:
    images = [Image.new("RGB", (64, 64), (40 * number, 0, 0)) for number in range(5)]
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:], duration=100)
    video = open_video(str(tmp_path / "a.gif"), RELEASED)
    assert video.num_source_frames == 5
    assert reds(video)[0] == 0


OVER_WHITE = "4 of 4 frames: transparency laid over white"


@pytest.mark.parametrize(
    ("name", "codec", "pixels"),
    [
        ("a.mov", "png", "rgba"),
        ("a.mov", "qtrle", "argb"),
        ("a.avi", "utvideo", "gbrap"),
        ("a.mkv", "ffv1", "yuva420p"),
        ("a.mov", "prores_ks", "yuva444p10le"),
    ],
)
def test_transparency_is_laid_over_white(tmp_path: Path, name: str, codec: str, pixels: str) -> None:
    frame = np.zeros((64, 64, 4), np.uint8)
    frame[:32] = 200, 0, 0, 255
    video = open_video(str(write(tmp_path / name, [frame] * 4, codec, pixels)), RELEASED)
    assert OVER_WHITE in video.notes
    assert video.warnings == ()
    for frame_hwc in video.frames_hwc:
        assert np.allclose(frame_hwc[4, 4], (200, 0, 0), atol=2)
        assert frame_hwc[60, 60].tolist() == [255, 255, 255]


def test_what_is_half_transparent_shines_through(tmp_path: Path) -> None:
    frame = np.full((64, 64, 4), (0, 100, 200, 51), np.uint8)
    video = open_video(str(write(tmp_path / "a.mov", [frame] * 4, "png", "rgba")), RELEASED)
    assert video.frames_hwc[0][0, 0].tolist() == [204, 224, 244]


def test_alpha_that_hides_nothing_is_no_news(tmp_path: Path) -> None:
    frame = np.full((64, 64, 4), (200, 0, 0, 255), np.uint8)
    video = open_video(str(write(tmp_path / "a.mov", [frame] * 4, "png", "rgba")), RELEASED)
    assert video.notes == ("4 of 4 frames are taken (24 a second in the file)",)
    assert video.frames_hwc[0][0, 0].tolist() == [200, 0, 0]


def test_a_transparent_animation(tmp_path: Path) -> None:
    images = [Image.new("RGBA", (64, 64), (200, 0, 0, 255)) for _ in range(4)]
    for number, image in enumerate(images):
        image.paste((0, 0, 0, 0), (0, 32, 64, 64))
        image.putpixel((number, 0), (0, 255, 0, 255))  # equal ones would be merged
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:], duration=100, disposal=2)
    video = open_video(str(tmp_path / "a.gif"), RELEASED)
    assert OVER_WHITE in video.notes
    assert video.frames_hwc[0][60, 60].tolist() == [255, 255, 255]


def test_transparency_that_a_decoder_passes_over_is_warned_of(tmp_path: Path) -> None:
    """A WebM holds it as a second picture beside each."""
    frame = np.zeros((64, 64, 4), np.uint8)
    clear = open_video(str(write(tmp_path / "a.webm", [frame] * 4, "libvpx-vp9", "yuva420p")), RELEASED)
    assert clear.warnings == (
        "says it is transparent, which is not read from vp9: give a folder of its frames to have it",
    )
    opaque = open_video(str(write(tmp_path / "b.webm", [frame[..., :3]] * 4, "libvpx-vp9", "yuv420p")), RELEASED)
    assert opaque.warnings == ()


def turn(path: Path, matrix: tuple[int, int, int, int]) -> None:
    """Give an MP4 of one track the matrix by which players turn it."""

    def packed(a: int, b: int, c: int, d: int) -> bytes:
        return struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)

    content = path.read_bytes()
    track = content.index(b"tkhd")
    at = content.index(packed(1, 0, 0, 1), track)
    path.write_bytes(content[:at] + packed(*matrix) + content[at + 36 :])


@pytest.mark.parametrize(
    ("matrix", "corner", "note"),
    [
        ((1, 0, 0, 1), (0, 0), None),
        ((0, 1, -1, 0), (0, -1), "turned by 90° clockwise"),
        ((-1, 0, 0, -1), (-1, -1), "turned by 180°"),
        ((0, -1, 1, 0), (-1, 0), "turned by 90° counterclockwise"),
    ],
)
def test_a_video_is_turned_upright(
    tmp_path: Path, matrix: tuple[int, int, int, int], corner: tuple[int, int], note: str | None
) -> None:
    """As phones record: the picture lies, and a matrix says so."""
    frame = np.zeros((64, 128, 3), np.uint8)
    frame[:16, :16] = 255
    path = write(tmp_path / "a.mp4", [frame] * 4, "mpeg4", "yuv420p")
    turn(path, matrix)
    video = open_video(str(path), RELEASED)
    lies = matrix[0] == 0
    assert (video.height, video.width) == ((128, 64) if lies else (64, 128))
    for frame_hwc in video.frames_hwc:
        corners = {(row, column): int(frame_hwc[row, column, 0]) for row in (0, -1) for column in (0, -1)}
        assert max(corners, key=lambda place: corners[place]) == corner
    assert video.notes[1:] == ((f"4 of 4 frames: {note}",) if note else ())


def test_without_pyav_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.avi", numbered(4))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError) as caught:
        open_video(str(path), RELEASED)
    assert str(caught.value) == (
        f"{path} takes PyAV to decode, which is not installed: run pip install av, or give a folder of the video's "
        "frames"
    )


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_video(str(path), RELEASED)
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_what_is_no_video(tmp_path: Path) -> None:
    text, empty, still, sound = (tmp_path / name for name in ("a.mp4", "b.mp4", "c.mp4", "d.mkv"))
    text.write_text("hello")
    empty.write_bytes(b"")
    Image.new("RGB", (64, 64)).save(still, "PNG")
    with av.open(str(sound), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), layout="mono")
        silence.sample_rate = 8000
        container.mux(stream.encode(silence))
    assert refusal(text).startswith(" is text, not a video that is read; give MP4,")
    assert refusal(empty) == " is empty (0 bytes); a video is needed: fetch it again"
    assert refusal(still).startswith(" is a PNG, not a video")
    assert refusal(sound) == " holds no video, only sound; a video is needed"
    write(tmp_path / "whole.mp4", numbered(12))
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "whole.mp4").read_bytes()[:-200])
    assert "only sound" not in refusal(tmp_path / "cut.mp4")
    assert "cut off or damaged" in refusal(tmp_path / "cut.mp4")
    assert refusal(tmp_path / "no.mp4") == " does not exist; check the path of the video"
    assert refusal(tmp_path) == " is a directory, not a file; the path of a video file is needed"
    assert refusal(write(tmp_path / "e.avi", numbered(1))).startswith(" has 1 frame; at least 2 are needed")


@pytest.mark.parametrize(
    "text", ["#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile '{}'\n"]
)
def test_lists_of_other_files_are_not_followed(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.ts", numbered(48), "mpeg2video", "yuv420p")
    playlist = tmp_path / "list.m3u8"
    playlist.write_text(text.format("a.ts"))
    assert refusal(playlist).startswith(" is text, not a video that is read")
