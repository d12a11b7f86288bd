"""How many held-out items a trained model answers, by task: through transformers in float32 and through kestrel-cuda.

An answer counts when its text is exactly the wanted one. Every way is asked the same items with the same prompts and
pixels, so that differences are paired: the table ends with how many items one way answers and the other does not.
Prints a table to standard error and one JSON object to standard output. transformers (which needs PyTorch, neither of
which this project installs) is left out with --no-transformers; kestrel-cuda's `none` is float32 too.

    PYTHONPATH=. python scripts/measure_tiny_model.py CHECKPOINT --items 2000 --quants none q8_0 q4_0
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kestrel_cuda.backends import open_backend
from kestrel_cuda.checkpoint.processor_json import read_image_processor
from kestrel_cuda.config import EngineConfig, Quant
from kestrel_cuda.engine import Engine
from kestrel_cuda.inputs.image_size import image_size
from kestrel_cuda.inputs.pictures import Picture
from kestrel_cuda.inputs.visuals import OpenedPicture
from scripts import arguments as kinds
from scripts.tiny_model.items import Item
from scripts.tiny_model.network import missing_packages
from scripts.tiny_model.split import Split
from scripts.tiny_model.stream import TASKS, item

SEED = 20_000
MOST_NEW_TOKENS = 64
_ROWS_A_BATCH = 128
TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Question:
    """An item as the models get it: prompt ids, and pictures opened by the product."""

    item: Item
    ids: list[int]
    pictures: tuple[OpenedPicture, ...]


def questions(engine: Engine, num_items: int) -> list[Question]:
    """The same held-out items each time, as many of each task as of any other."""
    rules = read_image_processor(engine.config.model)
    tasks, asked = list(TASKS), []
    for index in range(num_items):
        one = item(SEED, Split.HELD_OUT, index // len(tasks), tasks[index % len(tasks)])
        pictures = []
        for number, picture in enumerate(one.pictures):
            name, rgb = f"picture {number} of item {index}", picture.draw()
            size = image_size(rgb.height, rgb.width, rules)
            pictures.append(OpenedPicture(name, Picture(name, rgb), rules, size, limited_alone=False))
        content: list[dict[str, str]] = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": one.question}]
        ids = engine.encode_chat([{"role": "user", "content": content}], pictures)
        asked.append(Question(one, ids, tuple(pictures)))
    return asked


def ask_kestrel(path: Path, backend: str, quant: Quant, asked: Sequence[Question]) -> list[str]:
    """Answers of this program, one item at a time."""
    engine = Engine.open(EngineConfig(model=path, backend=backend, quant=quant, keep_tower=True))  # type: ignore[arg-type]
    engine.load(max(len(question.ids) for question in asked) + MOST_NEW_TOKENS)
    answers = []
    for question in asked:
        encoded = engine.encode_opened(question.pictures) if question.pictures else None
        answers.append("".join(token.text for token in engine.generate(question.ids, MOST_NEW_TOKENS, encoded=encoded)))
        if encoded is not None:
            encoded.free()
    engine.close()
    return answers


def ask_transformers(path: Path, asked: Sequence[Question], engine: Engine) -> list[str]:
    """Greedy answers of transformers in float32 with TF32 off, many items at a time, padded on the left."""
    import inspect

    import torch
    from transformers import Qwen3VLForConditionalGeneration

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    model = model.to(device).eval()
    image_id, pad_id = engine.checkpoint.config.image_token_id, engine.end_ids[-1]
    answers: list[str] = []
    for begin in range(0, len(asked), _ROWS_A_BATCH):
        part = asked[begin : begin + _ROWS_A_BATCH]
        longest = max(len(question.ids) for question in part)
        ids = torch.full((len(part), longest), pad_id)
        mask = torch.zeros_like(ids)
        for row, question in enumerate(part):
            ids[row, longest - len(question.ids) :] = torch.tensor(question.ids)
            mask[row, longest - len(question.ids) :] = 1
        inputs: dict[str, Any] = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        pictures = [picture for question in part for picture in question.pictures]
        if pictures:
            pixels_mk = np.concatenate([picture.pixels().values_mk() for picture in pictures])
            inputs["pixel_values"] = torch.from_numpy(pixels_mk).to(device)
            inputs["image_grid_thw"] = torch.tensor([picture.size.grid_thw for picture in pictures], device=device)
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == image_id).int()
        with torch.no_grad():
            written = model.generate(**inputs, do_sample=False, max_new_tokens=MOST_NEW_TOKENS)[:, longest:]
        answers += [engine.tokenizer.decode(row) for row in written.tolist()]
    del model
    return answers


def summary(asked: Sequence[Question], answers: dict[str, list[str]]) -> dict[str, Any]:
    """Shares of right answers by task and way, and, against the first way, items gained, lost and answered alike."""
    right = {
        way: [answer == question.item.answer for answer, question in zip(given, asked, strict=True)]
        for way, given in answers.items()
    }
    groups = {task: [i for i, question in enumerate(asked) if question.item.task == task] for task in TASKS}
    groups["pictures"] = [i for i, question in enumerate(asked) if question.pictures]
    groups["pictures, Chinese"] = [i for i in groups["pictures"] if asked[i].item.language == "zh"]
    groups["all"] = list(range(len(asked)))
    rows = [
        {"task": name, "items": len(members)}
        | {way: round(sum(flags[i] for i in members) / len(members), 4) for way, flags in right.items()}
        for name, members in groups.items()
        if members
    ]
    first = next(iter(right))
    paired = {
        way: {
            "gained": sum(b and not a for a, b in zip(right[first], flags, strict=True)),
            "lost": sum(a and not b for a, b in zip(right[first], flags, strict=True)),
            "same_text": sum(a == b for a, b in zip(answers[first], answers[way], strict=True)),
        }
        for way, flags in right.items()
        if way != first
    }
    return {"items": len(asked), "accuracy": rows, f"paired with {first}": paired}


def table(found: dict[str, Any]) -> str:
    """The accuracies as a Markdown table, in percent."""
    rows = found["accuracy"]
    ways = [name for name in rows[0] if name not in ("task", "items")]
    lines = [f"| task | items | {' | '.join(ways)} |", "|---|---|" + "---|" * len(ways)]
    lines += [
        f"| {r['task']} | {r['items']} | " + " | ".join(f"{100 * r[way]:.1f}" for way in ways) + " |" for r in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = kinds.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="its folder")
    parser.add_argument("--items", type=kinds.whole(1), default=2080, help="how many, of all tasks alike")
    parser.add_argument(
        "--quants",
        nargs="+",
        type=kinds.quant,
        default=[Quant.NONE, Quant.Q8_0, Quant.Q4_0],
        help=f"of kestrel-cuda: {', '.join(Quant)}",
    )
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto", help="of kestrel-cuda")
    parser.add_argument("--no-transformers", action="store_true", help="ask kestrel-cuda alone")
    parser.add_argument(
        "--wrong", type=kinds.out_file, help="file for the items that the first way gets wrong, JSON lines"
    )
    arguments = parser.parse_args()
    twice = next((quant for quant in arguments.quants if arguments.quants.count(quant) > 1), None)
    if twice:
        parser.error(f"--quants names {twice} {arguments.quants.count(twice)} times; name each once")
    absent = None if arguments.no_transformers else missing_packages()
    if absent:
        print(f"{absent} is not installed; give --no-transformers to measure kestrel-cuda alone", file=sys.stderr)
        return 2
    return kinds.finish(measure, arguments)


def measure(arguments: argparse.Namespace) -> int:
    """Ask, and print what was found. Raises KestrelError where nothing can be measured."""
    engine = Engine.open(EngineConfig(model=arguments.checkpoint, backend=arguments.backend))
    if arguments.backend == "cuda":
        open_backend("cuda")  # before transformers spends an hour
    asked = questions(engine, arguments.items)
    answers: dict[str, list[str]] = {}
    seconds: dict[str, float] = {}
    for way in (*([] if arguments.no_transformers else [TRANSFORMERS]), *arguments.quants):
        started = time.monotonic()
        if way == TRANSFORMERS:
            answers[way] = ask_transformers(arguments.checkpoint, asked, engine)
        else:
            answers[way] = ask_kestrel(arguments.checkpoint, arguments.backend, way, asked)
        seconds[way] = round(time.monotonic() - started, 1)
    found = summary(asked, answers) | {"seconds": seconds}
    print(table(found), file=sys.stderr)
    print(json.dumps(found))
    if arguments.wrong:
        given = next(iter(answers.values()))
        wrong = [
            {"task": q.item.task, "question": q.item.question, "wanted": q.item.answer, "given": answer}
            for q, answer in zip(asked, given, strict=True)
            if answer != q.item.answer
        ]
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in wrong]
        arguments.wrong.write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
