"""A picture file to an upright RGB picture of 8 bits, and what was done to it in words. Knows nothing of the model.

Orientation first, then alpha over white, then RGB: the order of the reference.
"""

from __future__ import annotations

import errno
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from kestrel_cuda.checkpoint.files import NotAFileError, open_plain, printable
from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.signatures import other_kind, picture_kind
from kestrel_cuda.inputs.visual_source import refuse_url
from kestrel_cuda.paths import shown_path

MAX_PICTURE_PIXELS = 178_956_970
"""The most pixels a file may say it has; Pillow's own bound against files that are small and unpack without end."""

READ_FORMATS = "PNG, JPEG, WebP, GIF, TIFF, BMP, AVIF, JPEG 2000 or PNM"
# Named one by one: some of Pillow's others start a program (EPS) or take any bytes for theirs (TGA).
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "AVIF", "JPEG2000", "PPM")

SCALE_DOWN = "scale it down, or free host memory"
"""What to do about a picture that host memory does not hold."""

OVER_WHITE = "transparency laid over white"
"""What to say of a picture that `over_white` was needed for."""

_ORIENTATIONS = {
    2: "mirrored left to right",
    3: "turned by 180°",
    4: "mirrored top to bottom",
    5: "mirrored along its main diagonal",
    6: "turned by 90° clockwise",
    7: "mirrored along its other diagonal",
    8: "turned by 90° counterclockwise",
}
_MODES = {"1": "black and white", "L": "grey", "P": "palette colours", "LA": "grey", "PA": "palette colours"}
_START_BYTES = 512

# Pillow reports what it finds odd there, and with no handler at all Python would write it to standard error.
logging.getLogger("PIL").addHandler(logging.NullHandler())


@dataclass(frozen=True)
class Picture:
    """An upright RGB picture. `notes` say what was done to what the file holds: turned, laid over white, converted."""

    path: str
    rgb: Image.Image
    notes: tuple[str, ...] = ()

    @property
    def height(self) -> int:
        return self.rgb.height

    @property
    def width(self) -> int:
        return self.rgb.width


class NoPictureError(InputError):
    """What bears the name is no picture at all."""


def open_picture(source: Path | str) -> Picture:
    """The picture in a file. Raises InputError, one line with the path, where there is none that can be used."""
    path = str(source)
    refuse_url(path)
    # What Pillow warns of is either an error here or no concern of the user's.
    with open_input(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = read_start(path, file, _START_BYTES)
        if not start:
            raise InputError(f"{shown_path(path)} is empty (0 bytes); a picture is needed: fetch it again")
        file.seek(0)
        with _decoding(path, start), naming_file(path, SCALE_DOWN):
            image = Image.open(file, formats=_FORMATS)
            _check_size(path, *image.size)
            return _picture(path, image)


def open_input(path: str, what: str = "picture") -> BinaryIO:
    """A plain file, open for reading. Raises InputError, one line that says what there is instead of `what`."""
    try:
        return open_plain(path)
    except NotAFileError as error:
        raise NoPictureError(f"{shown_path(path)} {error.strerror}; the path of a {what} file is needed") from error
    except FileNotFoundError as error:
        found = "is a link to a file that does not exist" if Path(path).is_symlink() else "does not exist"
        raise InputError(f"{shown_path(path)} {found}; check the path of the {what}") from error
    except ValueError as error:
        raise InputError(f"{printable(path)} is no path ({error}); the path of a {what} file is needed") from error
    except OSError as error:
        raise unreadable_input(path, error) from error


def read_start(path: str, file: BinaryIO, num_bytes: int) -> bytes:
    """The first bytes of an open file. Raises InputError where the system gives none."""
    try:
        return file.read(num_bytes)
    except OSError as error:
        raise unreadable_input(path, error) from error


def unreadable_input(path: str, error: OSError) -> InputError:
    """The error that says why the system does not give what is in a file, and what to do about it."""
    if error.errno in (errno.EACCES, errno.EPERM):
        do = "allow this user to read it"
    else:
        do = "check the disk that it is on" if error.errno == errno.EIO else "check the path"
    return InputError(f"{shown_path(path)} cannot be read: {error.strerror}; {do}")


@contextmanager
def naming_file(path: str, do: str) -> Iterator[None]:
    """A MemoryError of the block, with the file it is about and what to `do`; one that has them stays."""
    try:
        yield
    except MemoryError as error:
        if isinstance(error.__cause__, MemoryError):
            raise
        raise MemoryError(f"there is no room for {shown_path(path)} ({str(error) or 'none left'}); {do}") from error


@contextmanager
def _decoding(path: str, start: bytes) -> Iterator[None]:
    """Whatever Pillow raises over the bytes of a file, as one line."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        counted = re.search(r"[0-9]+", str(error))
        raise InputError(_too_large(path, counted[0] if counted else "too many")) from error
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, EOFError and more
        # Pillow's own have no number.
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable_input(path, error) from error
        kind = picture_kind(start)
        if isinstance(error, UnidentifiedImageError):
            if kind is None:
                found = other_kind(start)
                raise NoPictureError(
                    f"{shown_path(path)} is {found}, not a picture that is read; give {READ_FORMATS}"
                ) from error
            reason = "its header cannot be read"
        else:
            reason = printable(str(error)) or type(error).__name__
        if "MAX_TEXT" in str(error):
            raise InputError(
                f"{shown_path(path)} is {kind or 'a picture'} with more text about itself than is read ({reason}); "
                "save the picture without it"
            ) from error
        size = Path(path).stat().st_size
        raise InputError(
            f"{shown_path(path)} is {kind or 'a picture'} that is cut off or damaged ({size} bytes): {reason}; fetch "
            "it again"
        ) from error


def _check_size(path: str, width: int, height: int) -> None:
    if width * height > MAX_PICTURE_PIXELS:
        raise InputError(_too_large(path, f"{height} x {width}"))
    if width < 1 or height < 1:
        raise InputError(f"{shown_path(path)} has {height} x {width} pixels (height x width); at least one is needed")


def _too_large(path: str, found: str) -> str:
    return f"{shown_path(path)} says it has {found} pixels; at most {MAX_PICTURE_PIXELS} are taken: scale it down"


def _picture(path: str, image: Image.Image) -> Picture:
    """A picture that was opened, loaded, upright and in RGB."""
    notes: list[str] = []
    num_frames = _num_frames(image)
    if num_frames != 1:
        notes.append(f"holds {num_frames or 'several'} frames, the first is taken")
    # Known until it is loaded.
    if not image.mode.startswith("I") and _has_16_bits(image):
        notes.append("values of 16 bits reduced to 8")
    upright, turned = _upright(image)
    is_pnm = image.format == "PPM"
    rgb, converted = _to_rgb(path, upright, is_pnm)
    return Picture(path, rgb, (*notes, *turned, *converted))


def _num_frames(image: Image.Image) -> int | None:
    """How many frames a file holds, None where the later ones cannot be read: they are not needed."""
    try:
        return int(getattr(image, "n_frames", 1))
    except Exception:
        return None
    finally:
        image.seek(0)


def _has_16_bits(image: Image.Image) -> bool:
    """Whether a picture that is not loaded yet is stored so, as far as Pillow says it: PNG, TIFF, PNM."""
    for tile in getattr(image, "tile", ()):
        details = tile.args if isinstance(tile.args, tuple) else (tile.args,)
        if any(isinstance(detail, str) and ";16" in detail for detail in details):
            return True
        # A PNM's are its mode and its largest value.
        if tile.codec_name.startswith("ppm") and isinstance(details[-1], int) and details[-1] > 255:
            return True
    return False


def _upright(image: Image.Image) -> tuple[Image.Image, list[str]]:
    # A TIFF is turned, and its tag dropped, when it is loaded. Others wait: to look for the tag may load a picture, and
    # one that failed to load is not refused a second time.
    orientation = _orientation(image) if image.format == "TIFF" else 0
    image.load()
    orientation = orientation or _orientation(image)
    try:
        upright = ImageOps.exif_transpose(image)
    except Exception:
        # The picture itself is sound; the reference fails here, where viewers show it as it is stored.
        return image, ["its EXIF data cannot be read, taken as stored"]
    turned = _ORIENTATIONS.get(orientation)
    return upright, [f"{turned} (EXIF orientation {orientation})"] if turned else []


def _orientation(image: Image.Image) -> int:
    """As EXIF has it, 0 where that says nothing that can be read."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:
        return 0
    return orientation if isinstance(orientation, int) else 0


def _to_rgb(path: str, image: Image.Image, is_pnm: bool) -> tuple[Image.Image, list[str]]:
    notes: list[str] = []
    # Pillow has the 16 bits of a PNM in 32, and stretches fewer to them.
    if image.mode.startswith("I;16") or (image.mode == "I" and is_pnm):
        image = _high_bytes(image)
        notes.append("16-bit grey, its high bytes taken")
    elif image.mode in ("I", "F"):
        _check_range(path, image)
        notes.append("wide grey values, all within 8 bits")
    elif image.mode in _MODES:
        notes.append(f"{_MODES[image.mode]} converted to RGB")
    elif image.mode not in ("RGB", "RGBA"):
        notes.append(f"{image.mode} converted to RGB")
    if image.has_transparency_data:
        return over_white(image.convert("RGBA")), [*notes, OVER_WHITE]
    return image.convert("RGB"), notes


def over_white(rgba: Image.Image) -> Image.Image:
    """A picture with alpha as it looks on white, in RGB."""
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")


def _high_bytes(image: Image.Image) -> Image.Image:
    """16-bit grey in 8 bits. Pillow's own conversion clips at 255, which turns nearly every such picture white."""
    values = np.asarray(image)
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


def _check_range(path: str, image: Image.Image) -> None:
    """Raise unless 32-bit values mean the same in 8 bits: which range they are in, no file says."""
    values = np.asarray(image)
    kind = "floating-point numbers" if image.mode == "F" else "whole numbers of 32 bits"
    has = f"{shown_path(path)} has {kind} for pixels"
    if np.isnan(values).any():
        raise InputError(f"{has}, and some are no number (NaN); values from 0 to 255 are needed: save it without them")
    least, most = values.min(), values.max()
    if least < 0 or most > 255:
        raise InputError(
            f"{has}, from {least:g} to {most:g}; values from 0 to 255 are needed: save it with 8 or 16 bits"
        )
    if image.mode == "F" and 0 < most <= 1:
        raise InputError(
            f"{has}, from {least:g} to {most:g}, which looks like a range of 0 to 1; values from 0 to 255 are needed: "
            "scale it to them"
        )
