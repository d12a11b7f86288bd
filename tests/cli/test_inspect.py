"""The command `inspect`: what it says of pictures, and which of them it refuses (cases D19 to D26)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kestrel_cli import program
from tests import checkpoints
from tests.checkpoints import edit_json

Inspect = Callable[..., tuple[int, str, str]]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    """Run `inspect`; exit code, standard output, standard error."""

    def call(*arguments: object, **variables: str) -> tuple[int, str, str]:
        exit_code = program.execute(["inspect", *map(str, arguments)], variables)
        return (int(exit_code), *capsys.readouterr())

    return call


@pytest.fixture
def released(oracle: Path, tmp_path: Path) -> Path:
    """A checkpoint with the limits of the released ones, and no weights at all."""
    folder = checkpoints.copy(oracle / "checkpoints/tiny-dense-tied", tmp_path / "released")
    edit_json(folder / "preprocessor_config.json", {"size.shortest_edge": 65536, "size.longest_edge": 16_777_216})
    (folder / "model.safetensors").unlink()
    return folder


def picture(path: Path, height: int, width: int, mode: str = "RGB", **options: Any) -> Path:
    Image.new(mode, (width, height)).save(path, **options)
    return path


def one(ran: tuple[int, str, str]) -> dict[str, Any]:
    """The one picture of --json."""
    assert ran[0] == 0, ran[2]
    assert ran[1].count("\n") == 1
    (image,) = json.loads(ran[1])["images"]
    assert isinstance(image, dict)
    return image


def test_three_lines_a_picture(inspect: Inspect, released: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = picture(tmp_path / "photo.jpg", 1080, 1920, exif=exif)
    cut_out = picture(tmp_path / "cut out.png", 256, 256, "RGBA")
    exit_code, out, err = inspect(photo, cut_out, "-m", released)
    assert exit_code == 0
    assert out == (
        f"{photo}: 1920 x 1080 (height x width); turned by 90° clockwise (EXIF orientation 6)\n"
        "  resized to 1920 x 1088, grid 1 x 120 x 68, 2040 tokens; "
        "--image-tokens 1040 (--max-pixels 1064960) would make it 1008\n"
        "  encoding takes 73.5 GFLOP, about 6 ms on an H200, and 49.11 MiB of a GPU: tower 1.23 MiB, "
        "buffers 43.90 MiB, features 3.98 MiB\n"
        f"{cut_out}: 256 x 256 (height x width); transparency laid over white\n"
        "  resized to 256 x 256, grid 1 x 16 x 16, 64 tokens; "
        "no smaller limit halves that: pictures have at least 65536 pixels (--min-pixels)\n"
        "  encoding takes 0.235 GFLOP, about 6 ms on an H200, and 2.73 MiB of a GPU: tower 1.23 MiB, "
        "buffers 1.38 MiB, features 128.00 KiB\n"
    )
    assert err.startswith("settings")
    assert "embedded" not in err


def test_json_is_one_object(inspect: Inspect, released: Path, tmp_path: Path) -> None:
    path = picture(tmp_path / "ünïcödé 图.gif", 720, 1280, "P")
    exit_code, out, err = inspect(path, path, "-m", released, "--json", "--quiet")
    assert (exit_code, err) == (0, "")
    result = json.loads(out)
    assert set(result) == {"version", "model", "images", "videos", "settings", "notes", "warnings"}
    assert result["images"] == [result["images"][0]] * 2
    assert result["images"][0] == {
        "path": str(path),
        "orig": [720, 1280],
        "resized": [704, 1280],
        "grid": [1, 44, 80],
        "tokens": 880,
        "half": {"image_tokens": 455, "max_pixels": 465920, "tokens": 420},
        "notes": ["palette colours converted to RGB"],
        "cost": result["images"][0]["cost"],
    }
    cost = result["images"][0]["cost"]
    sizes = ("tower_bytes", "buffer_bytes", "feature_bytes")
    assert set(cost) == {"flops", *sizes, "device_bytes", "estimated_h200_ms"}
    assert cost["device_bytes"] == sum(cost[size] for size in sizes)
    assert result["settings"]["model"] == {"value": str(released), "source": "flag"}


def test_the_limit_that_is_named_halves(inspect: Inspect, released: Path, tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", 1000, 1500)
    before = one(inspect(path, "-m", released, "--json"))
    for flag, key in (("--image-tokens", "image_tokens"), ("--max-pixels", "max_pixels")):
        after = one(inspect(path, "-m", released, "--json", flag, before["half"][key]))
        assert after["tokens"] == before["half"]["tokens"] <= before["tokens"] // 2


@pytest.mark.parametrize(
    ("height", "width", "resized", "tokens"),
    [(720, 1280, [704, 1280], 880), (272, 272, [256, 256], 64), (240, 720, [256, 704], 176)],
)
def test_odd_sizes(
    inspect: Inspect, released: Path, tmp_path: Path, height: int, width: int, resized: list[int], tokens: int
) -> None:
    """D19."""
    image = one(inspect(picture(tmp_path / "a.png", height, width), "-m", released, "--json"))
    assert (image["orig"], image["resized"], image["tokens"]) == ([height, width], resized, tokens)


@pytest.mark.parametrize(("height", "width", "tokens"), [(1, 1, 64), (16, 16, 64), (30, 305, 78), (1, 200, 114)])
def test_tiny_and_long(inspect: Inspect, released: Path, tmp_path: Path, height: int, width: int, tokens: int) -> None:
    """D20, and D21's ratio of exactly 200."""
    image = one(inspect(picture(tmp_path / "a.png", height, width), "-m", released, "--json"))
    assert image["tokens"] == tokens


def test_too_long(inspect: Inspect, released: Path, tmp_path: Path) -> None:
    """D21."""
    path = picture(tmp_path / "a.png", 1, 201)
    exit_code, out, err = inspect(path, "-m", released, "--quiet")
    assert (exit_code, out) == (2, "")
    assert err.count("\n") == 1
    assert "one side 201 times the other; at most 200 times is taken" in err
    assert one(inspect(picture(tmp_path / "b.png", 15420, 690), "-m", released, "--json"))["tokens"] == 10604


def test_orientation(inspect: Inspect, released: Path, tmp_path: Path) -> None:
    """D23."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = one(inspect(picture(tmp_path / "a.jpg", 320, 640, exif=exif), "-m", released, "--json"))
    assert (image["orig"], image["grid"]) == ([640, 320], [1, 40, 20])


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_limits(inspect: Inspect, released: Path, tmp_path: Path, how: str) -> None:
    """D25."""
    path = picture(tmp_path / "a.png", 1080, 1920)
    flags, variables = (
        (["--max-pixels", "200000"], {}) if how == "flag" else ([], {"KESTREL_CUDA_MAX_PIXELS": "200000"})
    )
    image = one(inspect(path, "-m", released, "--json", *flags, **variables))
    assert (image["resized"], image["tokens"]) == ([320, 576], 180)


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        (["--min-pixels", "90000", "--max-pixels", "80000"], {}, "90000 pixels at least (--min-pixels) and 80000"),
        (["--max-pixels", "5"], {}, "--max-pixels is 5; it takes a whole number from 1024"),
        ([], {"KESTREL_CUDA_IMAGE_TOKENS": "9999999"}, "(--image-tokens comes from KESTREL_CUDA_IMAGE_TOKENS)"),
        (["--max-pixels", "-1"], {}, "--max-pixels holds '-1'; it takes a whole number of pixels"),
        (["--max-pixels", "200000", "--image-tokens", "99"], {}, "--max-pixels and --image-tokens contradict"),
        (["--keep", "4"], {}, "No such option: --keep"),
    ],
)  # fmt: skip
def test_limits_that_leave_no_size(
    inspect: Inspect, released: Path, tmp_path: Path, flags: list[str], variables: dict[str, str], message: str
) -> None:
    """D25."""
    exit_code, out, err = inspect(picture(tmp_path / "a.png", 9, 9), "-m", released, "--quiet", *flags, **variables)
    assert (exit_code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_three_ways_to_be_no_picture(inspect: Inspect, released: Path, tmp_path: Path) -> None:
    """D26: not a picture, cut off, not there, a directory; the others in the list are said first."""
    good = picture(tmp_path / "good one.png", 99, 99)
    text, cut = tmp_path / "a.png", tmp_path / "b.jpg"
    text.write_text("hello")
    content = picture(tmp_path / "whole.jpg", 99, 99).read_bytes()
    cut.write_bytes(content[: len(content) * 6 // 10])
    heard = set()
    for bad, found in (
        (text, "is text, not a picture"),
        (cut, "is a JPEG that is cut off"),
        (tmp_path / "no such.png", "does not exist"),
        (tmp_path, "is a directory"),
        ("https://example.com/a.png", "is a URL"),
    ):
        exit_code, out, err = inspect(good, bad, "-m", released, "--quiet")
        assert exit_code == 2
        assert out.startswith(f"{good}: 99 x 99")
        assert err.startswith(f"kestrel-cuda: {bad} {found}")
        assert err.count("\n") == 1
        heard.add(err)
        exit_code, out, _ = inspect(good, bad, "-m", released, "--json", "--quiet")
        error = json.loads(out)["error"]
        assert (exit_code, error["kind"]) == (2, "input")
        assert f"kestrel-cuda: {error['message']}\n" == err
    assert len(heard) == 5


def test_the_embedded_model_is_said_to_be_it(inspect: Inspect, tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", 64, 64)
    exit_code, out, err = inspect(path)
    assert exit_code == 0
    assert "36 tokens" in out
    assert "no --model given: sizes are those of the small embedded model" in err
    result = json.loads(inspect(path, "--json", "--quiet")[1])
    assert len(result["notes"]) == 1


def test_a_checkpoint_that_takes_no_pictures(inspect: Inspect, released: Path, tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", 64, 64)
    (released / "preprocessor_config.json").unlink()
    exit_code, _, err = inspect(path, "-m", released, "--quiet")
    assert exit_code == 2
    assert "lacks preprocessor_config.json" in err
    exit_code, _, err = inspect(path, "-m", tmp_path / "nowhere", "--quiet")
    assert exit_code == 2
    assert "nowhere does not exist" in err


def test_a_file_has_to_be_named(inspect: Inspect) -> None:
    exit_code, out, err = inspect()
    assert (exit_code, out) == (2, "")
    assert err == "kestrel-cuda: nothing to inspect: give a picture's FILE, or --video FILE|DIR\n"


def test_paths_are_read_as_those_of_a_run_are(
    inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = picture(tmp_path / "a.png", 64, 64)
    exit_code, out, _ = inspect("~/a.png", "--quiet")
    assert exit_code == 0
    assert out.startswith(f"{path}: 64 x 64")
    for blank in ("", " "):
        exit_code, out, err = inspect(path, blank)
        assert (exit_code, out) == (2, "")
        assert err == f"kestrel-cuda: FILE holds {blank!r}; it takes the path of a picture\n"


def test_names_with_control_characters_stay_on_their_line(inspect: Inspect, tmp_path: Path) -> None:
    out = inspect(picture(tmp_path / "a\n\x1b[31m.png", 64, 64))[1]
    assert out.count("\n") == 3
    assert "\x1b" not in out


class TestVideos:
    """What a run would make of them, in the words of its JSON."""

    @pytest.fixture
    def clip(self, tmp_path: Path) -> Path:
        (tmp_path / "clip").mkdir()
        for number in range(5):
            picture(tmp_path / "clip" / f"{number}.png", 120, 200)
        return tmp_path / "clip"

    def test_a_folder_of_frames(self, inspect: Inspect, clip: Path) -> None:
        exit_code, out, err = inspect("--video", clip, "--fps", 2, "--quiet")
        assert (exit_code, err) == (0, "")
        head, became, cost = out.splitlines()
        assert head == f"{clip}: 5 frames of 120 x 200 (height x width), 2 a second"
        assert became == "  resized to 128 x 192, grid 3 x 8 x 12, 72 tokens, 24 for each of 3 times"
        assert cost.startswith("  encoding takes 1.45 GFLOP, about ")

    def test_json_has_what_a_run_has(self, inspect: Inspect, clip: Path, capsys: pytest.CaptureFixture[str]) -> None:
        flags = ["--video", str(clip), "--fps", "1", "--json", "--quiet"]
        exit_code, out, _ = inspect(picture(clip.parent / "a.png", 64, 64), *flags)
        assert exit_code == 0
        result = json.loads(out)
        assert len(result["images"]) == 1
        (video,) = result["videos"]
        assert video.pop("cost")["flops"] > 10**9
        assert program.execute(["run", "hi", "-n", "1", *flags], {}) == 0
        assert json.loads(capsys.readouterr().out)["videos"] == [video]

    def test_a_video_file(self, inspect: Inspect, tmp_path: Path) -> None:
        av = pytest.importorskip("av", reason="PyAV is not installed", exc_type=ImportError)
        path = tmp_path / "a.avi"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("png", rate=4)
            stream.height = stream.width = 64
            stream.pix_fmt = "rgb24"
            for number in range(16):
                image = Image.new("RGB", (64, 64), (9 * number, 0, 0))
                container.mux(stream.encode(av.VideoFrame.from_image(image)))
            container.mux(stream.encode())
        exit_code, out, _ = inspect("--video", path, "--fps", 2, "--quiet")
        assert exit_code == 0
        assert out.startswith(f"{path}: 8 frames of 64 x 64 (height x width), 2 a second\n")
        assert "for each of 4 times; a lower --fps takes fewer frames\n" in out
        _, fewest, _ = inspect("--video", path, "--fps", 0.5, "--quiet")
        assert fewest.startswith(f"{path}: 4 frames")
        assert "--fps" not in fewest, "no video has fewer"

    def test_what_it_does_not_use_is_said(self, inspect: Inspect, clip: Path) -> None:
        _, out, err = inspect("--video", clip, "--fps", 2, "--image-tokens", 1, "--min-pixels", 9, "--json")
        said = "--min-pixels, --image-tokens changed nothing: there is no picture"
        assert said in json.loads(out)["notes"]
        assert said in err
        _, out, _ = inspect(picture(clip.parent / "a.png", 64, 64), "--json", KESTREL_CUDA_FPS="3")
        assert "KESTREL_CUDA_FPS changed nothing: there is no video" in json.loads(out)["notes"]

    def test_what_cannot_be_read_is_refused(self, inspect: Inspect, tmp_path: Path, released: Path, clip: Path) -> None:
        assert inspect("--video", tmp_path / "none.mp4", "--quiet")[0] == 2
        (released / "video_preprocessor_config.json").unlink()
        exit_code, _, err = inspect("--video", clip, "-m", released, "--quiet")
        assert exit_code == 2
        assert "video_preprocessor_config.json" in err
