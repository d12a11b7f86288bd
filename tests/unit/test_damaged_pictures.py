"""Picture files with bytes changed or lost: what Pillow alone refuses is refused, nothing half decoded comes out."""

from __future__ import annotations

import io
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs import pictures
from kestrel_cuda.inputs.pictures import open_picture

NUM_COPIES = 60
KINDS: dict[str, dict[str, Any]] = {
    "png": {},
    "jpg": {"quality": 90},
    "webp": {"lossless": True},
    "tiff": {},
    "tiff-lzw": {"compression": "tiff_lzw"},
    "bmp": {},
    "gif": {},
    "avif": {},
    "jp2": {},
    "ppm": {},
    "apng": {"save_all": True},
}


def noise(height: int = 40, width: int = 56) -> NDArray[np.uint8]:
    return np.random.default_rng(7).integers(0, 256, (height, width, 3), np.uint8)


def content_of(kind: str) -> bytes:
    options = dict(KINDS[kind])
    image = Image.fromarray(noise())
    if options.get("save_all"):
        options["append_images"] = [Image.fromarray(255 - noise())]
    file_format = {"jpg": "JPEG", "jp2": "JPEG2000", "apng": "PNG"}.get(kind, kind.split("-")[0].upper())
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def damaged(content: bytes, number: int, chance: random.Random) -> bytes:
    """A copy that is cut off, or has one byte, eight, or one of its first two hundred changed."""
    way = number % 4
    start = chance.randrange(min(200, len(content))) if way == 3 else chance.randrange(len(content) // 20, len(content))
    if way == 0:
        return content[:start]
    changed = bytearray(content)
    for position in range(start, min(len(content), start + (8 if way == 1 else 1))):
        changed[position] ^= chance.randrange(1, 256)
    return bytes(changed)


def by_pillow_alone(path: Path) -> NDArray[np.uint8] | None:
    """Its pixels, None where it refuses them. Nothing is asked of the picture before it is loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(path) as image:
                image.load()
                return np.asarray(image.convert("RGB"))
        except Exception:
            return None


@pytest.mark.parametrize("kind", KINDS)
def test_what_pillow_refuses_is_refused(tmp_path: Path, kind: str) -> None:
    content, chance = content_of(kind), random.Random(kind)
    path = tmp_path / f"a.{kind}"
    num_refused = 0
    for number in range(NUM_COPIES):
        path.write_bytes(damaged(content, number, chance))
        expected = by_pillow_alone(path)
        num_refused += expected is None
        try:
            found = open_picture(path)
        except InputError:
            continue
        assert expected is not None, f"copy {number}"
        # Damage may land in a tag that turns the picture or gives it a transparent colour.
        if not any("EXIF" in note or "transparency" in note for note in found.notes):
            assert np.array_equal(np.asarray(found.rgb), expected), f"copy {number}"
    assert num_refused > 0


def test_a_png_damaged_in_its_middle_has_no_half(tmp_path: Path) -> None:
    """A PNG without EXIF is loaded when EXIF is asked for, and a failure there must not pass for none."""
    content = bytearray(content_of("png"))
    middle = len(content) // 2
    content[middle : middle + 40] = bytes(40)
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is a PNG that is cut off or damaged"):
        open_picture(path)


def test_a_png_with_much_text_is_not_called_damaged(tmp_path: Path) -> None:
    text = PngInfo()
    text.add_text("note", "x" * (3 << 20), zip=True)
    Image.fromarray(noise()).save(path := tmp_path / "a.png", pnginfo=text)
    with pytest.raises(InputError, match="is a PNG with more text about itself than is read"):
        open_picture(path)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that opens and cannot be read")
def test_a_file_that_opens_and_cannot_be_read() -> None:
    with pytest.raises(InputError) as caught:
        open_picture("/proc/self/mem")
    assert str(caught.value) == "/proc/self/mem cannot be read: Input/output error; check the disk that it is on"


def test_a_disk_that_fails_while_a_picture_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bmp"
    path.write_bytes(content_of("bmp"))

    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if size is not None and size > 1000:
                raise OSError(5, "Input/output error")
            return super().read(size)

    monkeypatch.setattr(pictures, "open_input", lambda *_: Failing(path.read_bytes()))
    with pytest.raises(InputError) as caught:
        open_picture(path)
    assert str(caught.value) == f"{path} cannot be read: Input/output error; check the disk that it is on"


def test_a_name_that_reads_as_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data:x.png").write_bytes(content_of("png"))
    with pytest.raises(InputError, match=r"^data:x\.png reads as a URL, and .*; write \./data:x\.png for it$"):
        open_picture("data:x.png")
    assert open_picture("./data:x.png").width == 56
