"""Draws the pictures of scripts/examples that README asks the embedded model about; always the same ones.

PYTHONPATH=. python scripts/make_example_pictures.py scripts/examples
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.tiny_model.scenes import COLOURS, Background, Scene, Shape

_WHITE = Background((255, 255, 255), (255, 255, 255))
_SAND = Background((238, 228, 205), (238, 228, 205))


def _shape(colour: str, kind: str, x: float, y: float, radius: float, angle: float = 0.0) -> Shape:
    return Shape(kind, colour, COLOURS[colour][0], x, y, radius, angle)


def _circles(width: int, height: int, ground: Background, places: Sequence[tuple[str, float, float, float]]) -> Scene:
    return Scene(width, height, ground, tuple(_shape(colour, "circle", *place) for colour, *place in places))


THREE_CIRCLES = Scene(
    256,
    192,
    _WHITE,
    (
        _shape("red", "circle", 60, 58, 34),
        _shape("blue", "circle", 128, 140, 30),
        _shape("green", "circle", 204, 52, 26),
        _shape("orange", "square", 42, 150, 28, 0.3),
    ),
)
SHAPES = Scene(
    320,
    160,
    _SAND,
    (
        _shape("purple", "star", 55, 82, 42),
        _shape("yellow", "ring", 160, 60, 38),
        _shape("green", "triangle", 262, 96, 44),
    ),
)
ONE_CIRCLE = _circles(160, 160, _WHITE, [("blue", 84, 70, 40)])
TWO_CIRCLES = _circles(192, 128, _SAND, [("red", 50, 64, 30), ("black", 140, 60, 34)])

EXAMPLES: dict[str, Scene] = {
    "three-circles": THREE_CIRCLES,
    "shapes": SHAPES,
    "one-circle": ONE_CIRCLE,
    "two-circles": TWO_CIRCLES,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where to")
    folder = parser.parse_args().folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in EXAMPLES.items():
            picture.draw().save(folder / f"{name}.png", optimize=True)
    except OSError as error:
        print(f"{folder}: {error.strerror}; give a folder that can be written", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
