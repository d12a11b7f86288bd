"""Pictures of up to four shapes: what is on them, decided first, and how that is drawn. Asks no questions.

What stands in a `Scene` is the truth that answers are taken from; drawing it adds what must not matter, such as the
background, noise and smooth edges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from PIL import Image, ImageDraw

from scripts.tiny_model.split import Split, draw_until

Rgb = tuple[int, int, int]

COLOURS: dict[str, tuple[Rgb, ...]] = {
    "red": ((220, 35, 40), (255, 0, 0), (190, 25, 30)),
    "orange": ((245, 140, 25), (255, 165, 0), (240, 120, 20)),
    "yellow": ((245, 220, 45), (255, 255, 0), (235, 205, 20)),
    "green": ((45, 160, 70), (0, 128, 0), (0, 220, 0), (90, 190, 80)),
    "blue": ((45, 90, 215), (0, 0, 255), (60, 130, 230), (20, 40, 160)),
    "purple": ((130, 55, 170), (128, 0, 128), (150, 90, 200)),
    "pink": ((245, 150, 190), (255, 192, 203), (255, 105, 180)),
    "black": ((20, 20, 20), (0, 0, 0)),
    "white": ((248, 248, 248), (255, 255, 255)),
}
"""Each colour's shades. A drawn shape takes one of them, shifted by at most `JITTER` a channel."""

JITTER = 14
KINDS = ("circle", "square", "rectangle", "triangle", "star", "cross", "ring")
MOST_SHAPES = 4
LARGEST_SIDE = 420
CELLS = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")

_LEAST_RADIUS = 8.0
_LEAST_CONTRAST = 80.0
_MOST_TRIES = 200
_CELL_MARGIN = 0.05
"""How far from a line between two cells a center has to be, as a share of the side, to be said to be in one."""


@dataclass(frozen=True)
class Shape:
    """A filled shape within the circle of `radius` pixels around (x, y); `angle` turns it, in radians."""

    kind: str
    colour: str
    rgb: Rgb
    x: float
    y: float
    radius: float
    angle: float
    aspect: float = 2.0


@dataclass(frozen=True)
class Background:
    """One colour, or one at the top that turns into another at the bottom."""

    top: Rgb
    bottom: Rgb


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn, sizes in pixels. `noise` is the largest change of a channel's value."""

    width: int
    height: int
    background: Background
    shapes: tuple[Shape, ...]
    noise: int = 0
    noise_seed: int = 0
    is_smooth: bool = True

    @property
    def content(self) -> tuple[tuple[str, str, str], ...]:
        """Colours and kinds with the cells they are in: what makes two scenes the same to the split."""
        return tuple(sorted((shape.colour, shape.kind, self.nearest_cell(shape)) for shape in self.shapes))

    def nearest_cell(self, shape: Shape) -> str:
        column, row = int(3 * shape.x / self.width), int(3 * shape.y / self.height)
        return CELLS[3 * min(row, 2) + min(column, 2)]

    def cell(self, shape: Shape) -> str | None:
        """The ninth of the picture that a shape's center is in, None where it is too near to another to say."""
        places = (shape.x / self.width, shape.y / self.height)
        if any(abs(place - line) < _CELL_MARGIN for place in places for line in (1 / 3, 2 / 3)):
            return None
        return self.nearest_cell(shape)

    def draw(self) -> Image.Image:
        """The picture, RGB."""
        scale = 2 if self.is_smooth else 1
        image = draw_ground(self.background, self.width * scale, self.height * scale)
        pen = ImageDraw.Draw(image)
        for shape in self.shapes:
            _draw_shape(pen, shape, scale)
        return with_noise(image.reduce(2) if self.is_smooth else image, self.noise, self.noise_seed)


def random_scene(
    random: Random, split: Split, wanted: Sequence[tuple[str, str]], largest_side: int = LARGEST_SIDE
) -> Scene:
    """A scene on the side of `split` whose shapes have the (colour, kind) of `wanted`, in any place.

    Raises ExhaustedError where no place is on that side.
    """
    return draw_until(split, lambda: _scene(random, wanted, largest_side), lambda scene: scene.content)


def _scene(random: Random, wanted: Sequence[tuple[str, str]], largest_side: int) -> Scene:
    while True:
        width, height = random_size(random, largest_side)
        shapes: list[Shape] = []
        for colour, kind in wanted:
            if placed := _placed(random, width, height, shapes, colour, kind, len(wanted)):
                shapes.append(placed)
        if len(shapes) == len(wanted):
            break
    background = random_background(random, [shape.rgb for shape in shapes])
    noise = random.choice((0, 0, 0, 6, 12, 20))
    return Scene(width, height, background, tuple(shapes), noise, random.getrandbits(32), random.random() < 0.6)


def random_size(random: Random, largest_side: int = LARGEST_SIDE) -> tuple[int, int]:
    """Width and height: areas of 72² to 300² pixels, now and then larger than what the model takes unreduced.

    `largest_side` bounds the root of the area. Some have sides that are kept as they are, multiples of 32.
    """
    most = min(largest_side, 300 if random.random() < 0.93 else LARGEST_SIDE)
    side = math.exp(random.uniform(math.log(72), math.log(most)))
    stretch = math.exp(random.uniform(-0.42, 0.42)) if random.random() < 0.7 else 1.0
    unit = 32 if random.random() < 0.4 else 1
    return max(64, round(side * stretch / unit) * unit), max(64, round(side / stretch / unit) * unit)


def random_background(random: Random, others: Sequence[Rgb]) -> Background:
    """A background that each of `others` can be seen on."""
    while True:
        top = _ground_colour(random)
        bottom = _ground_colour(random) if random.random() < 0.12 else top
        if all(contrast(ground, rgb) >= _LEAST_CONTRAST for ground in (top, bottom) for rgb in others):
            return Background(top, bottom)


def contrast(one: Rgb, other: Rgb) -> float:
    """How far two colours are apart, a Euclidean distance over channels."""
    return math.dist(one, other)


def shade(random: Random, colour: str) -> Rgb:
    """One of the colour's shades, a little shifted."""
    red, green, blue = random.choice(COLOURS[colour])
    shift = random.choice((0, JITTER))
    return (_shifted(random, red, shift), _shifted(random, green, shift), _shifted(random, blue, shift))


def with_noise(image: Image.Image, noise: int, seed: int) -> Image.Image:
    """The picture with each value changed by at most `noise`, the same change for the same seed."""
    if not noise:
        return image
    values = np.asarray(image).astype(np.int16)
    drawn = np.frombuffer(np.random.Generator(np.random.Philox(seed)).bytes(values.size), np.uint8)
    values += (np.arange(256) * (2 * noise + 1) // 256 - noise).astype(np.int16)[drawn].reshape(values.shape)
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def _shifted(random: Random, value: int, most: int) -> int:
    return min(255, max(0, value + random.randint(-most, most)))


def _ground_colour(random: Random) -> Rgb:
    kind = random.random()
    if kind < 0.4:
        least, most = random.choice(((255, 255), (235, 255)))
    elif kind < 0.5:
        least, most = 0, 40
    elif kind < 0.7:
        grey = random.randint(30, 235)
        return (_shifted(random, grey, 6), _shifted(random, grey, 6), _shifted(random, grey, 6))
    else:
        least, most = random.choice(((170, 250), (20, 110), (0, 255)))
    return (random.randint(least, most), random.randint(least, most), random.randint(least, most))


def _placed(
    random: Random, width: int, height: int, others: Sequence[Shape], colour: str, kind: str, num_shapes: int
) -> Shape | None:
    """A shape that touches no other; it gets smaller with each try that fails. None where the others leave no room."""
    side = min(width, height)
    least = max(_LEAST_RADIUS, 0.1 * side)
    radius = random.uniform(least, max(least, (0.42 if num_shapes == 1 else 0.25) * side))
    for _ in range(_MOST_TRIES):
        x, y = random.uniform(radius + 1, width - radius - 1), random.uniform(radius + 1, height - radius - 1)
        if all(math.dist((x, y), (other.x, other.y)) > radius + other.radius + 3 for other in others):
            break
        radius = max(_LEAST_RADIUS, radius * 0.96)
    else:
        return None
    is_upright = kind in ("square", "rectangle", "triangle", "star", "cross") and random.random() < 0.5
    angle = 0.0 if is_upright else random.uniform(0, 2 * math.pi)
    if kind == "rectangle" and is_upright and random.random() < 0.5:
        angle = math.pi / 2
    return Shape(kind, colour, shade(random, colour), x, y, radius, angle, random.uniform(1.7, 2.6))


def draw_ground(background: Background, width: int, height: int) -> Image.Image:
    """A picture with nothing on its background."""
    top = Image.new("RGB", (width, height), background.top)
    if background.top == background.bottom:
        return top
    bottom = Image.new("RGB", (width, height), background.bottom)
    return Image.composite(bottom, top, Image.linear_gradient("L").resize((width, height)))


def _draw_shape(pen: ImageDraw.ImageDraw, shape: Shape, scale: int) -> None:
    x, y, radius = shape.x * scale, shape.y * scale, shape.radius * scale
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape.kind == "circle":
        pen.ellipse(box, fill=shape.rgb)
    elif shape.kind == "ring":
        pen.ellipse(box, outline=shape.rgb, width=max(2 * scale, round(0.34 * radius)))
    else:
        sin, cos = math.sin(shape.angle), math.cos(shape.angle)
        corners = [(u * radius, v * radius) for u, v in outline(shape.kind, shape.aspect)]
        pen.polygon([(x + u * cos - v * sin, y + u * sin + v * cos) for u, v in corners], fill=shape.rgb)


def outline(kind: str, aspect: float) -> list[tuple[float, float]]:
    """Corners of a shape in the circle of radius 1, standing upright; y points down."""
    if kind == "square":
        return _circle_points((1, 3, 5, 7), 8)
    if kind == "triangle":
        return _circle_points((9, 1, 5), 12)
    if kind == "star":
        return [(u * share, v * share) for (u, v), share in zip(_spikes(), (1, 0.42) * 5, strict=True)]
    if kind == "rectangle":
        long, short = aspect / math.hypot(aspect, 1), 1 / math.hypot(aspect, 1)
        return [(-long, -short), (long, -short), (long, short), (-long, short)]
    assert kind == "cross"
    arm, half = 0.95, 0.3
    quarter = ((half, -arm), (half, -half), (arm, -half))
    corners: list[tuple[float, float]] = []
    for _ in range(4):
        corners += quarter
        quarter = ((-quarter[0][1], quarter[0][0]), (-quarter[1][1], quarter[1][0]), (-quarter[2][1], quarter[2][0]))
    return corners


def _circle_points(steps: Sequence[int], turn: int) -> list[tuple[float, float]]:
    angles = [2 * math.pi * step / turn for step in steps]
    return [(math.cos(angle), math.sin(angle)) for angle in angles]


def _spikes() -> list[tuple[float, float]]:
    angles = [-math.pi / 2 + math.pi * step / 5 for step in range(10)]
    return [(math.cos(angle), math.sin(angle)) for angle in angles]
