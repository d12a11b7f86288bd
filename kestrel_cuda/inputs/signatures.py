"""What a file that is no picture to us seems to be, from its first bytes. Opens nothing."""

from __future__ import annotations

_PICTURES = {
    b"\x89PNG": "a PNG",
    b"\xff\xd8\xff": "a JPEG",
    b"GIF8": "a GIF",
    b"II*\0": "a TIFF",
    b"MM\0*": "a TIFF",
    b"\0\0\0\x0cjP  ": "a JPEG 2000",
    b"BM": "a BMP",
}
_OTHERS = {
    b"%PDF": "a PDF",
    b"%!PS": "PostScript",
    b"8BPS": "a Photoshop file",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"\x1aE\xdf\xa3": "a Matroska video",
    b"version https://git-lfs": "a Git LFS pointer to a file that was not fetched",
}
_BOXED = {b"hei": "a HEIC picture", b"hev": "a HEIC picture", b"mif": "a HEIF picture", b"msf": "a HEIF picture"}
_MARKUP = ((b"<svg", "an SVG drawing"), (b"<!doctype html", "a web page"), (b"<html", "a web page"))
_SHOWN_BYTES = 8


def picture_kind(start: bytes) -> str | None:
    """The kind of picture that begins so, None where none does."""
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "a WebP"
    if start[4:8] == b"ftyp" and start[8:11] == b"avi":
        return "an AVIF"
    return next((kind for signature, kind in _PICTURES.items() if start.startswith(signature)), None)


def other_kind(start: bytes) -> str:
    """What else begins so, in words."""
    if start[4:8] == b"ftyp":
        return _BOXED.get(start[8:11], "an MP4 video")
    if start[:4] == b"RIFF" and start[8:12] == b"AVI ":
        return "an AVI video"
    for signature, kind in _OTHERS.items():
        if start.startswith(signature):
            return kind
    lowered = start.lower()
    for tag, kind in _MARKUP:
        if tag in lowered:
            return kind
    # A character may be cut at the end of what was read.
    text = start.decode("utf-8", errors="ignore")
    if len(text.encode()) >= len(start) - 3 and all(c.isprintable() or c in "\t\r\n\f" for c in text):
        return "text"
    return f"nothing known (it begins with the bytes {start[:_SHOWN_BYTES].hex(' ')})"
