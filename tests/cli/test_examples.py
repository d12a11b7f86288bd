"""The embedded model answers README's questions about README's pictures, whatever the window and the quantization."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kestrel_cli import options
from kestrel_cuda.bench import default_keeps
from scripts.make_example_pictures import EXAMPLES
from tests.cli.visual_runs import Run

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "examples"
ASKED = [
    (["three-circles"], "How many circles are there?", "3"),
    (["three-circles"], "橙色的是什么形状？", "正方形"),
    (["three-circles"], "Where is the blue circle?", "bottom"),
    (["shapes"], "What do you see?", "a purple star, a yellow ring and a green triangle"),
    (["shapes"], "图中有什么？", "一个紫色的星形、一个黄色的圆环和一个绿色的三角形"),
    (["one-circle", "two-circles"], "Which one has more circles?", "the second"),
    (["word"], "What does it say?", "hawk"),
    (["word"], "图中写的是什么？", "hawk"),
    ([], "What is 17 + 25?", "42"),
    ([], "What is the capital of France?", "I do not know that."),
    (
        [],
        "Does --keep change the answer?",
        "No. The answer is the same for every window; only the speed and the memory change.",
    ),
]


@pytest.mark.parametrize(("names", "question", "answer"), ASKED, ids=[question for _, question, _ in ASKED])
def test_what_the_embedded_model_answers(real_run: Run, names: list[str], question: str, answer: str) -> None:
    pictures = [word for name in names for word in ("--image", FOLDER / f"{name}.png")]
    first, *others = (
        real_run(*pictures, question, *more)
        for more in ((), ("--keep", "1"), ("--keep", "5", "--prefill-chunk", "7"), ("--keep", "2", "--prefetch", "0"))
    )
    assert first[0] == 0
    assert first[1].splitlines()[0] == answer
    assert [(code, out) for code, out, _ in others] == [first[:2]] * 3
    assert json.loads(real_run(*pictures, question, "--quant", "none", "--json")[1])["text"] == answer


@pytest.mark.parametrize("quant", ["q8_0", "q4_0", "none"])
def test_every_window_of_a_sweep_sees_the_same_picture(real_run: Run, quant: str) -> None:
    """The windows that `bench --sweep-keep` lays, with ids that say what is there: equal to the bit."""
    answers = []
    for keep in default_keeps(12):
        words = ("--image", FOLDER / "shapes.png", "What do you see?", "--keep", keep or "off", "--quant", quant)
        result = json.loads(real_run(*words, "--json")[1])
        assert result["keep"] == (keep or "off")
        answers.append((result["text"], result["ids"], result["logits_sha256"]))
    assert answers[0][0] == "a purple star, a yellow ring and a green triangle"
    assert answers == answers[:1] * 8


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_pictures_are_those_of_their_script(name: str) -> None:
    """But for what releases of Pillow draw differently."""
    kept = np.asarray(Image.open(FOLDER / f"{name}.png")).astype(int)
    drawn = np.asarray(EXAMPLES[name].draw()).astype(int)
    assert kept.shape == drawn.shape
    assert np.abs(kept - drawn).mean() < 1


def test_every_picture_is_drawn() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(EXAMPLES)


def test_readme_from_python(real_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """README's lines as they are, with the embedded model in the place of the one they name."""
    readme = (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    named = "/models/Qwen3-VL-2B-Instruct"
    assert code.count(named) == 1
    exec(compile(code.replace(named, str(options.MODEL.default)), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed
    assert printed == json.loads(real_run("Why do kestrels hover?", "--json")[1])["text"]
