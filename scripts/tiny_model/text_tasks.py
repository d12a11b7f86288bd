"""Questions without a picture: about the model itself, about `--keep`, sums, spelling, and what it cannot know."""

from __future__ import annotations

import tomllib
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from scripts.tiny_model.items import Item, Maker
from scripts.tiny_model.split import Split, draw_until
from scripts.tiny_model.words import random_word


class Fact(NamedTuple):
    """One answer, and the ways to ask for it."""

    answer: str
    questions: tuple[str, ...]
    language: str


def _read_facts(content: list[dict[str, Any]]) -> tuple[Fact, ...]:
    return tuple(Fact(fact["answer"], tuple(fact["questions"]), fact.get("language", "en")) for fact in content)


_TEXTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("questions.toml").read_text(encoding="utf-8"))
SELF_FACTS, KEEP_FACTS = _read_facts(_TEXTS["self"]), _read_facts(_TEXTS["keep"])
UNKNOWN = {"en": "I do not know that.", "zh": "我不知道。"}
NO_PICTURE = {"en": "I see no picture. Give me one with --image.", "zh": "我没有看到图片。请用 --image 给我一张。"}
_KEEP_N = (
    "What does --keep {n} do?",
    "What does --keep {n} mean?",
    "What happens with --keep {n}?",
    "Explain --keep {n}.",
)
_SUM = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b} = ?",
    "{a}+{b}=",
    "How much is {a} + {b}?",
    "Add {a} and {b}.",
    "Compute {a} + {b}.",
    "What is the sum of {a} and {b}?",
    "{a} + {b}",
    "{a}加{b}等于几？",
    "{a} + {b} 等于多少？",
)
_ECHO = (
    'Say "{word}".',
    'Repeat "{word}".',
    'Echo "{word}".',
    "Repeat after me: {word}",
    "Say {word}",
    "Echo: {word}",
    'Write the word "{word}".',
    "请重复：{word}",
)
_REVERSE = (
    'Reverse "{word}".',
    'Reverse the word "{word}".',
    "Reverse: {word}",
    'Spell "{word}" backwards.',
    "What is {word} backwards?",
    'Write "{word}" backwards.',
    "Write {word} in reverse.",
    "把 {word} 倒过来写。",
)


def about_itself(random: Random, split: Split) -> Item:
    """One of SELF_FACTS; the held-out ones are asked in words that training has not."""
    return _fact("self", random, split, SELF_FACTS)


def about_keep(random: Random, split: Split) -> Item:
    """One of KEEP_FACTS, or what `--keep` with a number does."""
    if random.random() < 0.75:
        return _fact("keep", random, split, KEEP_FACTS)
    form, number = draw_until(split, lambda: (random.choice(_KEEP_N), random.randint(1, 64)))
    layers = "1 layer" if number == 1 else f"{number} layers"
    answer = f"It keeps {layers} on the GPU; the others are uploaded for each token."
    return Item("keep", "en", form.format(n=number), answer, content=(form, number))


def add(random: Random, split: Split) -> Item:
    """The sum of two numbers below 100, half of them at most 20."""
    most = random.choice((20, 99))
    a, b = draw_until(split, lambda: (random.randint(0, most), random.randint(0, most)))
    form = random.choice(_SUM)
    return Item("sum", _language_of(form), form.format(a=a, b=b), str(a + b), content=(a, b))


def echo(random: Random, split: Split) -> Item:
    """A word as it is."""
    word, form = random_word(random, split), random.choice(_ECHO)
    return Item("echo", _language_of(form), form.format(word=word), word, spelled=word, content=word)


def reverse(random: Random, split: Split) -> Item:
    """A word from its end to its start."""
    word, form = random_word(random, split), random.choice(_REVERSE)
    return Item("reverse", _language_of(form), form.format(word=word), word[::-1], spelled=word, content=word)


def beyond(random: Random, split: Split) -> Item:
    """What it cannot know, and questions about a picture that is not there."""
    way, language = random.random(), "zh" if random.random() < 0.25 else "en"
    questions = _TEXTS["beyond"][language]
    answer = UNKNOWN[language]
    if way < 0.25:
        questions, answer = _TEXTS["blind"][language], NO_PICTURE[language]

    def draw() -> tuple[str, str]:
        if way > 0.6 and language == "en":
            question = random.choice(_TEXTS["beyond"]["about"]).format(topic=random.choice(_TEXTS["beyond"]["topics"]))
        else:
            question = random.choice(questions)
        return random.choice(_TEXTS["before"][language]), question

    before, question = draw_until(split, draw)
    return Item("unknown", language, before + question, answer, content=(before, question))


TEXT_TASKS: dict[str, Maker] = {
    "self": about_itself,
    "keep": about_keep,
    "sum": add,
    "echo": echo,
    "reverse": reverse,
    "unknown": beyond,
}


def _fact(task: str, random: Random, split: Split, facts: tuple[Fact, ...]) -> Item:
    """A fact asked for in some words; the words before the question, its case and its sign belong to them."""

    def draw() -> tuple[Fact, str]:
        fact = random.choice(facts)
        question = random.choice(_TEXTS["before"][fact.language]) + random.choice(fact.questions)
        if random.random() < 0.25:
            question = question.rstrip(".?!？。！")
        if random.random() < 0.15:
            question = question.lower()
        return fact, question

    fact, question = draw_until(split, draw, lambda drawn: (drawn[0].answer, drawn[1]))
    return Item(task, fact.language, question, fact.answer, content=(fact.answer, question))


def _language_of(form: str) -> str:
    return "en" if form.isascii() else "zh"
