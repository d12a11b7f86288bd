"""`run` with pictures and videos that it cannot take: one line, before weights are loaded, with what would do."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrel_cli import options
from tests import checkpoints
from tests.checkpoints import edit_json
from tests.cli.visual_runs import IMAGES, TINY, Ask, Conversation, Refuse, Run, frames, picture
from tests.goldens import golden

EMBEDDED = options.MODEL.default

TINY_RANDOM = Path(__file__).resolve().parents[1] / "data" / "tiny-random"


def test_limits_of_one_picture(ask: Ask, refuse: Refuse, conversation: Conversation) -> None:
    parts = [
        {"type": "image", "image": "rgb_100x75.png", "max_pixels": 4096},
        {"type": "image", "image": "rgb_100x75.png"},
    ]
    path = conversation([{"role": "user", "content": parts}])
    assert [image["tokens"] for image in ask("--messages", path, "-n", 1)["images"]] == [2, 6]
    everywhere = ask("--messages", path, "-n", 1, "--image-tokens", 5)
    assert [image["tokens"] for image in everywhere["images"]] == [2, 2]
    parts[0]["max_pixels"] = 2048
    line = refuse("--messages", conversation([{"role": "user", "content": parts}]))
    own = f"max_pixels of {path.parent / 'rgb_100x75.png'}"
    assert f"4096 pixels at least (the checkpoint) and 2048 at most ({own}); lower min_pixels of " in line
    assert line.endswith(f", or raise {own}")
    line = refuse("--messages", path, KESTREL_CUDA_MIN_PIXELS="3000")
    assert f"3000 pixels at least (--min-pixels) and 2048 at most ({own})" in line
    assert line.endswith("(--min-pixels comes from KESTREL_CUDA_MIN_PIXELS)")
    parts[0] = {"type": "image", "image": "rgb_100x75.png", "min_pixels": 6000}
    line = refuse("--messages", conversation([{"role": "user", "content": parts}]), "--image-tokens", 5)
    assert "6000 pixels at least (min_pixels of " in line
    assert "and 5120 at most (--image-tokens); lower min_pixels of " in line


@pytest.mark.parametrize(
    ("own", "flags", "notes"),
    [
        ({"max_pixels": 8000}, ("--image-tokens", 7), ["--image-tokens changed nothing: every picture"]),
        ({"max_pixels": 8000}, ("--max-pixels", 7000), ["--max-pixels changed nothing: every picture"]),
        ({"max_pixels": 8000}, ("--min-pixels", 5000), []),
        ({"min_pixels": 4000}, ("--min-pixels", 5000), ["--min-pixels changed nothing: every picture"]),
        ({"min_pixels": 4000}, ("--image-tokens", 7), []),
    ],
)
def test_limits_that_every_picture_overrides_change_nothing(
    ask: Ask, conversation: Conversation, own: dict[str, int], flags: tuple[object, ...], notes: list[str]
) -> None:
    part = {"type": "image", "image": "rgb_100x75.png"}
    path = conversation([{"role": "user", "content": [part | own]}])
    said = [note for note in ask("--messages", path, "-n", 1, *flags)["notes"] if "changed nothing" in note]
    assert [note.removesuffix(f" of the conversation has its own {next(iter(own))}") for note in said] == notes
    both = conversation([{"role": "user", "content": [part | own, part]}])
    assert not any("changed nothing" in note for note in ask("--messages", both, "-n", 1, *flags)["notes"])


def test_a_rate_that_every_video_overrides_changes_nothing(
    ask: Ask, conversation: Conversation, tmp_path: Path
) -> None:
    part = {"type": "video", "video": str(frames(tmp_path / "clip")), "fps": 4}
    path = conversation([{"role": "user", "content": [part]}])
    notes = ask("--messages", path, "-n", 1, "--fps", 2)["notes"]
    assert "--fps changed nothing: every video of the conversation has its own fps" in notes


def test_case_d26_what_is_no_picture_is_refused_before_weights_are_loaded(refuse: Refuse, tmp_path: Path) -> None:
    text, cut = tmp_path / "a.png", tmp_path / "b.jpg"
    text.write_text("hello")
    content = picture(tmp_path / "whole.jpg", 99, 99).read_bytes()
    cut.write_bytes(content[: len(content) * 6 // 10])
    lines = set()
    for bad, found in (
        (text, "is text, not a picture"),
        (cut, "is a JPEG that is cut off"),
        (tmp_path / "no such.png", "does not exist; check the path of the picture"),
        (tmp_path, "is a directory"),
        ("https://example.com/a.png", "is a URL, and only files are read"),
    ):
        line = refuse("--image", IMAGES / "rgb_96x64.png", "--image", bad, "hi")
        assert line.startswith(f"{bad} {found}")
        lines.add(line)
    assert len(lines) == 5


def test_a_raw_prompt_says_where_pictures_belong(ask: Ask, refuse: Refuse, tmp_path: Path) -> None:
    arrays, info = golden("tiny-dense-tied/img-rgb-96x64")
    raw = info["prompt_text"]
    image = IMAGES / "rgb_96x64.png"
    assert ask("--raw", raw, "--image", image, "-n", 1)["prompt_ids"] == arrays["input_ids"].tolist()
    arrays, info = golden("tiny-dense-tied/vid-clip")
    clip = ask("--raw", info["prompt_text"], "--video", frames(tmp_path / "clip"), "-n", 1)
    assert clip["prompt_ids"] == arrays["input_ids"].tolist()
    assert refuse("--raw", "hi", "--image", image) == (
        "the raw prompt has places for none, and 1 picture came with the prompt; write "
        "<|vision_start|><|image_pad|><|vision_end|> where a picture belongs (<|video_pad|> for a video)"
    )
    line = refuse("--raw", raw + raw, "--image", image)
    assert line.startswith("the raw prompt has places for 2 pictures, and 1 picture came with the prompt")
    assert refuse("--raw", raw).startswith("the prompt holds the image token (626) but no image comes with it")


def test_ids_hold_pictures_at_full_length(ask: Ask, refuse: Refuse) -> None:
    arrays, _ = golden("tiny-dense-tied/img-two")
    ids = ",".join(map(str, arrays["input_ids"].tolist()))
    pictures = ("--image", IMAGES / "grey_64x48.png", "--image", IMAGES / "rgb_100x75.png")
    found = ask("--ids", ids, *pictures, "-n", 4, "--quant", "none")
    assert found["ids"] == arrays["greedy_ids"][:4].tolist()
    swapped = refuse("--ids", ids, *pictures[2:], *pictures[:2])
    assert swapped.startswith("image 1 takes 6 image tokens (626) in a row; from token")
    twice = refuse("--ids", ids, *pictures[:2], *pictures[:2])
    assert twice.startswith("token 40 of the prompt is an image token (626) too many: 2 images came with the prompt")
    assert "image 1 has no tokens in it; it takes" in refuse("--ids", "1,2", *pictures)
    assert refuse("--ids", "626").endswith("no image comes with it; leave the token out, or give the image (--image)")


@pytest.mark.parametrize(
    ("key", "token"),
    [
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ],
)
def test_other_ids_in_config_json_than_in_the_tokenizer(
    ask: Ask, refuse: Refuse, tmp_path: Path, key: str, token: str
) -> None:
    """config.json is at fault, not the template and not the prompt; text alone goes on."""
    model = checkpoints.copy(TINY, tmp_path / "model")
    edit_json(model / "config.json", {key: 99})
    line = refuse("--image", IMAGES / "rgb_96x64.png", "hi", model=model)
    assert line.startswith(f"{model / 'config.json'}: {key} is 99; it has to be 62")
    assert f"the id that the tokenizer has for {token}" in line
    assert ask("--ids", "1,2,3", "-n", 1, model=model)["ids"]
    if key in ("image_token_id", "video_token_id"):
        assert refuse("--ids", "99,1", model=model) == line


def fill(model: Path, name: str, bits: int) -> None:
    """Give every value of a bfloat16 tensor the same bits."""
    tensors = checkpoints.read_tensors(model)
    dtype, shape, data = tensors[name].dtype, tensors[name].shape, tensors[name].data
    assert dtype == "BF16"
    tensors[name] = checkpoints.Stored(dtype, shape, bits.to_bytes(2, "little") * (len(data) // 2))
    checkpoints.write_tensors(model, tensors)


def test_a_tower_that_overflows_is_the_checkpoint_s_fault(real_run: Run, tmp_path: Path) -> None:
    """Not this program's, though nothing in the file says so."""
    model = checkpoints.copy(TINY, tmp_path / "model")
    fill(model, "model.visual.patch_embed.proj.bias", 0x7F61)
    exit_code, out, err = real_run("-m", model, "--image", IMAGES / "rgb_96x64.png", "hi", "--quiet")
    assert (exit_code, out) == (2, ""), err
    assert err.startswith(f"kestrel-cuda: {model}: the vision tower makes features that are not finite")
    assert err.count("\n") == 1
    fill(model, "model.visual.patch_embed.proj.bias", 0x7FC0)
    _, _, err = real_run("-m", model, "--image", IMAGES / "rgb_96x64.png", "hi", "--quiet")
    assert err.startswith(f"kestrel-cuda: {model}/model.safetensors: model.visual.patch_embed.proj.bias holds weights")


def test_case_d21_a_picture_too_long_for_its_width(refuse: Refuse, tmp_path: Path) -> None:
    line = refuse("--image", picture(tmp_path / "a.png", 1, 201), "hi")
    assert "one side 201 times the other; at most 200 times is taken" in line


def test_a_checkpoint_without_a_tower_is_said_before_pictures_are_opened(refuse: Refuse, tiny_model: Path) -> None:
    line = refuse("--image", "nowhere.png", "hi", model=tiny_model)
    assert line == f"{tiny_model} has no vision tower: it reads text only; leave the pictures out"


def test_case_d27_a_template_that_drops_pictures(refuse: Refuse, tmp_path: Path) -> None:
    model = checkpoints.copy(TINY, tmp_path / "model")
    template = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    line = refuse("--image", IMAGES / "rgb_96x64.png", "hi", model=model)
    assert line.startswith("the chat template (chat_template.jinja) has places for none, and 1 picture came")


def test_a_picture_of_the_assistant_has_no_place(refuse: Refuse, conversation: Conversation) -> None:
    """Qwen's template shows those of users and tools."""
    part = {"type": "image", "image": "rgb_96x64.png"}
    path = conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": [part]}])
    assert "has places for none, and 1 picture came with the prompt; pictures belong to" in refuse("--messages", path)


def test_a_picture_that_does_not_fit_names_the_limit_that_would(ask: Ask, refuse: Refuse, tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", 300, 500)
    flags = ("--image", path, "--image", path, "hi")
    line = refuse(*flags, "--ctx", 50)
    assert line == (
        "the prompt has 72 tokens (56 of them for 2 pictures) and --ctx holds 50; "
        "needed: --ctx 73 or more, or --image-tokens 21"
    )
    assert ask(*flags, "-n", 1, "--ctx", 50, "--image-tokens", 21)["n_prompt"] < 50
    assert "--ctx holds 50" in refuse(*flags, "--ctx", 50, "--image-tokens", 22)
    assert ask(*flags, "-n", 1, "--ctx", 73)["n_prompt"] == 72
    assert refuse(*flags, "--ctx", 16).endswith("needed: --ctx 73 or more")


def test_more_pictures_than_positions(ask: Ask, refuse: Refuse, tmp_path: Path) -> None:
    model = checkpoints.copy(TINY, tmp_path / "model")
    edit_json(model / "config.json", {"text_config.max_position_embeddings": 32})
    path = picture(tmp_path / "a.png", 300, 500)
    line = refuse("--image", path, "hi", model=model)
    assert line == (
        "the prompt has 42 tokens (28 of them for 1 picture); with one new token that is over the 32 positions this "
        "model has; --image-tokens 21 would make it fit"
    )
    assert ask("--image", path, "hi", "--image-tokens", 21, model=model)["n_prompt"] < 32
    line = refuse("--image", path, "hi", "--ctx", 24, model=model)
    assert line.endswith("; --image-tokens 14 would make it fit"), "into --ctx as well"
    assert ask("--image", path, "hi", "--ctx", 24, "--image-tokens", 14, model=model)["n_prompt"] < 24


def test_a_video_that_does_not_fit(refuse: Refuse, tmp_path: Path) -> None:
    line = refuse("--video", frames(tmp_path / "long", 40), "hi", "--ctx", 50)
    assert line.endswith("or fewer videos or frames of them (of a file, by a lower --fps)")


@pytest.mark.parametrize(
    ("vram", "advice"),
    [
        ("920KiB", "--image-tokens 5 would fit a single one"),
        ("850KiB", "a single one of at most 3 would fit, and pictures have at least 4 (--min-pixels)"),
        ("725KiB", "not even the smallest picture would fit: give more memory, or leave pictures out"),
        ("100KiB", "the tower alone does not fit: give more memory, or leave pictures and videos out"),
    ],
)
def test_a_picture_without_room_to_encode_it(refuse: Refuse, vram: str, advice: str) -> None:
    """What is advised is a limit that the checkpoint takes."""
    line = refuse("--image", IMAGES / "rgb_100x75.png", "hi", "--vram", vram, model=TINY_RANDOM)
    assert line.startswith("encoding pictures of 6 tokens needs 935KiB (the vision tower ")
    assert line.endswith(f"; {advice}")


def test_what_a_picture_is_enlarged_to_bounds_the_advice(refuse: Refuse, ask: Ask, tmp_path: Path) -> None:
    """Whole tokens of the least size may be more than its pixels: 42 of 192 x 224 for at least 192 x 192."""
    path = picture(tmp_path / "a.png", 60, 50)
    line = refuse("--image", path, "hi", "--vram", "14900KiB", model=EMBEDDED)
    assert line.endswith("; a single one of at most 36 would fit, and pictures have at least 42 (--min-pixels)")
    result = ask("--image", path, "hi", "--image-tokens", 36, "-n", 1, model=EMBEDDED)
    assert result["images"][0]["tokens"] == 42
    assert any("42 tokens, more than the 36 that pictures are limited to" in note for note in result["notes"])
    assert not any("limited to" in note for note in ask("--image", path, "hi", "-n", 1, model=EMBEDDED)["notes"])


def test_pictures_that_are_only_enlarged_too_far(refuse: Refuse, tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", 60, 50)
    line = refuse(
        "--image", path, "hi", "--min-pixels", 3_000_000, "--max-pixels", 4_000_000, model=options.MODEL.default
    )
    assert line.endswith("; a lower --min-pixels would make it fit")


def test_a_picture_with_its_own_limit_and_no_room(refuse: Refuse, conversation: Conversation) -> None:
    part = {"type": "image", "image": "rgb_100x75.png", "max_pixels": 8000}
    line = refuse(
        "--messages", conversation([{"role": "user", "content": [part]}]), "--vram", "920KiB", model=TINY_RANDOM
    )
    assert line.endswith("; a single one of at most 5 tokens would fit (max_pixels in the conversation)")


@pytest.mark.parametrize(
    ("vram", "advice"),
    [
        ("1MiB", "take fewer videos or frames of them (of a file, by a lower --fps)"),
        ("750KiB", "not even two frames fit: give smaller ones, or more memory"),
    ],
)
def test_a_video_without_room_to_encode_it(refuse: Refuse, tmp_path: Path, vram: str, advice: str) -> None:
    clip = frames(tmp_path / "clip", 6)
    line = refuse("--video", clip, "hi", "--vram", vram, model=TINY_RANDOM)
    assert line.startswith("encoding videos of 12 tokens needs 1142KiB")
    assert line.endswith(f"; {advice}")
    both = refuse("--video", clip, "--image", IMAGES / "rgb_96x64.png", "hi", "--vram", vram, model=TINY_RANDOM)
    assert both.startswith("encoding pictures and videos of 18 tokens")
    assert (", or smaller pictures" in both) is (vram == "1MiB")


def test_videos_that_cannot_be_used(refuse: Refuse, tmp_path: Path) -> None:
    assert refuse("--video", tmp_path / "no.mp4", "hi").endswith("no.mp4 does not exist; check the path of the video")
    assert "has 1 frame; at least 2" in refuse("--video", frames(tmp_path / "one", 1), "hi")
    (tmp_path / "empty").mkdir()
    line = refuse("--video", tmp_path / "empty", "hi")
    assert line.endswith("empty has no frames; at least 2 are needed: check that it is the one meant")
    for url in ("https://example.com/a.mp4", "rtsp://camera/1", "x-my+own.scheme://a"):
        assert refuse("--video", url, "hi").startswith(f"{url} is a URL")


@pytest.mark.parametrize(
    ("kind", "place", "advice"),
    [
        ("image", "kestrel_cuda.inputs.pictures._picture", "scale it down, or free host memory"),
        ("image", "kestrel_cuda.inputs.visuals.image_patches", "scale it down, or free host memory"),
        ("video", "kestrel_cuda.inputs.visuals.open_frames", "take fewer frames (of a file, by a lower --fps), or"),
        ("video", "kestrel_cuda.inputs.visuals.video_patches", "take fewer frames (of a file, by a lower --fps), or"),
    ],
)
def test_host_memory_that_is_used_up_names_the_file(
    refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, place: str, advice: str
) -> None:
    def used_up(*_: object) -> None:
        raise MemoryError("Unable to allocate 9 GiB")

    def wordless(*_: object) -> None:
        raise MemoryError

    path = frames(tmp_path / "clip") if kind == "video" else IMAGES / "rgb_96x64.png"
    monkeypatch.setattr(place, wordless)
    assert f"no room for {path} (none left); " in refuse(f"--{kind}", path, "hi")
    monkeypatch.setattr(place, used_up)
    line = refuse(f"--{kind}", path, "hi")
    assert line.startswith(f"out of memory: there is no room for {path} (Unable to allocate 9 GiB); {advice}")
    if place.endswith("_picture"):
        line = refuse("--video", frames(tmp_path / "clip"), "hi")
        assert line.startswith(f"out of memory: there is no room for {tmp_path / 'clip' / '0.png'} (Unable to allocate")
        assert line.count("no room for") == 1


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        (("--image", ""), {}, "--image holds ''; it takes the path of a picture"),
        (("--video", " "), {}, "--video holds ' '; it takes the path of a video or of a folder"),
        (("--fps", "0"), {}, "--fps holds '0'; it takes a number from 0.001 to"),
        (("--fps", "1e3"), {}, "--fps holds '1e3'; it takes a number from 0.001 to 1000000, of frames a"),
        (("--fps", "0.0009"), {}, "--fps holds '0.0009'"),
        (("--fps", "."), {}, "--fps holds '.'"),
        (("--fps", "1000001"), {}, "--fps holds '1000001'"),
        (("--min-pixels", "0"), {}, "--min-pixels holds '0'; it takes a whole number of pixels, of at least 1"),
        (("--image-tokens", "0"), {}, "--image-tokens holds '0'; it takes a whole number of tokens, of at least 1"),
        (("--fps", "-2"), {}, "--fps holds '-2'"),
        ((), {"KESTREL_CUDA_FPS": "nan"}, "KESTREL_CUDA_FPS holds 'nan'"),
        (("--messages", "m.json", "--image", "a.png"), {}, "--messages and --image contradict each other"),
        (("--messages", "m.json", "--video", "a.mp4"), {}, "--messages and --video contradict each other"),
        (("--max-pixels", "4096", "--image-tokens", "4"), {}, "--max-pixels and --image-tokens contradict each other"),
        (("--fps", "1", "--fps", "2"), {}, "--fps is given 2 times"),
    ],
)  # fmt: skip
def test_flags_that_cannot_be_followed(
    refuse: Refuse, flags: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    assert refuse(*flags, **variables).startswith(message)


def test_limits_that_leave_no_size_are_named(refuse: Refuse) -> None:
    """Case D25."""
    flags = ("--image", IMAGES / "rgb_96x64.png", "hi", "--min-pixels", 9000)
    assert "9000 pixels at least (--min-pixels) and 8000 at most (--max-pixels)" in refuse(*flags, "--max-pixels", 8000)
    assert refuse(*flags, KESTREL_CUDA_MAX_PIXELS="8000").endswith("(--max-pixels comes from KESTREL_CUDA_MAX_PIXELS)")
