"""Pixel values against the reference: every picture of the oracle, equal to the bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kestrel_cuda.checkpoint.processor_json import read_image_processor
from kestrel_cuda.config import ImageProcessorConfig
from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.image_size import image_size
from kestrel_cuda.inputs.pictures import open_picture
from kestrel_cuda.inputs.pixels import image_patches, resize

ORACLE = Path(__file__).resolve().parents[1] / "data" / "oracle"
GOLDENS = sorted(f"{path.parent.name}/{path.stem}" for path in ORACLE.glob("golden/*/img-*.npz"))
PICTURES = ("grey_64x48.png", "rgb_100x75.png", "rgb_96x64.png", "rgba_70x90.png", "wide_400x20.png")
HALF = (0.5, 0.5, 0.5)
RELEASED = ImageProcessorConfig(65536, 16_777_216, 16, 2, 2, HALF, HALF, 1 / 255)


def test_all_image_goldens_are_here() -> None:
    assert len(GOLDENS) == 12


@pytest.mark.parametrize("name", GOLDENS)
def test_pixel_values_are_the_goldens(name: str) -> None:
    path = ORACLE / "golden" / name
    info = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    rules = read_image_processor(ORACLE / "checkpoints" / path.parent.name)
    found = [image_patches(open_picture(ORACLE / "images" / image), rules) for image in info["images"]]
    with np.load(path.with_suffix(".npz")) as golden:
        pixel_values, grids = golden["pixel_values"], golden["image_grid_thw"].tolist()
    assert [list(patches.size.grid_thw) for patches in found] == grids
    joined = np.concatenate([patches.pixel_values for patches in found])
    assert joined.dtype == np.float32
    assert np.array_equal(joined, pixel_values)


@pytest.mark.parametrize("name", PICTURES)
def test_released_limits(name: str) -> None:
    picture = open_picture(ORACLE / "images" / name)
    with np.load(ORACLE / "extras/preprocess_published_limits.npz") as golden:
        resized, grid, first = (golden[f"{name}/{key}"] for key in ("resized_u8", "grid_thw", "first_patches"))
    size = image_size(picture.height, picture.width, RELEASED)
    assert np.array_equal(resize(picture.rgb, size), resized)
    patches = image_patches(picture, RELEASED)
    assert patches.size == size
    assert list(size.grid_thw) == grid.tolist()
    assert patches.pixel_values.shape == (grid.prod(), 1536)
    assert np.array_equal(patches.pixel_values[: len(first)], first)


def test_rows_are_channel_frame_row_column_in_merge_blocks(tmp_path: Path) -> None:
    """Every value found again where the reference's order puts it."""
    rules = replace(RELEASED, min_pixels=1024)
    rgb = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(rgb).save(path)
    rows = image_patches(open_picture(path), rules).pixel_values.reshape(24, 3, 2, 16, 16)
    values = ((rgb.astype(np.float64) / 255).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)
    row = 0
    for block_y in range(2):
        for block_x in range(3):
            for y, x in ((0, 0), (0, 1), (1, 0), (1, 1)):
                top, left = 32 * block_y + 16 * y, 32 * block_x + 16 * x
                cell = values[top : top + 16, left : left + 16].transpose(2, 0, 1)
                for frame in range(2):
                    assert np.allclose(rows[row, :, frame], cell, atol=1e-7)
                row += 1


def test_each_channel_has_its_own_mean_and_deviation(tmp_path: Path) -> None:
    rules = replace(RELEASED, image_mean=(0.1, 0.2, 0.3), image_std=(0.5, 0.25, 1.0))
    path = tmp_path / "a.png"
    Image.new("RGB", (256, 256), (255, 0, 51)).save(path)
    rows = image_patches(open_picture(path), rules).pixel_values.reshape(256, 3, -1)
    assert np.allclose(rows[:, 0], 1.8)
    assert np.allclose(rows[:, 1], -0.8)
    assert np.allclose(rows[:, 2], -0.1)


def test_hidden_colours_and_white_are_the_same_patches(tmp_path: Path) -> None:
    """D22: 256 x 256, black under alpha 0, against white without alpha."""
    Image.new("RGBA", (256, 256), (0, 0, 0, 0)).save(tmp_path / "hidden.png")
    Image.new("RGB", (256, 256), (255, 255, 255)).save(tmp_path / "white.png")
    hidden, white = (image_patches(open_picture(tmp_path / f"{name}.png"), RELEASED) for name in ("hidden", "white"))
    assert np.array_equal(hidden.pixel_values, white.pixel_values)


def test_the_grid_is_the_upright_pictures(tmp_path: Path) -> None:
    """D23: stored 640 wide and 320 high with orientation 6, the grid is (1, 40, 20)."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (640, 320)).save(tmp_path / "a.jpg", exif=exif)
    assert image_patches(open_picture(tmp_path / "a.jpg"), RELEASED).size.grid_thw == (1, 40, 20)


@pytest.mark.parametrize(("height", "width", "tokens"), [(1, 1, 64), (16, 16, 64), (30, 305, 78)])
def test_tiny_pictures_are_enlarged(tmp_path: Path, height: int, width: int, tokens: int) -> None:
    """D20."""
    Image.new("RGB", (width, height), (255, 0, 0)).save(tmp_path / "a.png")
    patches = image_patches(open_picture(tmp_path / "a.png"), RELEASED)
    assert patches.size.num_tokens == tokens
    assert patches.pixel_values.shape == (4 * tokens, 1536)
    assert (patches.pixel_values.reshape(-1, 3, 512)[:, 0] == 1).all()
    assert (patches.pixel_values.reshape(-1, 3, 512)[:, 1:] == -1).all()


def test_a_ratio_over_200_names_the_file(tmp_path: Path) -> None:
    """D21."""
    Image.new("RGB", (201, 1)).save(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"a\.png is 1 x 201 pixels .* one side 201 times the other"):
        image_patches(open_picture(tmp_path / "a.png"), RELEASED)


def test_pictures_do_not_depend_on_their_neighbours() -> None:
    """D24, the host's half: each picture's rows are its own, in the order given."""
    rules = read_image_processor(ORACLE / "checkpoints/tiny-dense-tied")
    with np.load(ORACLE / "golden/tiny-dense-tied/img-two.npz") as golden:
        both = golden["pixel_values"]
    alone = image_patches(open_picture(ORACLE / "images/rgb_100x75.png"), rules)
    assert np.array_equal(both[-len(alone.pixel_values) :], alone.pixel_values)
