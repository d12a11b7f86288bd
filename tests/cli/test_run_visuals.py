"""`run` with pictures and videos: the reference's goldens from files to ids, and what is said, on the CPU backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kestrel_cli.prompt import BUILT_IN_VISUAL_QUESTION
from kestrel_cuda.inputs.tokenizer import Tokenizer
from tests import checkpoints
from tests.cli.visual_runs import IMAGES, TINY, Ask, Conversation, Run, frames, picture
from tests.goldens import checkpoint, golden, golden_names

GOLDENS = golden_names("img", "vid")
LEAST_MARGIN = 6e-3


@pytest.mark.parametrize("name", GOLDENS)
def test_a_conversation_with_pictures_is_the_goldens(ask: Ask, conversation: Conversation, name: str) -> None:
    """Prompt, grids, positions and the answer's ids, from files beside the conversation's."""
    arrays, info = golden(name)
    found = ask(*("--messages", conversation(info["messages"]), "--quant", "none", "-n", 32), model=checkpoint(name))
    assert found["prompt_ids"] == arrays["input_ids"].tolist()
    assert found["rope_delta"] == int(arrays["rope_deltas"][0, 0])
    assert found["max_position"] == int(arrays["position_ids"].max())
    for kind in ("image", "video"):
        grids = arrays[f"{kind}_grid_thw"].tolist() if f"{kind}_grid_thw" in arrays else []
        assert [visual["grid"] for visual in found[f"{kind}s"]] == grids
    num_tokens = sum(visual["tokens"] for visual in found["images"] + found["videos"])
    assert num_tokens == int((arrays["mm_token_type_ids"] > 0).sum()) > 0
    assert found["vision_ms"] > 0

    small = np.flatnonzero(arrays["greedy_margins"] < LEAST_MARGIN)
    steps = int(small[0]) if small.size else 32
    assert steps > 5
    assert found["ids"][:steps] == arrays["greedy_ids"][:steps].tolist()


def test_image_is_put_before_the_text(ask: Ask) -> None:
    arrays, info = golden("tiny-dense-tied/img-rgb-96x64")
    text = info["messages"][0]["content"][1]["text"]
    found = ask("--image", IMAGES / "rgb_96x64.png", text, "-n", 1)
    assert found["prompt_ids"] == arrays["input_ids"].tolist()
    assert found["images"] == [
        {
            "path": str(IMAGES / "rgb_96x64.png"),
            "orig": [64, 96],
            "resized": [64, 96],
            "grid": [1, 4, 6],
            "tokens": 6,
        }
    ]
    assert found["videos"] == []
    by_variable = ask(text, "-n", 1, KESTREL_CUDA_IMAGE=str(IMAGES / "rgb_96x64.png"))
    assert by_variable["prompt_ids"] == found["prompt_ids"]
    assert by_variable["ids"] == found["ids"]


def test_a_folder_of_frames_is_the_goldens_video(ask: Ask, tmp_path: Path) -> None:
    arrays, _ = golden("tiny-dense-tied/vid-clip")
    found = ask("--video", frames(tmp_path / "clip"), "--fps", "2", "What moves?", "-n", 2, "--quant", "none")
    assert found["prompt_ids"] == arrays["input_ids"].tolist()
    assert found["ids"] == arrays["greedy_ids"][:2].tolist()
    assert found["videos"] == [
        {
            "path": str(tmp_path / "clip"),
            "frames": 4,
            "fps": 2.0,
            "orig": [64, 64],
            "resized": [64, 64],
            "grid": [2, 4, 4],
            "tokens": 8,
            "timestamps": [0.25, 1.25],
        }
    ]
    assert found["notes"][0].startswith("generation_config.json"), "nothing is said of a video that is as it should be"
    unsaid = ask("--video", tmp_path / "clip", "What moves?", "-n", 2, "--quant", "none")
    assert unsaid["prompt_ids"] == found["prompt_ids"]
    assert f"{tmp_path / 'clip'}: no rate is given: taken as 2 frames a second (--fps)" in unsaid["notes"]
    for half in (".5", "0.50", "0.5"):
        slower = ask("--video", tmp_path / "clip", "--fps", half, "What moves?", "-n", 1)
        assert (slower["videos"][0]["fps"], slower["videos"][0]["timestamps"]) == (0.5, [1.0, 5.0])


def test_a_video_file_is_the_goldens_video(ask: Ask, tmp_path: Path) -> None:
    """A lossless one of four frames, two a second."""
    arrays, _ = golden("tiny-dense-tied/vid-clip")
    path = tmp_path / "clip.avi"
    av = pytest.importorskip("av", reason="PyAV is not installed", exc_type=ImportError)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=2)
        stream.height = stream.width = 64
        stream.pix_fmt = "rgb24"
        for number in range(4):
            frame_hwc = np.asarray(Image.open(IMAGES / f"clip_64x64_f{number}.png").convert("RGB"))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame_hwc, format="rgb24")))
        container.mux(stream.encode())
    found = ask("--video", path, "What moves?", "-n", 4, "--quant", "none")
    assert found["prompt_ids"] == arrays["input_ids"].tolist()
    assert found["ids"] == arrays["greedy_ids"][:4].tolist()
    assert (found["videos"][0]["frames"], found["videos"][0]["fps"]) == (4, 2.0)
    assert f"{path}: 4 of 4 frames are taken (2 a second in the file)" in found["notes"]


def test_pictures_and_videos_stay_in_the_order_of_the_command_line(ask: Ask, tmp_path: Path) -> None:
    a, b, clip = IMAGES / "rgb_96x64.png", IMAGES / "wide_400x20.png", frames(tmp_path / "clip")
    found = ask("--image", a, "--video", clip, "--image", b, "-n", 1)
    flat = [token_id for token_id in found["prompt_ids"] if token_id in (626, 627)]
    num_a, num_b = (image["tokens"] for image in found["images"])
    assert flat == [626] * num_a + [627] * 8 + [626] * num_b
    assert [image["path"] for image in found["images"]] == [str(a), str(b)]
    assert found["settings"]["image"] == {"value": [str(a), str(b)], "source": "flag"}
    others_first = ask("--video", clip, "--image", a, "--image", b, "-n", 1)
    assert others_first["prompt_ids"] != found["prompt_ids"]
    assert f"no prompt given; asking: {BUILT_IN_VISUAL_QUESTION}" in found["notes"]


def test_case_d24_two_pictures_of_different_size(ask: Ask, tmp_path: Path) -> None:
    """Swapped, they are another prompt with another answer."""
    red = picture(tmp_path / "red.png", 128, 128, (255, 0, 0))
    blue = picture(tmp_path / "blue.png", 64, 160, (0, 0, 255))
    one, other = (ask("--image", a, "--image", b, "Which?", "-n", 8) for a, b in ((red, blue), (blue, red)))
    assert [image["tokens"] for image in one["images"]] == [16, 10]
    assert other["images"] == one["images"][::-1]
    assert one["ids"] != other["ids"]


def test_case_d22_hidden_colours_do_not_show(ask: Ask, tmp_path: Path) -> None:
    """Black under full transparency is a white picture, and that is said once."""
    clear = picture(tmp_path / "clear.png", 96, 96, (0, 0, 0, 0), "RGBA")
    white = picture(tmp_path / "white.png", 96, 96, (255, 255, 255))
    seen, expected = ask("--image", clear, "--image", clear, "-n", 8), ask("--image", white, "--image", white, "-n", 8)
    assert seen["logits_sha256"] == expected["logits_sha256"]
    assert seen["notes"].count(f"{clear}: transparency laid over white") == 1


def test_case_d23_a_photo_is_turned_upright(real_run: Run, ask: Ask, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = picture(tmp_path / "photo.jpg", 64, 128, exif=exif)
    found = ask("--image", photo, "-n", 1)
    assert (found["images"][0]["orig"], found["images"][0]["grid"]) == ([128, 64], [1, 8, 4])
    note = f"{photo}: turned by 90° clockwise (EXIF orientation 6)"
    assert note in found["notes"]
    _, _, err = real_run("-m", TINY, "--image", photo, "hi", "-n", 1)
    assert err.count(note) == 1
    _, out, err = real_run("-m", TINY, "--image", photo, "hi", "-n", 1, "--quiet")
    assert err == ""
    assert "TOKIDS" in out


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [((), 28), (("--max-pixels", 8192), 6), (("--image-tokens", 8), 6), (("--min-pixels", 30_000), 28)],
)
def test_case_d25_limits_change_the_grid(ask: Ask, tmp_path: Path, flags: tuple[object, ...], tokens: int) -> None:
    path = picture(tmp_path / "a.png", 300, 500)
    (image,) = ask("--image", path, "-n", 1, *flags)["images"]
    assert image["tokens"] == tokens


def test_case_d26_names_with_blanks_and_other_letters(ask: Ask, tmp_path: Path) -> None:
    path = picture(tmp_path / "ein bild 图 é.png", 64, 64)
    assert ask("--image", path, "-n", 1)["images"][0]["path"] == str(path)


@pytest.mark.parametrize(
    ("height", "width", "grid", "rope_delta"), [(256, 256, [1, 16, 16], -56), (240, 720, [1, 16, 44], 22 - 176)]
)
def test_case_d29_text_goes_on_behind_the_larger_side(
    ask: Ask, tmp_path: Path, height: int, width: int, grid: list[int], rope_delta: int
) -> None:
    """With the released limits; 240 x 720 is case D19's too."""
    model = checkpoints.copy(TINY, tmp_path / "model")
    limits = {"size.shortest_edge": 65536, "size.longest_edge": 16_777_216}
    checkpoints.edit_json(model / "preprocessor_config.json", limits)
    found = ask("--image", picture(tmp_path / "a.png", height, width), "Hi", "-n", 1, model=model)
    assert (found["images"][0]["grid"], found["rope_delta"]) == (grid, rope_delta)
    assert found["max_position"] == found["n_prompt"] + rope_delta - 1


@pytest.mark.parametrize("chunk", [1, 7])
def test_no_prefill_chunk_changes_the_answer(ask: Ask, chunk: int) -> None:
    """Chunks cut through both pictures."""
    flags = ("--image", IMAGES / "rgb_96x64.png", "--image", IMAGES / "rgba_70x90.png", "What differs?", "-n", 12)
    whole = ask(*flags, "--quant", "none")
    cut = ask(*flags, "--quant", "none", "--prefill-chunk", chunk)
    assert cut["ids"] == whole["ids"]
    assert cut["prompt_ids"] == whole["prompt_ids"]


@pytest.mark.parametrize("keep", [1, 2])
def test_no_window_changes_the_answer(ask: Ask, keep: int) -> None:
    """To the bit, with three pictures."""
    flags = [
        word for name in ("rgb_96x64", "wide_400x20", "grey_64x48") for word in ("--image", IMAGES / f"{name}.png")
    ]
    whole, windowed = (ask(*flags, "hi", "-n", 6, "--keep", k) for k in ("off", keep))
    assert windowed["logits_sha256"] == whole["logits_sha256"]
    assert whole["residency"]["h2d_bytes_per_token"] == 0
    # The weights that are read but for lm_head are those of four layers.
    read = windowed["bytes_read_per_token"]
    lm_head = read - windowed["residency"]["h2d_bytes_per_token"] * 4 // (4 - keep)
    assert windowed["residency"]["uploads_per_token"] == 4 - keep
    assert 0 < lm_head < read / 2


def test_case_d34_a_picture_with_no_text(ask: Ask) -> None:
    found = ask("--image", IMAGES / "rgb_96x64.png", "", "-n", 1)
    shown = Tokenizer.load(TINY).decode(found["prompt_ids"], skip_special=False)
    picture_text = f"<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>"
    assert shown == f"<|im_start|>user\n{picture_text}<|im_end|>\n<|im_start|>assistant\n"


def test_a_placeholder_that_is_typed_stays_text(ask: Ask) -> None:
    typed = "what is <|image_pad|>, and <|vision_start|><|video_pad|><|vision_end|>?"
    found = ask("--image", IMAGES / "rgb_96x64.png", typed, "-n", 1)
    assert found["prompt_ids"].count(626) == 6
    assert 627 not in found["prompt_ids"]
    assert 626 not in ask(typed, "-n", 1)["prompt_ids"]


def test_what_pictures_would_need_is_said_to_be_unused(ask: Ask) -> None:
    notes = ask("hi", "-n", 1, "--image-tokens", 4, "--fps", 1)["notes"]
    assert "--image-tokens changed nothing: the prompt has no picture" in notes
    assert "--fps changed nothing: the prompt has no video" in notes
    notes = ask("hi", "-n", 1, "--keep-tower")["notes"]
    assert "--keep-tower changed nothing: the prompt has no picture and no video" in notes


def test_a_tower_that_is_kept_takes_memory_and_changes_no_answer(ask: Ask) -> None:
    left, kept = (ask("--image", IMAGES / "rgb_96x64.png", "hi", "-n", 3, *flags) for flags in ((), ("--keep-tower",)))
    assert kept["logits_sha256"] == left["logits_sha256"]
    peaks = [run["residency"]["peak_device_bytes"] for run in (left, kept)]
    assert peaks[0] < peaks[1]


def test_text_alone_is_as_before(ask: Ask) -> None:
    found = ask("hi", "-n", 1)
    assert (found["images"], found["videos"], found["vision_ms"], found["rope_delta"]) == ([], [], None, 0)
    assert found["max_position"] == found["n_prompt"] - 1
