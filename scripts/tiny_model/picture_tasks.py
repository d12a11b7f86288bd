"""Questions about pictures, in English and Chinese, with answers read off what was drawn. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

from scripts.tiny_model.items import Item, Maker
from scripts.tiny_model.scenes import CELLS, COLOURS, KINDS, MOST_SHAPES, Scene, Shape, random_scene
from scripts.tiny_model.split import Split
from scripts.tiny_model.words import random_print, random_text

CHINESE_SHARE = 0.4

_KIND_ZH = dict(zip(KINDS, ("圆形", "正方形", "长方形", "三角形", "星形", "十字", "圆环"), strict=True))
_COLOUR_ZH = dict(zip(COLOURS, ("红色", "橙色", "黄色", "绿色", "蓝色", "紫色", "粉色", "黑色", "白色"), strict=True))
_CELL_ZH = dict(zip(CELLS, ("左上", "上方", "右上", "左侧", "中间", "右侧", "左下", "下方", "右下"), strict=True))
_IN_CELL = {cell: "in the center" if cell == "center" else f"at the {cell}" for cell in CELLS} | {
    "left": "on the left",
    "right": "on the right",
}
_COMPARED_SIDE = 200
"""Two pictures share a prompt, so they are smaller than one alone."""
_ANY_EN, _ANY_ZH = ("shape", "shapes"), "图形"

_COLOUR_EN = (
    "What color is the {kind}?",
    "What colour is the {kind}?",
    "Which color does the {kind} have?",
    "Tell me the color of the {kind}.",
    "The color of the {kind}?",
    "what is the color of the {kind}",
)
_COLOUR_ZH_FORMS = ("{kind}是什么颜色？", "{kind}是什么颜色的？", "请说出{kind}的颜色。", "图中的{kind}是哪种颜色？")
_SHAPE_EN = (
    "What shape is {colour}?",
    "What is the {colour} shape?",
    "Which shape is {colour}?",
    "What shape is the {colour} object?",
    "What is the {colour} thing?",
)
_SHAPE_ZH = ("{colour}的是什么形状？", "{colour}的图形是什么？", "什么形状是{colour}的？", "{colour}的是什么图形？")
_SHAPE_AT_EN = ("What shape is {where}?", "Which shape is {where}?", "What is {where}?")
_SHAPE_AT_ZH = ("{where}是什么形状？", "{where}是什么图形？", "什么图形在{where}？")
_IS_THERE_EN = ("Is there a {thing}?", "Is there a {thing} in the picture?", "Do you see a {thing}?")
_IS_THERE_ZH = ("图中有{thing}吗？", "有没有{thing}？", "你看到{thing}了吗？")
_COUNT_EN = (
    "How many {things} are there?",
    "How many {things} are in the picture?",
    "How many {things} do you see?",
    "How many {things} can you see?",
    "Count the {things}.",
    "What is the number of {things}?",
    "how many {things}",
)
_COUNT_ZH = (
    "有几个{thing}？",
    "图中有几个{thing}？",
    "一共有多少个{thing}？",
    "数一数{thing}的数量。",
    "有多少{thing}？",
)
_WHERE_EN = (
    "Where is the {thing}?",
    "Where in the picture is the {thing}?",
    "Where do you see the {thing}?",
    "What is the position of the {thing}?",
    "Which part of the picture is the {thing} in?",
)
_WHERE_ZH = ("{thing}在哪里？", "{thing}在图中的什么位置？", "{thing}位于哪里？", "请说出{thing}的位置。")
_DESCRIBE_EN = (
    "What is in this picture?",
    "What is in the image?",
    "What do you see?",
    "Describe the picture.",
    "Describe this image.",
    "What is this?",
    "What does the picture show?",
    "What does this show?",
)
_DESCRIBE_ZH = ("图中有什么？", "这张图里有什么？", "你看到了什么？", "描述这张图片。", "这是什么？")
_READ_EN = (
    "What does it say?",
    "What is written here?",
    "Read the text.",
    "What is the text in the picture?",
    "What does the picture say?",
    "What is written in the image?",
    "Read it.",
    "Which {what} is printed here?",
    "What {what} do you see?",
)
_READ_ZH = ("图中写的是什么？", "上面写着什么？", "读出图中的文字。", "这是什么字？", "图片上的内容是什么？")
_MORE_EN = (
    "Which picture has more {things}?",
    "Which image has more {things}?",
    "Which one has more {things}?",
    "In which picture are there more {things}?",
    "Are there more {things} in the first or in the second picture?",
)
_MORE_ZH = ("哪张图的{thing}更多？", "哪一张图片里的{thing}比较多？", "第一张和第二张，哪张的{thing}多？")
_SAME_EN = (
    "Do both pictures show the same {what}?",
    "Is the {what} the same in both pictures?",
    "Do the two images have the same {what}?",
)
_SAME_ZH = ("两张图的{what}相同吗？", "两张图片的{what}一样吗？", "它们的{what}是否相同？")


def colour(random: Random, split: Split) -> Item:
    """The colour of the one shape of its kind, or that there is none."""
    language = _language(random)
    kinds = random.sample(KINDS, random.randint(1, MOST_SHAPES))
    scene = random_scene(random, split, [(_colour(random), kind) for kind in kinds])
    if random.random() < 0.08:
        kind = random.choice([kind for kind in KINDS if kind not in kinds])
        answer = _none(language, kind)
    else:
        shape = random.choice(scene.shapes)
        kind, answer = shape.kind, shape.colour if language == "en" else _COLOUR_ZH[shape.colour]
    forms = _COLOUR_EN if language == "en" else _COLOUR_ZH_FORMS
    return Item("colour", language, random.choice(forms).format(kind=_kind(language, kind)), answer, (scene,))


def shape(random: Random, split: Split) -> Item:
    """The shape that has a colour or is at a place, or whether there is one of a colour and kind."""
    language = _language(random)
    is_en = language == "en"
    colours = random.sample(tuple(COLOURS), random.randint(1, MOST_SHAPES))
    scene = random_scene(random, split, [(colour, _any_kind(random)) for colour in colours])
    chosen, way = random.choice(scene.shapes), random.random()
    answer = _kind(language, chosen.kind)
    if way < 0.2:
        question, answer = _is_there(random, language, scene)
    elif way < 0.45 and (cell := _cell_alone(scene, chosen)):
        where = _IN_CELL[cell] if is_en else _CELL_ZH[cell]
        question = random.choice(_SHAPE_AT_EN if is_en else _SHAPE_AT_ZH).format(where=where)
    else:
        name = chosen.colour if is_en else _COLOUR_ZH[chosen.colour]
        question = random.choice(_SHAPE_EN if is_en else _SHAPE_ZH).format(colour=name)
    return Item("shape", language, question, answer, (scene,))


def count(random: Random, split: Split) -> Item:
    """How many there are of a kind, of a colour or in all; none, too."""
    language = _language(random)
    is_en = language == "en"
    way, number = random.random(), random.randint(0, MOST_SHAPES)
    if way < 0.25:
        number = max(1, number)
        scene = random_scene(random, split, _things(random, number))
        thing, things = _ANY_ZH, _ANY_EN[1]
    elif way < 0.8:
        kind = _any_kind(random)
        others = [other for other in KINDS if other != kind]
        wanted = [(_colour(random), kind) for _ in range(number)]
        wanted += [(_colour(random), random.choice(others)) for _ in range(_rest(random, number))]
        scene = random_scene(random, split, _shuffled(random, wanted))
        thing, things = _KIND_ZH[kind], _plural(kind)
    else:
        name = _colour(random)
        rest = [other for other in COLOURS if other != name]
        wanted = [(name, _any_kind(random)) for _ in range(number)]
        wanted += [(random.choice(rest), _any_kind(random)) for _ in range(_rest(random, number))]
        scene = random_scene(random, split, _shuffled(random, wanted))
        thing, things = f"{_COLOUR_ZH[name]}的图形", f"{name} shapes"
    question = random.choice(_COUNT_EN if is_en else _COUNT_ZH).format(thing=thing, things=things)
    return Item("count", language, question, str(number), (scene,))


def position(random: Random, split: Split) -> Item:
    """In which ninth of the picture the one shape of its kind, or of its colour and kind, is."""
    language = _language(random)
    is_en = language == "en"
    while True:
        scene = random_scene(random, split, _things(random, random.randint(1, MOST_SHAPES)))
        asked = [(shape, cell) for shape in scene.shapes if (cell := scene.cell(shape)) and _is_alone(scene, shape)]
        if asked:
            break
    chosen, cell = random.choice(asked)
    has_other = any(other.kind == chosen.kind for other in scene.shapes if other is not chosen)
    thing = _thing(language, chosen) if has_other or random.random() < 0.6 else _kind(language, chosen.kind)
    question = random.choice(_WHERE_EN if is_en else _WHERE_ZH).format(thing=thing)
    return Item("position", language, question, cell if is_en else _CELL_ZH[cell], (scene,))


def describe(random: Random, split: Split) -> Item:
    """Every shape with its colour from left to right, or what is printed."""
    language = _language(random)
    is_en = language == "en"
    question = random.choice(_DESCRIBE_EN if is_en else _DESCRIBE_ZH)
    if random.random() < 0.15:
        printed = random_print(random, random_text(random, split))
        what = f'the text "{printed.text}"' if is_en else f"文字“{printed.text}”"
        return Item("describe", language, question, what, (printed,), spelled=printed.text)
    while True:
        scene = random_scene(random, split, _things(random, random.randint(1, MOST_SHAPES)))
        ordered = sorted(scene.shapes, key=lambda shape: shape.x)
        if all(b.x - a.x > 0.06 * scene.width for a, b in pairwise(ordered)):
            break
    things = [
        f"{_article(shape)} {_thing('en', shape)}" if is_en else f"一个{_thing('zh', shape)}" for shape in ordered
    ]
    comma, joint = (", ", " and ") if is_en else ("、", "和")
    answer = comma.join(things[:-1]) + joint + things[-1] if len(things) > 1 else things[0]
    return Item("describe", language, question, answer, (scene,))


def read(random: Random, split: Split) -> Item:
    """A word or a number, as it is printed."""
    language, text = _language(random), random_text(random, split)
    what = "number" if text.isdigit() else "word"
    question = random.choice(_READ_EN if language == "en" else _READ_ZH).format(what=what)
    return Item("read", language, question, text, (random_print(random, text),), spelled=text)


def compare(random: Random, split: Split) -> Item:
    """Which of two pictures has more of a kind, or whether both have the same colour or shape."""
    language = _language(random)
    is_en = language == "en"
    if random.random() < 0.65:
        kind = _any_kind(random) if random.random() < 0.75 else None
        counts = [random.randint(0 if kind else 1, MOST_SHAPES) for _ in range(2)]
        if random.random() < 0.2:
            counts[1] = counts[0]
        wanted = [_with_count(random, kind, number) for number in counts]
        scenes = tuple(random_scene(random, split, things, _COMPARED_SIDE) for things in wanted)
        thing, things = (_KIND_ZH[kind], _plural(kind)) if kind else (_ANY_ZH, _ANY_EN[1])
        question = random.choice(_MORE_EN if is_en else _MORE_ZH).format(thing=thing, things=things)
        order = (counts[0] < counts[1]) - (counts[0] > counts[1])
        answers = ("the first", "both the same", "the second") if is_en else ("第一张", "一样多", "第二张")
        return Item("compare", language, question, answers[order + 1], scenes)
    first = (_colour(random), _any_kind(random))
    is_of_colour, is_same = random.random() < 0.5, random.random() < 0.5
    while True:
        second = (_colour(random), _any_kind(random))
        if (second[0] == first[0] if is_of_colour else second[1] == first[1]) is is_same:
            break
    what = ("color" if is_of_colour else "shape") if is_en else ("颜色" if is_of_colour else "形状")
    question = random.choice(_SAME_EN if is_en else _SAME_ZH).format(what=what)
    scenes = tuple(random_scene(random, split, [thing], _COMPARED_SIDE) for thing in (first, second))
    return Item("compare", language, question, _yes(language, is_same), scenes)


PICTURE_TASKS: dict[str, Maker] = {
    "colour": colour,
    "shape": shape,
    "count": count,
    "position": position,
    "describe": describe,
    "read": read,
    "compare": compare,
}


def _language(random: Random) -> str:
    return "zh" if random.random() < CHINESE_SHARE else "en"


def _colour(random: Random) -> str:
    return random.choice(tuple(COLOURS))


def _any_kind(random: Random) -> str:
    return random.choice(KINDS)


def _things(random: Random, number: int) -> list[tuple[str, str]]:
    """(colour, kind) of each, often several of a kind."""
    kinds = random.sample(KINDS, random.choice((1, 2, 4)))
    return [(_colour(random), random.choice(kinds)) for _ in range(number)]


def _rest(random: Random, number: int) -> int:
    """How many others to put beside `number` shapes, so that there is at least one in all."""
    return random.randint(0 if number else 1, MOST_SHAPES - number) if number < MOST_SHAPES else 0


def _with_count(random: Random, kind: str | None, number: int) -> list[tuple[str, str]]:
    if kind is None:
        return _things(random, number)
    others = [other for other in KINDS if other != kind]
    wanted = [(_colour(random), kind) for _ in range(number)]
    wanted += [(_colour(random), random.choice(others)) for _ in range(_rest(random, number))]
    return _shuffled(random, wanted)


def _shuffled(random: Random, wanted: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return random.sample(wanted, len(wanted))


def _is_there(random: Random, language: str, scene: Scene) -> tuple[str, str]:
    """Whether there is a colour with a kind: half the time yes, else often one of the two."""
    there = {(shape.colour, shape.kind) for shape in scene.shapes}
    is_yes = random.random() < 0.5
    asked = random.choice(scene.shapes)
    colour, kind = asked.colour, asked.kind
    while not is_yes and (colour, kind) in there:
        change = random.random()
        colour = _colour(random) if change < 0.6 else colour
        kind = _any_kind(random) if change > 0.4 else kind
    thing = f"{colour} {kind}" if language == "en" else f"{_COLOUR_ZH[colour]}的{_KIND_ZH[kind]}"
    forms: Sequence[str] = _IS_THERE_EN if language == "en" else _IS_THERE_ZH
    question = random.choice(forms).format(thing=thing)
    return question.replace(" a orange", " an orange"), _yes(language, is_yes)


def _yes(language: str, is_yes: bool) -> str:
    if language == "en":
        return "yes" if is_yes else "no"
    return "是" if is_yes else "否"


def _none(language: str, kind: str) -> str:
    return f"There is no {kind}." if language == "en" else f"没有{_KIND_ZH[kind]}。"


def _kind(language: str, kind: str) -> str:
    return kind if language == "en" else _KIND_ZH[kind]


def _plural(kind: str) -> str:
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"


def _thing(language: str, shape: Shape) -> str:
    if language == "en":
        return f"{shape.colour} {shape.kind}"
    return f"{_COLOUR_ZH[shape.colour]}的{_KIND_ZH[shape.kind]}"


def _article(shape: Shape) -> str:
    return "an" if shape.colour == "orange" else "a"


def _is_alone(scene: Scene, shape: Shape) -> bool:
    """Whether colour and kind name one shape."""
    return sum((other.colour, other.kind) == (shape.colour, shape.kind) for other in scene.shapes) == 1


def _cell_alone(scene: Scene, shape: Shape) -> str | None:
    """The cell of a shape that is clearly in it and has it to itself."""
    cell = scene.cell(shape)
    others = [scene.nearest_cell(other) for other in scene.shapes if other is not shape]
    return None if cell is None or cell in others else cell
