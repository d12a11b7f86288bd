"""Picture files of every kind, and files that are none: what comes out, and what is said (D22, D23, D26)."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.pictures import MAX_PICTURE_PIXELS, open_picture

WHITE = (255, 255, 255)
RED = (255, 0, 0)


def pixels(path: Path) -> NDArray[np.uint8]:
    picture = open_picture(path)
    assert picture.rgb.mode == "RGB"
    assert (picture.height, picture.width) == np.asarray(picture.rgb).shape[:2]
    return np.asarray(picture.rgb)


def noise(height: int, width: int, channels: int = 3) -> NDArray[np.uint8]:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(5).integers(0, 256, shape, np.uint8)


def saved(path: Path, image: Image.Image, **options: Any) -> Path:
    image.save(path, **options)
    return path


def error_of(source: Path | str) -> str:
    with pytest.raises(InputError) as caught:
        open_picture(source)
    assert str(caught.value).isprintable()
    return str(caught.value)


def oriented(orientation: object) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


UPRIGHT: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).transpose(1, 0, 2),
    8: lambda stored: np.rot90(stored, 1),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("suffix", ["png", "tiff", "webp"])
def test_orientation_comes_first(tmp_path: Path, orientation: int, suffix: str) -> None:
    """D23."""
    stored = noise(6, 10)
    options = {"lossless": True} if suffix == "webp" else {}
    path = saved(tmp_path / f"a.{suffix}", Image.fromarray(stored), exif=oriented(orientation), **options)
    assert np.array_equal(pixels(path), UPRIGHT[orientation](stored))
    notes = open_picture(path).notes
    if orientation == 1:
        assert notes == ()
    else:
        assert len(notes) == 1
        assert notes[0].endswith(f" (EXIF orientation {orientation})")


def test_a_jpeg_on_its_side(tmp_path: Path) -> None:
    """D23: stored 640 wide and 320 high, orientation 6."""
    path = saved(tmp_path / "a.jpg", Image.new("RGB", (640, 320), RED), exif=oriented(6))
    picture = open_picture(path)
    assert (picture.height, picture.width) == (640, 320)
    assert picture.notes == ("turned by 90° clockwise (EXIF orientation 6)",)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_orientations_that_do_not_exist_change_nothing(tmp_path: Path, orientation: int) -> None:
    stored = noise(4, 7)
    path = saved(tmp_path / "a.png", Image.fromarray(stored), exif=oriented(orientation))
    assert np.array_equal(pixels(path), stored)
    assert open_picture(path).notes == ()


@pytest.mark.parametrize("exif", [b"Exif\0\0rubbish", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0"])
def test_damaged_exif_does_not_hide_the_picture(tmp_path: Path, exif: bytes) -> None:
    path = saved(tmp_path / "a.jpg", Image.new("RGB", (8, 4), RED), exif=exif)
    assert pixels(path).shape == (4, 8, 3)


def over_white(values: NDArray[np.uint8], alpha: NDArray[np.uint8]) -> NDArray[np.float64]:
    share = alpha[..., None] / 255
    mixed: NDArray[np.float64] = values * share + 255 * (1 - share)
    return mixed


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_laid_over_white(tmp_path: Path, mode: str) -> None:
    """D22."""
    stored = noise(9, 5, len(mode))
    path = saved(tmp_path / "a.png", Image.fromarray(stored, mode=None))
    found = pixels(path)
    values = stored[..., :-1]
    assert np.abs(found - over_white(np.broadcast_to(values, (9, 5, 3)), stored[..., -1])).max() <= 1
    assert "transparency laid over white" in open_picture(path).notes


def test_colours_hidden_under_alpha_do_not_show(tmp_path: Path) -> None:
    """D22: black, all of it transparent, is white."""
    path = saved(tmp_path / "a.png", Image.new("RGBA", (256, 256), (0, 0, 0, 0)))
    assert (pixels(path) == 255).all()


def palette(transparent: int | bytes | None = None) -> tuple[Image.Image, dict[str, Any]]:
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, 0, 0, 255])
    image.putpixel((1, 0), 1)
    return image, {} if transparent is None else {"transparency": transparent}


@pytest.mark.parametrize("suffix", ["png", "gif"])
@pytest.mark.parametrize(("transparent", "expected"), [(None, [RED, (0, 0, 255)]), (0, [WHITE, (0, 0, 255)])])
def test_palettes(tmp_path: Path, suffix: str, transparent: int | None, expected: list[tuple[int, ...]]) -> None:
    image, options = palette(transparent)
    path = saved(tmp_path / f"a.{suffix}", image, **options)
    assert pixels(path)[0].tolist() == [list(colour) for colour in expected]
    notes = open_picture(path).notes
    assert "palette colours converted to RGB" in notes
    assert ("transparency laid over white" in notes) is (transparent is not None)


def test_a_palette_with_an_alpha_each(tmp_path: Path) -> None:
    image, options = palette(b"\x80\xff")
    assert pixels(saved(tmp_path / "a.png", image, **options))[0].tolist() == [[255, 127, 127], [0, 0, 255]]


def test_a_colour_that_stands_for_transparent(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[RED, (1, 2, 3)]], np.uint8))
    path = saved(tmp_path / "a.png", image, transparency=RED)
    assert pixels(path)[0].tolist() == [[255, 255, 255], [1, 2, 3]]


@pytest.mark.parametrize("suffix", ["png", "jpg", "tiff", "webp", "bmp", "gif", "jp2", "avif"])
@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_formats_and_modes(tmp_path: Path, suffix: str, mode: str) -> None:
    stored = Image.fromarray(noise(16, 24)).convert(mode)
    as_stored = stored if mode != "1" or suffix not in ("jpg", "webp", "jp2", "avif") else stored.convert("L")
    found = pixels(saved(tmp_path / f"a.{suffix}", as_stored))
    assert found.shape == (16, 24, 3)
    if suffix in ("png", "tiff", "bmp"):
        assert np.array_equal(found, np.asarray(stored.convert("RGB")))


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_sixteen_bits_keep_their_high_bytes(tmp_path: Path, suffix: str) -> None:
    values = np.array([[0, 255, 256, 0x1234, 0xFFFF]], np.uint16)
    path = saved(tmp_path / f"a.{suffix}", Image.fromarray(values))
    assert pixels(path)[0, :, 0].tolist() == [0, 0, 1, 0x12, 0xFF]
    assert open_picture(path).notes == ("16-bit grey, its high bytes taken",)


def test_sixteen_bits_big_endian_and_pnm(tmp_path: Path) -> None:
    path = tmp_path / "a.pgm"
    path.write_bytes(b"P5 3 1 65535\n" + struct.pack(">3H", 0, 0x1234, 0xFFFF))
    assert pixels(path)[0, :, 1].tolist() == [0, 0x12, 0xFF]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, extra: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_sixteen_bit_grey_with_a_transparent_value(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    rows = b"\0" + struct.pack(">3H", 0x1234, 0x1235, 0xFF00)
    path.write_bytes(png(3, 1, 16, 0, rows, chunk(b"tRNS", struct.pack(">H", 0x1235))))
    assert pixels(path)[0, :, 0].tolist() == [0x12, 0xFF, 0xFF]


def test_sixteen_bit_colours(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(2, 1, 16, 2, b"\0" + struct.pack(">6H", 0x1234, 0x00FF, 0xFFFF, 0, 0x8000, 0x7FFF)))
    assert pixels(path)[0].tolist() == [[0x12, 0, 0xFF], [0, 0x80, 0x7F]]
    assert open_picture(path).notes == ("values of 16 bits reduced to 8",)
    path.write_bytes(png(1, 1, 16, 6, b"\0" + struct.pack(">4H", 0x1234, 0x00FF, 0xFFFF, 0xFFFF)))
    assert "values of 16 bits reduced to 8" in open_picture(path).notes
    path.write_bytes(png(1, 1, 8, 2, b"\0\1\2\3"))
    assert open_picture(path).notes == ()


@pytest.mark.parametrize(("largest", "notes"), [(65535, ("values of 16 bits reduced to 8",)), (255, ())])
def test_a_pnm_of_wide_colours(tmp_path: Path, largest: int, notes: tuple[str, ...]) -> None:
    path = tmp_path / "a.ppm"
    values = struct.pack(">3H" if largest > 255 else "3B", 0, largest, largest)
    path.write_bytes(b"P6 1 1 %d\n" % largest + values)
    assert pixels(path)[0].tolist() == [[0, 255, 255]]
    assert open_picture(path).notes == notes


def test_wide_numbers_are_taken_where_8_bits_hold_them(tmp_path: Path) -> None:
    for name, values in (("f", np.array([[0, 7, 255]], np.float32)), ("i", np.array([[0, 7, 255]], np.int32))):
        assert pixels(saved(tmp_path / f"{name}.tiff", Image.fromarray(values)))[0, :, 0].tolist() == [0, 7, 255]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (np.array([[0, 1000]], np.float32), "floating-point numbers for pixels, from 0 to 1000"),
        (np.array([[-1, 2]], np.float32), "from -1 to 2"),
        (np.array([[0, np.inf]], np.float32), "floating-point numbers for pixels, from 0 to inf"),
        (np.array([[0, 70000]], np.int32), "whole numbers of 32 bits for pixels, from 0 to 70000"),
    ],
)
def test_wide_numbers_of_no_known_range_are_refused(tmp_path: Path, values: NDArray[Any], named: str) -> None:
    message = error_of(saved(tmp_path / "a.tiff", Image.fromarray(values)))
    assert named in message
    assert "values from 0 to 255 are needed: save it with 8 or 16 bits" in message


def test_pixels_that_are_no_number(tmp_path: Path) -> None:
    message = error_of(saved(tmp_path / "a.tiff", Image.fromarray(np.array([[0, np.nan, 9]], np.float32))))
    assert message.endswith(
        "has floating-point numbers for pixels, and some are no number (NaN); values from 0 to 255 are needed: save it "
        "without them"
    )


@pytest.mark.parametrize(("most", "shown"), [(1, "1"), (0.25, "0.25")])
def test_a_range_up_to_1_is_not_taken_for_8_bits(tmp_path: Path, most: float, shown: str) -> None:
    message = error_of(saved(tmp_path / "a.tiff", Image.fromarray(np.array([[0, most]], np.float32))))
    assert message.endswith(
        f"has floating-point numbers for pixels, from 0 to {shown}, which looks like a range of 0 to 1; values from 0 "
        "to 255 are needed: scale it to them"
    )


def test_values_up_to_1_that_are_dark(tmp_path: Path) -> None:
    """Whole numbers, and a picture that is black whatever its range."""
    for name, values in (("i", np.array([[0, 1]], np.int32)), ("f", np.array([[0, 0]], np.float32))):
        assert pixels(saved(tmp_path / f"{name}.tiff", Image.fromarray(values)))[0, :, 0].tolist() == list(values[0])


def test_cmyk(tmp_path: Path) -> None:
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    path = saved(tmp_path / "a.jpg", image, quality=100)
    assert np.abs(pixels(path)[0, 0].astype(int) - RED).max() <= 3
    assert open_picture(path).notes == ("CMYK converted to RGB",)


@pytest.mark.parametrize("suffix", ["gif", "png", "webp", "tiff"])
def test_the_first_frame_and_a_word(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if suffix == "webp" else {}
    path = saved(tmp_path / f"a.{suffix}", frames[0], save_all=True, append_images=frames[1:], **options)
    assert (pixels(path) == RED).all()
    assert "holds 3 frames, the first is taken" in open_picture(path).notes


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 5000), (5000, 1)])
def test_odd_sizes(tmp_path: Path, height: int, width: int) -> None:
    """What a model takes of them is not this file's to say."""
    assert pixels(saved(tmp_path / "a.png", Image.new("RGB", (width, height)))).shape == (height, width, 3)


@pytest.mark.parametrize("name", ["a b.png", "ünïcödé 图.png", "no-suffix", "wrong.txt"])
def test_names_do_not_matter(tmp_path: Path, name: str) -> None:
    """D26."""
    path = saved(tmp_path / name, Image.new("RGB", (3, 2), RED), format="PNG")
    assert open_picture(path).path == str(path)
    assert open_picture(str(path)).width == 3


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"hello\n", "is text, not a picture that is read; give PNG, JPEG, WebP"),
        ("ein schöner Text ".encode() * 100, "is text, "),
        (b"", "is empty (0 bytes)"),
        (b"\0" * 64, "is nothing known (it begins with the bytes 00 00 00 00 00 00 00 00), not a picture"),
        (b"%PDF-1.7\n%\xe2\xe3", "is a PDF, not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is PostScript, not a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is an SVG drawing, "),
        (b"<!DOCTYPE html><html>", "is a web page, "),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "is a HEIC picture, not a picture that is read"),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "is an MP4 video, "),
        (b"PK\x03\x04\0\0", "is a ZIP archive, "),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer to a file that was not fetched, "),
        (b"\x89PNG\r\n\x1a\n", "is a PNG that is cut off or damaged (8 bytes)"),
        (b"\xff\xd8\xff\xe0", "is a JPEG that is cut off or damaged (4 bytes)"),
        (b"GIF89a", "is a GIF that is cut off or damaged (6 bytes)"),
        (b"P5 0 0 255\n", "a.png is "),
    ],
)
def test_what_is_no_picture(tmp_path: Path, content: bytes, found: str) -> None:
    """D26: a text file named a.png among them."""
    path = tmp_path / "a.png"
    path.write_bytes(content)
    message = error_of(path)
    assert message.startswith(str(path))
    assert found in message


@pytest.mark.parametrize("suffix", ["jpg", "png", "tiff", "webp", "bmp", "gif", "jp2", "avif"])
@pytest.mark.parametrize("kept", [0.05, 0.6])
def test_what_is_cut_off(tmp_path: Path, suffix: str, kept: float) -> None:
    """D26: said with the kind and the bytes that are there."""
    content = saved(tmp_path / f"whole.{suffix}", Image.fromarray(noise(64, 64))).read_bytes()
    path = tmp_path / f"cut.{suffix}"
    path.write_bytes(content[: int(len(content) * kept)])
    assert f" that is cut off or damaged ({path.stat().st_size} bytes): " in error_of(path)


def test_missing_files(tmp_path: Path) -> None:
    """D26: three different lines for what is no picture, is not there, and is no file."""
    path = tmp_path / "nothing here.png"
    assert error_of(path) == f"{path} does not exist; check the path of the picture"
    (tmp_path / "link.png").symlink_to(path)
    assert "is a link to a file that does not exist" in error_of(tmp_path / "link.png")
    assert error_of(tmp_path) == f"{tmp_path} is a directory, not a file; the path of a picture file is needed"
    os.mkfifo(tmp_path / "pipe")
    assert "is a named pipe, not a file" in error_of(tmp_path / "pipe")
    assert "is no path" in error_of("a\0b")
    assert "cannot be read: " in error_of("x" * 5000)
    assert "cannot be read: " in error_of(saved(tmp_path / "a.png", Image.new("L", (1, 1))) / "b.png")


@pytest.mark.parametrize(
    "url", ["https://example.com/a.png", "HTTP://example.com/a.png", "file:///tmp/a.png", "data:image/png;base64,AA=="]
)
def test_urls(url: str) -> None:
    message = error_of(url)
    assert message == f"{url} is a URL, and only files are read; download it and give the file's path"
    assert "is a URL" in error_of(Path(url))
    assert len(error_of("data:image/png;base64," + "A" * 10_000)) < 200


@pytest.mark.parametrize(("width", "height"), [(100_000, 100_000), (MAX_PICTURE_PIXELS + 1, 1), (2**31 - 1, 2**31 - 1)])
def test_more_pixels_than_any_picture(tmp_path: Path, width: int, height: int) -> None:
    """A file of 100 bytes that would unpack to gigabytes: an error, and no warning before it."""
    path = tmp_path / "a.png"
    path.write_bytes(png(width, height, 8, 2, b"\0"))
    message = error_of(path)
    assert f"pixels; at most {MAX_PICTURE_PIXELS} are taken: scale it down" in message
    assert str(width * height) in message or f"{height} x {width}" in message


def test_what_pillow_only_warns_of_is_no_error(tmp_path: Path) -> None:
    """From half its bound on Pillow warns, and warnings are errors in these tests."""
    path = tmp_path / "a.png"
    width = 100_000_000
    packer = zlib.compressobj(1)
    rows = packer.compress(b"\0" + bytes(width // 8)) + packer.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, 1, 0, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b""))
    assert open_picture(path).width == width


def test_pillow_writes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its loggers would speak on standard error where nobody listens."""
    buffer = io.BytesIO()
    Image.fromarray(noise(4, 4)).save(buffer, "TIFF")
    for position in range(0, len(buffer.getvalue()), 3):
        content = bytearray(buffer.getvalue())
        content[position] ^= 0xFF
        path = tmp_path / "a.tiff"
        path.write_bytes(bytes(content))
        with suppress(InputError):
            open_picture(path)
    assert capfd.readouterr() == ("", "")
