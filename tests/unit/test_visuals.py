"""Pictures and videos opened by a checkpoint's rules: which are read, whose limits hold, what would make them fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kestrel_cuda.checkpoint.config_json import read_config
from kestrel_cuda.errors import CheckpointError, InputError, SettingError
from kestrel_cuda.inputs.visual_source import VisualSource
from kestrel_cuda.inputs.visuals import (
    NO_LIMITS,
    OpenedPicture,
    OpenedVideo,
    OpenedVisual,
    VisualLimits,
    image_tokens_that_fit,
    open_visuals,
)
from tests import checkpoints
from tests.goldens import ORACLE, golden

IMAGES = ORACLE / "images"
TINY = ORACLE / "checkpoints/tiny-dense-tied"
CLIP = tuple(str(IMAGES / f"clip_64x64_f{number}.png") for number in range(4))


def opened(*sources: VisualSource, limits: VisualLimits = NO_LIMITS, model: Path = TINY) -> tuple[OpenedVisual, ...]:
    return open_visuals(sources, limits, model, read_config(model / "config.json"))


def image(name: str, **own: int) -> VisualSource:
    return VisualSource("image", str(IMAGES / f"{name}.png"), **own)  # type: ignore[arg-type]


def test_pixels_are_the_goldens() -> None:
    arrays, _ = golden("tiny-dense-tied/img-two")
    pictures = opened(image("grey_64x48"), image("rgb_100x75"))
    assert np.array_equal(
        np.concatenate([picture.pixels().values_mk() for picture in pictures]), arrays["pixel_values"]
    )
    arrays, _ = golden("tiny-dense-tied/vid-clip")
    (clip,) = opened(VisualSource("video", CLIP, fps=2.0))
    assert np.array_equal(clip.pixels().values_mk(), arrays["pixel_values_videos"])
    assert clip.placeholder == ("video", 4, (0.25, 1.25))
    assert clip.notes == ()


def test_rules_are_read_for_what_there_is(tmp_path: Path) -> None:
    """A checkpoint without the rules for videos takes pictures, and the other way round."""
    model = checkpoints.copy(TINY, tmp_path / "model")
    (model / "video_preprocessor_config.json").rename(tmp_path / "kept.json")
    assert isinstance(opened(image("rgb_96x64"), model=model)[0], OpenedPicture)
    with pytest.raises(CheckpointError, match=r"lacks video_preprocessor_config\.json"):
        opened(image("rgb_96x64"), VisualSource("video", CLIP), model=model)
    (tmp_path / "kept.json").rename(model / "video_preprocessor_config.json")
    (model / "preprocessor_config.json").unlink()
    assert isinstance(opened(VisualSource("video", CLIP), model=model)[0], OpenedVideo)
    with pytest.raises(CheckpointError, match=r"lacks preprocessor_config\.json"):
        opened(image("rgb_96x64"), model=model)


def test_whose_rate_holds() -> None:
    """The video's own, then the user's, then the checkpoint's, which is said."""
    own, users = VisualSource("video", CLIP, fps=4.0), VisualLimits(fps=8.0)
    for source, limits, fps in (
        (own, users, 4.0),
        (VisualSource("video", CLIP), users, 8.0),
        (VisualSource("video", CLIP), NO_LIMITS, 2.0),
    ):
        (clip,) = opened(source, limits=limits)
        assert isinstance(clip, OpenedVideo)
        assert clip.video.fps == fps
        assert any("no rate is given" in note for note in clip.notes) is (fps == 2.0)


def test_whose_limits_hold() -> None:
    limits = VisualLimits(image_tokens=5)
    own, every = opened(image("rgb_100x75", max_pixels=30_000), image("rgb_100x75"), limits=limits)
    assert (own.size.num_tokens, every.size.num_tokens) == (6, 2)
    with pytest.raises(InputError, match=r"max_pixels of .*rgb_100x75\.png is 5; it takes a whole number from 1024"):
        opened(image("rgb_100x75", max_pixels=5))
    with pytest.raises(SettingError, match="--image-tokens is 9999999"):
        opened(image("rgb_100x75"), limits=VisualLimits(image_tokens=9_999_999))


def test_what_was_done_to_frames_is_counted(tmp_path: Path) -> None:
    for number in range(4):
        Image.new("RGBA" if number else "RGB", (64, 64)).save(tmp_path / f"{number}.png")
    (clip,) = opened(VisualSource("video", str(tmp_path), fps=2.0))
    assert clip.notes == (f"{tmp_path}: 3 of 4 frames: transparency laid over white",)


def test_what_is_no_frame_among_frames(tmp_path: Path) -> None:
    """In a folder it has to go; in a list it was named."""
    for number in range(2):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{number}.png")
    stray = tmp_path / "Thumbs.txt"
    stray.write_text("hello")
    with pytest.raises(InputError, match=r"Thumbs\.txt is text, .*; every file in a folder of frames has to"):
        opened(VisualSource("video", str(tmp_path), fps=2.0))
    with pytest.raises(InputError, match=r"Thumbs\.txt is text, .* or PNM$"):
        opened(VisualSource("video", (str(tmp_path / "0.png"), str(stray)), fps=2.0))
    with pytest.raises(InputError, match=r"^the video of .*0\.png alone has 1 frame; at least 2"):
        opened(VisualSource("video", (str(tmp_path / "0.png"),), fps=2.0))


def test_a_limit_fits_what_it_can_limit() -> None:
    """A video, and a picture with limits of its own, stay as they are."""
    wide, own, clip = image("wide_400x20"), image("rgb_100x75", max_pixels=30_000), VisualSource("video", CLIP)
    visuals = opened(wide, own, clip)
    fixed = 6 + 8
    for room in (30, 21, 18, 17, 16):
        image_tokens = image_tokens_that_fit(visuals, room)
        if image_tokens is None:
            assert opened(wide, limits=VisualLimits(image_tokens=4))[0].size.num_tokens > room - fixed
            continue
        (limited,) = opened(wide, limits=VisualLimits(image_tokens=image_tokens))
        assert limited.size.num_tokens <= room - fixed
    assert image_tokens_that_fit(visuals, fixed) is None
    assert image_tokens_that_fit(opened(own, clip), 1) is None
    assert image_tokens_that_fit((), 1) is None
