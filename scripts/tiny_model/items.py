"""One question with its pictures and its answer, and the endless row of them that a seed stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from scripts.tiny_model.scenes import Scene
from scripts.tiny_model.split import Split
from scripts.tiny_model.words import Printed


@dataclass(frozen=True)
class Item:
    """`spelled` is a text that the answer spells out, `content` what decides the split of a question without picture.

    Pictures come before the question, in their order.
    """

    task: str
    language: str
    question: str
    answer: str
    pictures: tuple[Scene | Printed, ...] = ()
    spelled: str = ""
    content: object = None


Maker = Callable[[Random, Split], Item]
