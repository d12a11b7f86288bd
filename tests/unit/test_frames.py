"""Frames to patches and timestamps: the reference's goldens to the bit, its rules for sizes, sampling and times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from kestrel_cuda.checkpoint.processor_json import read_video_processor
from kestrel_cuda.config import VideoProcessorConfig
from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.frames import (
    frame_files,
    open_frames,
    sampled,
    timestamps,
    video_patches,
    video_size,
)

ORACLE = Path(__file__).resolve().parents[1] / "data" / "oracle"
GOLDENS = sorted(f"{path.parent.name}/{path.stem}" for path in ORACLE.glob("golden/*/vid-*.npz"))
HALF = (0.5, 0.5, 0.5)
RELEASED = VideoProcessorConfig(4096, 25_165_824, 16, 2, 2, HALF, HALF, 1 / 255, 2.0, 4, 768)


def test_all_video_goldens_are_here() -> None:
    assert len(GOLDENS) == 2


@pytest.mark.parametrize("name", GOLDENS)
def test_pixel_values_are_the_goldens(name: str) -> None:
    path = ORACLE / "golden" / name
    (video,) = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["videos"]
    rules = read_video_processor(ORACLE / "checkpoints" / path.parent.name)
    clip = open_frames([ORACLE / "images" / frame for frame in video["frames"]], video["fps"], "the clip", rules)
    patches = video_patches(clip, rules)
    with np.load(path.with_suffix(".npz")) as golden:
        assert [list(patches.size.grid_thw)] == golden["video_grid_thw"].tolist()
        assert np.array_equal(patches.pixel_values, golden["pixel_values_videos"])
    assert patches.size.num_tokens == 8
    assert [f"{time:.1f}" for time in timestamps(clip.indices, clip.fps, 2)] == ["0.2", "1.2"]


def bicubic_matrix(num_in: int, num_out: int) -> NDArray[np.float64]:
    """Keys' cubic with a = -0.5, widened when it shrinks (antialias): what torch's resize computes, [out, in]."""
    scale = num_in / num_out
    width = max(scale, 1.0)
    centers = (np.arange(num_out) + 0.5) * scale
    distance = np.abs((np.arange(num_in) + 0.5)[None, :] - centers[:, None]) / width
    near = 1.5 * distance**3 - 2.5 * distance**2 + 1
    far = -0.5 * distance**3 + 2.5 * distance**2 - 4 * distance + 2
    weights = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
    return np.asarray(weights / weights.sum(1, keepdims=True))


@pytest.mark.parametrize(("height", "width"), [(100, 75), (61, 333), (470, 620), (20, 47)])
def test_resized_frames_are_near_an_exact_resize(tmp_path: Path, height: int, width: int) -> None:
    """Smaller and larger, of noise, where the rounding between the two passes of an 8-bit resize shows most.

    Of grey values that no overshoot takes out of 0 to 255, since both passes clip.
    """
    rng = np.random.default_rng(height)
    frames = rng.integers(64, 192, (2, height, width, 3), np.uint8)
    files = [tmp_path / f"f{number}.png" for number in range(2)]
    for file, frame in zip(files, frames, strict=True):
        Image.fromarray(frame).save(file)
    clip = open_frames(files, 2.0, "noise", RELEASED)
    assert (clip.size.height, clip.size.width) != (height, width)
    rows, columns = bicubic_matrix(height, clip.size.height), bicubic_matrix(width, clip.size.width)
    exact = np.einsum("yi,xj,fijc->fyxc", rows, columns, frames.astype(np.float64), optimize=True)
    apart = np.abs(np.stack(clip.frames_hwc).astype(np.float64) - np.round(exact))
    assert apart.max() <= 1
    assert apart.mean() < 0.25


def write_frames(folder: Path, count: int, height: int = 64, width: int = 64) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        Image.new("RGB", (width, height), (number, 0, 0)).save(folder / f"f{number}.png")
    return folder


def test_an_odd_last_frame_is_repeated(tmp_path: Path) -> None:
    files = frame_files(write_frames(tmp_path / "frames", 3))
    odd = video_patches(open_frames(files, 2.0, "three", RELEASED), RELEASED)
    even = video_patches(open_frames([*files, files[-1]], 2.0, "four", RELEASED), RELEASED)
    assert odd.size.grid_thw == even.size.grid_thw == (2, 4, 4)
    assert np.array_equal(odd.pixel_values, even.pixel_values)
    reds = (odd.pixel_values.reshape(2, 16, 3, 2, 256)[:, 0, 0, :, 0] * 0.5 + 0.5) * 255
    assert np.round(reds).tolist() == [[0, 1], [2, 2]]


def test_frames_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = write_frames(tmp_path / "frames", 12)
    (folder / ".DS_Store").write_bytes(b"x")
    assert [file.stem for file in frame_files(folder)] == [f"f{number}" for number in range(12)]


@pytest.mark.parametrize(
    ("indices", "fps", "expected"),
    [
        (range(4), 2.0, [0.25, 1.25]),
        (range(5), 2.0, [0.25, 1.25, 2.0]),
        ([0, 12, 24, 36], 24.0, [0.25, 1.25]),
        (range(2), 30.0, [1 / 60]),
    ],
)
def test_timestamps(indices: list[int], fps: float, expected: list[float]) -> None:
    assert timestamps(indices, fps, 2) == expected


@pytest.mark.parametrize(
    ("total", "source_fps", "expected"),
    [
        (48, 24.0, [0, 16, 31, 47]),
        (3, 24.0, [0, 1, 2]),
        (10, 2.0, list(range(10))),
        (240, 24.0, np.linspace(0, 239, 20).round().astype(int).tolist()),
    ],
)
def test_sampling(total: int, source_fps: float, expected: list[int]) -> None:
    assert sampled(total, source_fps, RELEASED) == expected
    assert len(sampled(1_000_000, 24.0, RELEASED)) == 768


@pytest.mark.parametrize(
    ("num_frames", "height", "width", "limits", "expected"),
    [
        (4, 480, 640, {}, (2, 480, 640)),
        (5, 480, 640, {}, (3, 480, 640)),
        # 10 x 10 is first brought to 32 x 32; 4 frames of that are the least area exactly.
        (4, 10, 10, {}, (2, 32, 32)),
        (2, 32, 32, {}, (1, 64, 64)),
        # 60 frames of 720p are over the most: sqrt(60 * 720 * 1280 / 25165824) = 1.482.
        (60, 720, 1280, {}, (30, 480, 832)),
        # 5 frames count as 4 (2.5 halves to even) before the limit, as 5 in the scale, as 6 in the patches.
        (5, 64, 64, {"max_pixels": 4 * 64 * 64}, (3, 64, 64)),
        (7, 64, 64, {"max_pixels": 7 * 64 * 64}, (4, 64, 64)),
    ],
)
def test_sizes(
    num_frames: int, height: int, width: int, limits: dict[str, int], expected: tuple[int, int, int]
) -> None:
    size = video_size(num_frames, height, width, replace(RELEASED, **limits), "clip")
    assert (size.grid_thw[0], size.height, size.width) == expected
    assert size.num_tokens == expected[0] * expected[1] * expected[2] // 1024


def test_frames_that_make_no_video(tmp_path: Path) -> None:
    folder = write_frames(tmp_path / "frames", 1)
    with pytest.raises(InputError, match="clip has 1 frame; at least 2 are needed: give a single one as a picture"):
        open_frames(frame_files(folder), 2.0, "clip", RELEASED)
    with pytest.raises(InputError, match=r"clip has no frames; at least 2 are needed: check that it is the one meant$"):
        open_frames([], 2.0, "clip", RELEASED)
    write_frames(folder, 2)
    Image.new("RGB", (64, 32)).save(folder / "f2.png")
    with pytest.raises(InputError, match=r"clip: .*f2\.png is 32 x 64 .* is 64 x 64; frames of one size are needed"):
        open_frames(frame_files(folder), 2.0, "clip", RELEASED)
    (folder / "f3.png").write_text("hello")
    with pytest.raises(InputError, match=r"f3\.png is text, not a picture"):
        open_frames([folder / "f0.png", folder / "f3.png"], 2.0, "clip", RELEASED)
    with pytest.raises(InputError, match="cannot be read"):
        frame_files(tmp_path / "nowhere")
    with pytest.raises(InputError, match="one side 300 times the other"):
        video_size(2, 32, 9600, RELEASED, "clip")
    with pytest.raises(InputError, match=r"^clip is 300 x 1 pixels \(height x width\), one side 300 times the other"):
        video_size(2, 300, 1, RELEASED, "clip")
