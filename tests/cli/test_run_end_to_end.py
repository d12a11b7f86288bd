"""`run` with the real engine, the embedded checkpoint and the CPU backend."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel_cli import program
from kestrel_cli.prompt import BUILT_IN_QUESTION

ROOT = Path(__file__).resolve().parents[2]
TINY_28L = ROOT / "tests/data/oracle/checkpoints/tiny-28L"
N = 8
LAYER_WEIGHTS = 256 * 128 + 128 * 128 + 768 * 128 + 128 * 384
LAYER_BYTES = {"q8_0": LAYER_WEIGHTS * 34 // 32, "q4_0": LAYER_WEIGHTS * 18 // 32}
"""Of the embedded checkpoint: the joint projection, o, gate and up, down; codes, and a half for each 32."""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run` on the CPU; exit code, standard output, standard error. Keyword arguments are variables."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))

    def call(*arguments: str, **variables: str) -> tuple[int, str, str]:
        capsys.readouterr()
        exit_code = program.execute(["run", *arguments], {"VLLM_CUDA_INFER": "0", **variables})
        return (int(exit_code), *capsys.readouterr())

    return call


@pytest.fixture
def ask(run: Run) -> Callable[..., dict[str, Any]]:
    """The object of `run --json`, which must succeed."""

    def call(*arguments: str, **variables: str) -> dict[str, Any]:
        exit_code, out, err = run("--json", "-n", str(N), *arguments, **variables)
        assert exit_code == 0, err
        result = json.loads(out)
        assert isinstance(result, dict)
        return result

    return call


Ask = Callable[..., dict[str, Any]]


def test_the_first_command_anyone_types_answers(run: Run) -> None:
    exit_code, out, err = run("--keep", "4")
    assert exit_code == 0
    answer, token_ids = out.splitlines()
    assert answer == "The layers that stay on the GPU, a bounded number; the others are uploaded when they are needed."
    assert token_ids.startswith("TOKIDS: ")
    assert BUILT_IN_QUESTION in err
    assert "window of 4 of 12 layers" in err


def test_text_and_json_say_the_same(run: Run, ask: Ask) -> None:
    _, out, _ = run("hi", "-n", str(N))
    text, token_ids = out.removesuffix("\n").rsplit("\n", 1)
    result = ask("hi")
    assert [int(word) for word in token_ids.removeprefix("TOKIDS:").split()] == result["ids"]
    assert text == result["text"].removesuffix("\n")
    assert result["n_prompt"] == len(result["prompt_ids"])
    assert result["backend"] == "cpu"
    assert result["settings"]["backend"] == {"value": "cpu", "source": "VLLM_CUDA_INFER"}
    assert len(result["timing"]["decode_ms"]) == len(result["ids"]) - 1


@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
def test_no_window_changes_the_answer(ask: Ask, quant: str) -> None:
    """Case D37, with the keeps of case D38."""
    whole = ask("hi", "--quant", quant, "--keep", "off")
    assert whole["keep"] == "off"
    for keep in ("1", "4", "11", "12", "99"):
        windowed = ask("hi", "--quant", quant, VLLM_CUDA_STREAM=keep)
        assert windowed["ids"] == whole["ids"]
        assert windowed["logits_sha256"] == whole["logits_sha256"]
        kept = min(int(keep), 12)
        assert windowed["residency"]["layers_resident_end"] == kept
        assert windowed["residency"]["uploads_per_token"] == 12 - kept
        assert windowed["residency"]["h2d_bytes_per_token"] == (12 - kept) * LAYER_BYTES[quant]
        idle = f"VLLM_CUDA_STREAM {keep} keeps all 12 layers, and a copy of them in host memory"
        assert any(note.startswith(idle) for note in windowed["notes"]) is (kept == 12)


def test_an_int8_cache_is_asked_for_in_every_way(ask: Ask, tmp_path: Path) -> None:
    """And takes 34 bytes of a float16 cache's 64: 12 layers, two kv heads of 32 channels, keys and values."""
    ctx = 2000
    halves, flag = ask("hi", "-c", str(ctx)), ask("hi", "-c", str(ctx), "--kv", "q8", "--keep", "off")
    saved = halves["residency"]["peak_device_bytes"] - flag["residency"]["peak_device_bytes"]
    assert saved == 12 * 2 * ctx * 2 * (64 - 34)
    assert [(run["kv"], run["kv_bytes_per_slot"]) for run in (halves, flag)] == [
        ("f16", 12 * 2 * 2 * 64),
        ("q8", 12 * 2 * 2 * 34),
    ]
    assert flag["logits_sha256"] != halves["logits_sha256"]
    (tmp_path / "p.toml").write_text('kv = "q8"\n', encoding="utf-8")
    variable = ask("hi", "-c", str(ctx), "--keep", "1", KESTREL_CUDA_KV="q8")
    profile = ask("hi", "-c", str(ctx), "--profile", str(tmp_path / "p.toml"))
    assert flag["logits_sha256"] == variable["logits_sha256"] == profile["logits_sha256"]
    assert [run["settings"]["kv"]["value"] for run in (flag, variable, profile)] == ["q8"] * 3


def test_a_lazy_upload_changes_no_answer(ask: Ask) -> None:
    lazy, ready = ask("hi", "--lazy"), ask("hi")
    assert lazy["logits_sha256"] == ready["logits_sha256"]
    assert lazy["residency"]["h2d_bytes_per_token"] == ready["residency"]["h2d_bytes_per_token"] == 0


def test_a_flag_beats_a_variable_that_holds_nonsense(ask: Ask) -> None:
    settings = ask("hi", "--keep", "2", VLLM_CUDA_STREAM="abc")["settings"]
    assert settings["keep"] == {"value": 2, "source": "flag"}


def test_prompts_given_in_different_ways_are_one_prompt(ask: Ask, tmp_path: Path) -> None:
    asked = ask("hé 👍")
    (tmp_path / "p.txt").write_bytes("\ufeffhé 👍\r\n".encode())
    (tmp_path / "m.json").write_text(json.dumps([{"role": "user", "content": "hé 👍"}]), encoding="utf-8")
    same = [
        ask("--prompt-file", str(tmp_path / "p.txt")),
        ask("--messages", str(tmp_path / "m.json")),
        ask("--ids", ",".join(map(str, asked["prompt_ids"]))),
    ]
    for other in same:
        assert other["prompt_ids"] == asked["prompt_ids"]
        assert other["ids"] == asked["ids"]


def test_an_empty_prompt_asks_through_the_template_only(run: Run, ask: Ask) -> None:
    """Case D34."""
    assert ask("")["n_prompt"] > 0
    assert ask(" ")["n_prompt"] > 0
    exit_code, out, err = run("--raw", "", "--quiet")
    assert (exit_code, out) == (2, "")
    assert err == "kestrel-cuda: the prompt is empty; --raw needs at least one character\n"


def test_saved_logits_chose_the_ids(ask: Ask, tmp_path: Path) -> None:
    result = ask("hi", "--logits", str(tmp_path / "l.npz"))
    with np.load(tmp_path / "l.npz") as saved:
        steps, prompt = saved["step_logits"], saved["prompt_logits"]
    assert steps.dtype == prompt.dtype == np.float32
    assert len(prompt) == result["n_prompt"]
    assert steps.argmax(axis=1).tolist() == result["ids"]
    assert prompt[-1].argmax() == result["ids"][0]


def test_an_answer_can_be_expected(run: Run, ask: Ask) -> None:
    ids = ask("hi")["ids"]
    assert run("hi", "-n", str(N), "--expect", ",".join(map(str, ids)))[0] == 0
    ids[2] += 1
    exit_code, _, err = run("hi", "-n", str(N), "--expect", ",".join(map(str, ids)))
    assert exit_code == 1
    assert f"first divergence at step 2: expected {ids[2]}, chose {ids[2] - 1}" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ids", "1,999999"), "token id 999999 is outside the vocabulary"),
        (("hi", "-m", "/no/such/model"), "/no/such/model"),
        (("hi", "-m", "/etc/hostname"), "/etc/hostname"),
        (("hi", "-c", "5"), "and --ctx holds 5; needed: --ctx "),
        (("hi", "-c", "100000000"), "positions this model has"),
        (("hi", "--vram", "1KiB"), "--vram"),
        (
            ("hi", "-m", str(TINY_28L), "--kv", "q8"),
            "--kv q8 needs a head_dim that divides by 32, and this checkpoint has 16; use --kv f16",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    exit_code, out, err = run(*arguments, "--quiet")
    assert (exit_code, out) == (2, "")
    assert message in err
    assert err.startswith("kestrel-cuda: ")
    assert err.count("\n") == 1

    exit_code, out, _ = run(*arguments, "--json")
    assert exit_code == 2
    assert set(json.loads(out)) == {"error"}


@pytest.mark.parametrize("keep", ["off", "1"], ids=["resident", "in the middle of copies"])
@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_an_interrupted_answer_keeps_what_it_has(backend: str, keep: str) -> None:
    """With a window a copy is under way at nearly every moment."""
    arguments = ["hi", "--ignore-eos", "-n", "3000", "--backend", backend, "--keep", keep]
    process = subprocess.Popen(
        [sys.executable, "-m", "kestrel_cuda", "run", *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    last = out.decode(errors="replace").splitlines()[-1]
    assert last.startswith("TOKIDS: ")
    assert 1 < len(last.split()) < 3000
    assert b"ended by interrupt" in err
    assert b"Traceback" not in err
