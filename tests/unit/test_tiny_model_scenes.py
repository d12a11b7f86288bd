"""The generated pictures: what a scene says is what its pixels show, found by filling and measuring, not by drawing."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from scripts.tiny_model.scenes import (
    COLOURS,
    JITTER,
    KINDS,
    MOST_SHAPES,
    Background,
    Scene,
    Shape,
    contrast,
    random_scene,
)
from scripts.tiny_model.split import ExhaustedError, Split, draw_until, split_of
from scripts.tiny_model.words import MOST_CHARACTERS, random_print, random_text


def scenes(number: int) -> list[Scene]:
    """Scenes of one to four shapes on one plain ground, without what is only there to disturb."""
    random = Random(5)
    found = []
    for index in range(number):
        wanted = [(random.choice(list(COLOURS)), random.choice(KINDS)) for _ in range(1 + index % MOST_SHAPES)]
        scene = random_scene(random, Split.TRAIN, wanted)
        top = scene.background.top
        found.append(replace(scene, background=Background(top, top), noise=0, is_smooth=False))
    return found


def blobs(scene: Scene) -> list[np.ndarray]:
    """A mask of the pixels of each thing that is not the ground: pixels that touch, at a corner too, are one thing."""
    pixels = np.asarray(scene.draw())
    is_thing = (pixels != np.array(scene.background.top, np.uint8)).any(axis=2)
    marks = np.arange(1, is_thing.size + 1).reshape(is_thing.shape) * is_thing
    while True:
        wide = np.pad(marks, 1)
        rows, columns = marks.shape
        around = [wide[y : y + rows, x : x + columns] for y in range(3) for x in range(3)]
        spread = np.max(around, axis=0) * is_thing
        if np.array_equal(spread, marks):
            return [marks == mark for mark in np.unique(marks[is_thing])]
        marks = spread


def test_as_many_things_are_drawn_as_the_scene_says() -> None:
    for scene in scenes(60):
        assert len(blobs(scene)) == len(scene.shapes)


def test_shapes_are_where_and_of_the_colour_that_the_scene_says() -> None:
    for scene in scenes(40):
        masks = blobs(scene)
        for shape in scene.shapes:
            mask = next(mask for mask in masks if is_at(mask, shape))
            rows, columns = np.nonzero(mask)
            # A triangle's middle lies off the center of its circle, by less than a quarter of the radius.
            middle = (columns.mean(), rows.mean())
            assert math.dist(middle, (shape.x, shape.y)) < 0.25 * shape.radius + 1
            assert {tuple(value) for value in np.asarray(scene.draw())[mask].tolist()} == {shape.rgb}
            assert min(contrast(shape.rgb, anchor) for anchor in COLOURS[shape.colour]) <= JITTER * 3**0.5


def is_at(mask: np.ndarray, shape: Shape) -> bool:
    rows, columns = np.nonzero(mask)
    return bool((np.hypot(columns - shape.x, rows - shape.y) < shape.radius + 2).all())


AREAS = {
    "circle": lambda _: math.pi,
    "square": lambda _: 2.0,
    "rectangle": lambda aspect: 4 * aspect / (aspect**2 + 1),
    "triangle": lambda _: 3 * 3**0.5 / 4,
    "star": lambda _: 10 * 0.42 * math.sin(math.pi / 5) / 2,
    "cross": lambda _: 2 * (0.6 * 1.9) - 0.6**2,
    "ring": lambda _: math.pi * (1 - 0.66**2),
}
"""Of a shape in a circle of radius 1, by its aspect."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("angle", [0.0, 0.7])
def test_a_kind_has_its_area(kind: str, angle: float) -> None:
    shape = Shape(kind, "red", (255, 0, 0), 101, 99, 80, angle, aspect=2.2)
    white = Background((255, 255, 255), (255, 255, 255))
    drawn = np.asarray(Scene(200, 200, white, (shape,), is_smooth=False).draw())
    area = int((drawn[:, :, 1] == 0).sum())
    assert area == pytest.approx(AREAS[kind](2.2) * 80**2, rel=0.04)


def test_a_cell_is_said_only_of_a_shape_that_is_clearly_in_it() -> None:
    white = Background((255, 255, 255), (255, 255, 255))

    def cell(x: float, y: float) -> str | None:
        shape = Shape("circle", "red", (255, 0, 0), x, y, 10, 0)
        return Scene(300, 150, white, (shape,)).cell(shape)

    assert [cell(20, 20), cell(150, 20), cell(280, 75), cell(150, 75), cell(30, 140)] == [
        "top left",
        "top",
        "right",
        "center",
        "bottom left",
    ]
    assert cell(104, 20) is None
    assert cell(150, 95) is None


def test_both_sides_of_the_split_share_nothing_and_the_held_out_one_is_an_eighth() -> None:
    sides = [split_of((a, b)) for a in range(100) for b in range(100)]
    assert sides.count(Split.HELD_OUT) == pytest.approx(10_000 / 8, rel=0.1)
    for split in Split:
        random = Random(1)
        wanted = [("red", "circle"), ("blue", "star")]
        for _ in range(30):
            assert split_of(random_scene(random, split, wanted).content) is split
            assert split_of(random_text(random, split).lower()) is split
    with pytest.raises(ExhaustedError):
        draw_until(Split.HELD_OUT if split_of(1) is Split.TRAIN else Split.TRAIN, lambda: 1)


def test_printed_texts_lie_on_the_picture_and_can_be_seen() -> None:
    random = Random(2)
    for _ in range(60):
        text = random_text(random, Split.TRAIN)
        assert 1 <= len(text) <= MOST_CHARACTERS
        printed = replace(random_print(random, text), noise=0)
        with_text = np.asarray(printed.draw()).astype(int)
        ground = np.asarray(replace(printed, text=" ", angle=0.0).draw()).astype(int)
        changed = np.abs(with_text - ground).max(axis=2) > 40
        assert changed.sum() > 10
        # Nothing is cut off: as much is there as on a picture with more room around.
        roomy = replace(
            printed,
            width=3 * printed.width,
            height=3 * printed.height,
            background=Background(printed.background.top, printed.background.top),
            x=printed.x + printed.width,
            y=printed.y + printed.height,
        )
        plain = replace(printed, background=roomy.background)
        inks = [np.asarray(p.draw()).astype(int) != np.array(roomy.background.top) for p in (plain, roomy)]
        assert inks[0].any(axis=2).sum() == inks[1].any(axis=2).sum()
