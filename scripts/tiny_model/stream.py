"""The endless row of items that a seed stands for: item i is the same whoever asks for it, in whatever order."""

from __future__ import annotations

from random import Random

from scripts.tiny_model.items import Item, Maker
from scripts.tiny_model.picture_tasks import PICTURE_TASKS
from scripts.tiny_model.split import ExhaustedError, Split
from scripts.tiny_model.text_tasks import TEXT_TASKS

TASKS: dict[str, Maker] = PICTURE_TASKS | TEXT_TASKS

SHARES = {
    "colour": 5,
    "shape": 7,
    "count": 12,
    "position": 7,
    "describe": 15,
    "read": 36,
    "compare": 12,
    "self": 1,
    "keep": 1,
    "sum": 3,
    "echo": 2,
    "reverse": 3,
    "unknown": 1,
}
"""How often each task comes; what is hard to learn comes more often."""


def item(seed: int, split: Split, index: int, task: str | None = None) -> Item:
    """Item `index` of the row, of `task` if one is given."""
    random = Random(f"{seed}/{split}/{index}/{task}")
    while True:
        name = task or random.choices(list(SHARES), list(SHARES.values()))[0]
        try:
            return TASKS[name](random, split)
        except ExhaustedError:
            continue
