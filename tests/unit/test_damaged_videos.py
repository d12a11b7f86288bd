"""Video files that are cut off or damaged: what can be read is taken with a warning, or nothing is."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest

from kestrel_cuda.inputs import video_file
from kestrel_cuda.inputs.video_file import open_video
from tests.unit.test_video_file import RELEASED, refusal, write

av = pytest.importorskip("av", reason="PyAV is not installed", exc_type=ImportError)

NOISE = [np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8) for number in range(48)]


def cut(path: Path, kept: float = 0.6) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    return path


def test_a_video_that_is_cut_off(tmp_path: Path) -> None:
    """Without its index it is refused; with fewer frames than it says, that is said."""

    path = cut(write(tmp_path / "a.mp4", NOISE, "mpeg4", "yuv420p"))
    assert refusal(path).startswith(" is a video that is cut off or damaged (")
    for path in (
        write(tmp_path / "b.mp4", NOISE, "mpeg4", "yuv420p", movflags="faststart"),
        write(tmp_path / "c.avi", NOISE),
    ):
        video = open_video(str(cut(path)), RELEASED)
        assert 4 < video.num_source_frames < 48
        expected = f"says it has 48 frames, {video.num_source_frames} can be read: it may be cut off"
        assert video.warnings[0] == expected


def test_frames_that_cannot_be_shown_are_not_counted(tmp_path: Path) -> None:
    """A stream that begins between two whole pictures, as a recording of a broadcast does."""
    path = write(tmp_path / "a.ts", NOISE, "libx264", "yuv420p", gop=12)
    content = path.read_bytes()
    path.write_bytes(content[len(content) // 3 // 188 * 188 :])
    with av.open(str(path)) as container:
        num_stored = sum(1 for packet in container.demux(video=0) if packet.size)
    video = open_video(str(path), RELEASED)
    assert 4 <= video.num_source_frames < num_stored
    assert video.indices[-1] == video.num_source_frames - 1


@pytest.mark.parametrize(("name", "codec"), [("a.mkv", "mpeg4"), ("a.webm", "libvpx-vp9")])
def test_a_file_that_ends_before_it_says(tmp_path: Path, name: str, codec: str) -> None:
    """Such files do not say how many frames they have, only how long they are."""
    path = write(tmp_path / name, NOISE, codec, "yuv420p")
    assert open_video(str(path), RELEASED).warnings == ()
    video = open_video(str(cut(path)), RELEASED)
    assert 4 <= video.num_source_frames < 40
    assert video.warnings[0].startswith("says it lasts 2 s, and ends after ")
    assert video.warnings[0].endswith(" s: it may be cut off")


def test_sound_that_goes_on_after_the_last_frame_is_no_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        frames, sound = container.add_stream("mpeg4", rate=24), container.add_stream("pcm_s16le", rate=8000)
        frames.height = frames.width = 64
        frames.pix_fmt = "yuv420p"
        for frame_hwc in NOISE:
            container.mux(frames.encode(av.VideoFrame.from_ndarray(frame_hwc, format="rgb24")))
        container.mux(frames.encode())
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 40_000), np.int16), layout="mono")
        silence.sample_rate = 8000
        container.mux(sound.encode(silence))
    with av.open(str(path)) as container:
        assert container.duration is not None
        assert container.duration > 4_000_000
    assert open_video(str(path), RELEASED).warnings == ()


def test_damage_in_the_middle(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mkv", NOISE, "mpeg4", "yuv420p")
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 300] = bytes(300)
    path.write_bytes(content)
    warnings = open_video(str(path), RELEASED).warnings
    assert any(" damaged or incomplete, and taken as far as decoded: fetch the file again" in text for text in warnings)


def test_too_little_of_a_video_is_no_picture(tmp_path: Path) -> None:
    """One frame of 48: it was a video, so advice for single pictures is no help."""
    avi, mkv = write(tmp_path / "a.avi", NOISE), write(tmp_path / "a.mkv", NOISE, "mpeg4", "yuv420p", gop=1)
    for path, found in ((avi, "of 48 frames 1 can be read"), (mkv, "1 can be read")):
        one_frame = next(kept for kept in np.linspace(0.02, 0.1, 40) if num_packets(cut(copy(path), kept)) == 1)
        line = refusal(cut(path, one_frame))
        assert line.startswith(" is a video that is cut off or damaged (")
        assert line.endswith(f"): {found}, and at least 2 are needed; fetch it again")


def copy(path: Path) -> Path:
    return Path(shutil.copyfile(path, path.with_name(f"copy{path.suffix}")))


def num_packets(path: Path) -> int:
    try:
        with av.open(str(path)) as container:
            return sum(1 for packet in container.demux(video=0) if packet.size)
    except av.FFmpegError:
        return 0


def test_a_disk_that_fails_while_a_video_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.avi", NOISE)

    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 100_000:
                raise OSError(5, "Input/output error")
            return super().read(size)

    monkeypatch.setattr(video_file, "open_input", lambda *_: Failing(path.read_bytes()))
    assert refusal(path) == " cannot be read: Input/output error; check the disk that it is on"
