"""Draws the pictures of scripts/examples that README asks the embedded model about; always the same ones.

PYTHONPATH=. python scripts/make_example_pictures.py scripts/examples
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.tiny_model.scenes import COLOURS, Background, Scene, Shape
from scripts.tiny_model.words import Printed

_WHITE = Background((255, 255, 255), (255, 255, 255))
_SAND = Background((238, 228, 205), (238, 228, 205))


def _scene(width: int, height: int, ground: Background, *shapes: tuple[str, str, float, float, float]) -> Scene:
    """`shapes` are (colour, kind, x, y, radius), upright."""
    drawn = (Shape(kind, colour, COLOURS[colour][0], x, y, radius, 0.0) for colour, kind, x, y, radius in shapes)
    return Scene(width, height, ground, tuple(drawn))


_CIRCLES = (("red", "circle", 60, 58, 34), ("blue", "circle", 128, 140, 30), ("green", "circle", 204, 52, 26))
_SHAPES = (("purple", "star", 55, 82, 42), ("yellow", "ring", 160, 60, 38), ("green", "triangle", 262, 96, 44))
EXAMPLES: dict[str, Scene | Printed] = {
    "three-circles": _scene(256, 192, _WHITE, *_CIRCLES, ("orange", "square", 42, 150, 28)),
    "shapes": _scene(320, 160, _SAND, *_SHAPES),
    "one-circle": _scene(160, 160, _WHITE, ("blue", "circle", 84, 70, 40)),
    "two-circles": _scene(192, 128, _SAND, ("red", "circle", 50, 64, 30), ("black", "circle", 140, 60, 34)),
    "word": Printed("hawk", 224, 112, _SAND, COLOURS["blue"][0], 56, 112, 54, 0.0, False, 0, 0),
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
