"""The generated questions: the same for the same seed, disjoint over the split, and answered truly."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import pytest

from kestrel_cli.prompt import BUILT_IN_QUESTION, BUILT_IN_VISUAL_QUESTION
from scripts.tiny_model.checkpoint import (
    MODEL,
    MOST_BYTES,
)
from scripts.tiny_model.items import Item
from scripts.tiny_model.picture_tasks import PICTURE_TASKS
from scripts.tiny_model.scenes import COLOURS, KINDS, MOST_SHAPES, Scene
from scripts.tiny_model.split import Split, split_of
from scripts.tiny_model.stream import SHARES, TASKS, item
from scripts.tiny_model.text_tasks import KEEP_FACTS, SELF_FACTS
from scripts.tiny_model.words import Printed


def items(task: str, number: int = 120, split: Split = Split.TRAIN, language: str | None = None) -> list[Item]:
    made = [item(3, split, index, task) for index in range(number)]
    return [one for one in made if language in (None, one.language)]


def scene(one: Item, number: int = 0) -> Scene:
    picture = one.pictures[number]
    assert isinstance(picture, Scene)
    return picture


def contents(one: Item) -> list[object]:
    """What decides an item's side of the split."""
    if not one.pictures:
        return [one.content]
    return [p.content if isinstance(p, Scene) else p.text.lower() for p in one.pictures]


def digest(seed: int) -> str:
    """Of everything that a model would see of some items, pixels too."""
    sha = hashlib.sha256()
    for index in range(40):
        one = item(seed, Split.TRAIN, index)
        sha.update(repr((one.task, one.question, one.answer)).encode())
        for picture in one.pictures:
            sha.update(picture.draw().tobytes())
    return sha.hexdigest()


def test_the_same_seed_gives_the_same_bytes() -> None:
    assert digest(7) == digest(7)
    assert digest(7) != digest(8)


def test_an_item_does_not_depend_on_those_before_it() -> None:
    later = item(0, Split.TRAIN, 1000)
    for index in range(5):
        item(0, Split.TRAIN, index)
    assert item(0, Split.TRAIN, 1000) == later


def test_every_task_has_a_share() -> None:
    assert SHARES.keys() == TASKS.keys()
    counts = Counter(item(0, Split.TRAIN, index).task for index in range(1500))
    total = sum(SHARES.values())
    for task, share in SHARES.items():
        assert counts[task] / 1500 == pytest.approx(share / total, abs=0.04)


@pytest.mark.parametrize("task", TASKS)
def test_held_out_contents_are_never_trained_on(task: str) -> None:
    for split in Split:
        for one in items(task, 60, split):
            assert {split_of(content) for content in contents(one)} == {split}
    seen = {content for one in items(task, 300) for content in contents(one)}
    assert not seen & {content for one in items(task, 60, Split.HELD_OUT) for content in contents(one)}


@pytest.mark.parametrize("task", PICTURE_TASKS)
def test_picture_tasks_are_asked_in_both_languages(task: str) -> None:
    languages = Counter(one.language for one in items(task))
    assert languages["zh"] == pytest.approx(0.4 * 120, abs=20)
    for one in items(task):
        assert one.question.isascii() == (one.language == "en")


def test_colours_are_those_of_the_shape_asked_for() -> None:
    for one in items("colour", language="en"):
        (kind,) = [kind for kind in KINDS if re.search(rf"\b{kind}\b", one.question)]
        found = [shape.colour for shape in scene(one).shapes if shape.kind == kind]
        assert one.answer == (found[0] if found else f"There is no {kind}.")
        assert len(found) <= 1


def test_shapes_are_those_of_the_colour_asked_for() -> None:
    seen = Counter[str]()
    for one in items("shape", language="en"):
        colours = [colour for colour in COLOURS if re.search(rf"\b{colour}\b", one.question)]
        if one.answer in ("yes", "no"):
            (kind,) = [kind for kind in KINDS if re.search(rf"\b{kind}\b", one.question)]
            is_there = (colours[0], kind) in {(shape.colour, shape.kind) for shape in scene(one).shapes}
            assert one.answer == ("yes" if is_there else "no")
        elif colours:
            assert [one.answer] == [shape.kind for shape in scene(one).shapes if shape.colour == colours[0]]
        else:
            where = re.search(r"(?:at the|on the|in the) ([a-z ]+)\?", one.question)
            assert where is not None
            (kind,) = [shape.kind for shape in scene(one).shapes if scene(one).cell(shape) == where[1]]
            assert one.answer == kind
        seen[one.answer] += 1
    assert seen["yes"] > 2
    assert seen["no"] > 2


def test_counts_are_those_of_the_scene() -> None:
    numbers = Counter[str]()
    for one in items("count", language="en"):
        shapes = scene(one).shapes
        kinds = [kind for kind in KINDS if re.search(rf"\b{kind}(s|es)\b", one.question)]
        colours = [colour for colour in COLOURS if re.search(rf"\b{colour}\b", one.question)]
        counted = [s for s in shapes if s.kind in (kinds or KINDS) and s.colour in (colours or COLOURS)]
        assert one.answer == str(len(counted)), one.question
        assert 1 <= len(shapes) <= MOST_SHAPES
        numbers[one.answer] += 1
    assert set(numbers) == set("01234")


def test_positions_are_those_of_the_shape_asked_for() -> None:
    for one in items("position", language="en"):
        named = [
            shape
            for shape in scene(one).shapes
            if f"{shape.colour} {shape.kind}" in one.question or f"the {shape.kind}" in one.question
        ]
        assert [one.answer] == [scene(one).cell(shape) for shape in named], one.question


def test_descriptions_name_every_shape_from_left_to_right() -> None:
    for one in items("describe", language="en"):
        picture = one.pictures[0]
        if isinstance(picture, Printed):
            assert one.answer == f'the text "{picture.text}"'
            continue
        names = re.findall(r"an? (\w+ \w+)", one.answer)
        assert names == [f"{s.colour} {s.kind}" for s in sorted(picture.shapes, key=lambda s: s.x)]


def test_comparisons_are_true() -> None:
    answers = Counter[str]()
    for one in items("compare", 200, language="en"):
        first, second = (scene(one, number).shapes for number in (0, 1))
        if "more" in one.question:
            kinds = [kind for kind in KINDS if re.search(rf"\b{kind}(s|es)\b", one.question)] or KINDS
            a, b = (sum(shape.kind in kinds for shape in shapes) for shapes in (first, second))
            right = "the first" if a > b else "the second" if a < b else "both the same"
        else:
            is_colour = "color" in one.question
            a, b = ((shapes[0].colour if is_colour else shapes[0].kind) for shapes in (first, second))
            right = "yes" if a == b else "no"
        assert one.answer == right
        answers[right] += 1
    assert set(answers) == {"the first", "the second", "both the same", "yes", "no"}


def test_texts_are_answered_truly() -> None:
    for one in items("read"):
        picture = one.pictures[0]
        assert isinstance(picture, Printed)
        assert one.answer == picture.text
    for one in items("sum"):
        a, b = (int(number) for number in re.findall(r"\d+", one.question))
        assert one.answer == str(a + b)
    for one in items("echo"):
        assert one.answer == one.spelled
        assert one.spelled in one.question
    for one in items("reverse"):
        assert one.answer == "".join(reversed(one.spelled))
        assert one.spelled in one.question
    numbers = [re.search(r"--keep (\d+)", one.question) for one in items("keep")]
    for one, number in zip(items("keep"), numbers, strict=True):
        if number is not None and "layer" in one.answer and number[1] not in ("0", "1"):
            assert f" {number[1]} layers" in one.answer


def test_facts_have_one_answer_each() -> None:
    answers: dict[str, str] = {}
    for fact in (*SELF_FACTS, *KEEP_FACTS):
        for question in fact.questions:
            assert answers.setdefault(question.lower().rstrip(".?!？。！"), fact.answer) == fact.answer
    assert len(set(answers.values())) == len(SELF_FACTS) + len(KEEP_FACTS)


def test_the_built_in_questions_are_trained_on() -> None:
    (fact,) = [fact for fact in KEEP_FACTS if BUILT_IN_QUESTION in fact.questions]
    assert split_of((fact.answer, BUILT_IN_QUESTION)) is Split.TRAIN
    assert BUILT_IN_VISUAL_QUESTION in {one.question for one in items("describe")}


def test_the_model_says_true_things_of_itself() -> None:
    answers = [fact.answer for fact in SELF_FACTS]
    assert f"I have {MODEL.num_layers} layers." in answers
    assert f"My files take less than {MOST_BYTES // 10**6} MB." in answers
