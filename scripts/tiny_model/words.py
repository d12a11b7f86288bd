"""Short words and numbers, and pictures with one of them printed. Asks no questions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from PIL import Image, ImageDraw, ImageFont

from scripts.tiny_model.scenes import (
    COLOURS,
    Background,
    Rgb,
    contrast,
    draw_ground,
    random_background,
    random_size,
    shade,
    with_noise,
)
from scripts.tiny_model.split import Split, draw_until

MOST_CHARACTERS = 6
_COMMON = (
    "air also apple arm art baby back bag ball band bank base bath beach bear bed bell best bike bird black blue boat "
    "body bone book boot box boy brain bread bridge bring bus cake call camp card cat chair city class clean clock "
    "cloud coat code cold cook cool corn cow cry cup dance dark data day deep desk dog door down dream dress drink "
    "drive dry duck earth east easy eat edge egg empty end eye face fair fall farm fast field film find fire fish "
    "flag flat floor flower fly food foot fork forest fox free fresh frog fruit game garden gate gift girl give glass "
    "goat gold good grass great green ground hair half hand happy hat head heart heavy help hero high hill home honey "
    "horse hot hotel house ice idea iron island jump keep key king kite knee knife lake lamp land large leaf left leg "
    "lemon light line lion list long look love lunch map mark market meal milk mind moon more music nail name neck "
    "nest net new night noise north nose note ocean office open orange oven owl page paint paper park pasta path "
    "peace pen piano pig plane plant plate play pocket point pond pool queen quick quiet rabbit radio rain read red "
    "rice right ring river road rock roof room root rope rose salt sand school sea seed sheep ship shoe shop silver "
    "sing sister sky sleep slow small smile snow sock song soup south spoon spring stamp star stone stop storm street "
    "strong sugar summer sun sweet table tail tall tea tent tiger time tomato train travel tree truck turn under "
    "uncle up valley velvet very view village voice walk wall warm wash watch water wave west wheel white wind window "
    "wing winter wolf wood word work world yellow yes young zebra zero zoo kestrel"
)
COMMON_WORDS = tuple(word for word in _COMMON.split() if len(word) <= MOST_CHARACTERS)
_LEAST_FONT = 13
_LEAST_CONTRAST = 120.0
"""Strokes are thin, so a text needs more than a shape."""
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"
_SAME_IN_BOTH_CASES = frozenset("cosuvwxz")
"""Letters whose capitals are only larger, so that a word of these alone says nothing of its case."""


@dataclass(frozen=True)
class Printed:
    """One text on a picture, sizes in pixels; the text is `angle` degrees from level, its center at (x, y)."""

    text: str
    width: int
    height: int
    background: Background
    rgb: Rgb
    font_size: int
    x: float
    y: float
    angle: float
    is_bold: bool
    noise: int
    noise_seed: int

    def draw(self) -> Image.Image:
        """The picture, RGB."""
        image = draw_ground(self.background, self.width, self.height)
        mask = _turned_mask(self.text, self.font_size, self.is_bold, self.angle)
        place = (round(self.x - mask.width / 2), round(self.y - mask.height / 2))
        image.paste(Image.new("RGB", mask.size, self.rgb), place, mask)
        return with_noise(image, self.noise, self.noise_seed)


def random_text(random: Random, split: Split) -> str:
    """A word or a number of at most six characters on the side of `split`, which does not look at a word's case."""
    text = draw_until(split, lambda: _word(random) if random.random() < 0.7 else _number(random))
    if text.isdigit():
        return text
    case = random.random()
    return text.upper() if case < 0.35 else text.capitalize() if case < 0.5 else text


def random_word(random: Random, split: Split, most: int = MOST_CHARACTERS) -> str:
    """A word in small letters on the side of `split`, of at most `most` letters."""
    return draw_until(split, lambda: _word(random, most))


def random_print(random: Random, text: str) -> Printed:
    """`text` printed in some size, place and colour, all of it on the picture."""
    while True:
        width, height = random_size(random)
        largest = _largest_font(text, 0.92 * width, 0.85 * height)
        if largest < _LEAST_FONT:
            continue
        font_size, is_bold = random.randint(max(_LEAST_FONT, largest // 4), largest), random.random() < 0.25
        angle = random.uniform(-9, 9) if random.random() < 0.35 else 0.0
        mask = _turned_mask(text, font_size, is_bold, angle)
        if mask.width <= width and mask.height <= height:
            break
    x = mask.width / 2 + random.random() * (width - mask.width)
    y = mask.height / 2 + random.random() * (height - mask.height)
    while True:
        rgb = shade(random, random.choice(("black", "white", *COLOURS)))
        background = random_background(random, [rgb])
        if min(contrast(background.top, rgb), contrast(background.bottom, rgb)) >= _LEAST_CONTRAST:
            break
    noise = random.choice((0, 0, 0, 6, 12))
    return Printed(text, width, height, background, rgb, font_size, x, y, angle, is_bold, noise, random.getrandbits(32))


def _word(random: Random, most: int = MOST_CHARACTERS) -> str:
    while True:
        kind = random.random()
        if kind < 0.4:
            word = random.choice(COMMON_WORDS)
        elif kind < 0.7:
            letters = [random.choice(_CONSONANTS if i % 2 else _VOWELS) for i in range(random.randint(2, most))]
            word = "".join(letters if random.random() < 0.3 else letters[::-1])
        else:
            word = "".join(random.choice(_CONSONANTS + _VOWELS) for _ in range(random.randint(2, most)))
        if len(word) <= most and not _SAME_IN_BOTH_CASES.issuperset(word):
            return word


def _number(random: Random) -> str:
    length = random.randint(1, MOST_CHARACTERS)
    return str(random.randrange(10 ** (length - 1) if length > 1 else 0, 10**length))


def _largest_font(text: str, width: float, height: float) -> int:
    """The largest size in which `text` fits, by its extent in one size."""
    left, top, right, bottom = _font(40).getbbox(text)
    return int(40 * min(width / (right - left), height / (bottom - top)))


def _mask(text: str, font_size: int, is_bold: bool) -> Image.Image:
    """How much of each pixel the text covers, with nothing around it."""
    font, stroke = _font(font_size), max(1, font_size // 24) if is_bold else 0
    left, top, right, bottom = font.getbbox(text, stroke_width=stroke)
    mask = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2))
    ImageDraw.Draw(mask).text((1 - left, 1 - top), text, font=font, fill=255, stroke_width=stroke)
    return mask


def _turned_mask(text: str, font_size: int, is_bold: bool, angle: float) -> Image.Image:
    mask = _mask(text, font_size, is_bold)
    return mask.rotate(angle, resample=Image.Resampling.BICUBIC, expand=True) if angle else mask


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own font, which needs no file."""
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return font
