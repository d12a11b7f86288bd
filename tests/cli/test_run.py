"""The command `run` over a stand-in engine: what is printed where, what is not, and the exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrel_cli.prompt import BUILT_IN_QUESTION
from kestrel_cuda.errors import CheckpointError, DeviceError, InternalError
from tests.cli.conftest import CommandLine
from tests.cli.fake_engine import FakeGeneration

TEXT = "Hello, wörld"
IDS = [10, 11, 12, 99]

JSON_KEYS = {
    *("version", "model", "backend", "device", "prompt_ids", "n_prompt", "ids", "text", "stop_reason", "eos_ids"),
    *("images", "videos", "vision_ms", "rope_delta", "max_position"),
    *("template_source", "tied", "dtypes", "quant", "keep", "settings", "residency", "timing", "logits_sha256"),
    *("kv", "kv_bytes_per_slot"),
    *("bytes_read_per_token", "read_gb_per_s", "device_read_gb_per_s", "read_share"),
    *("notes", "warnings"),
}
RESIDENCY_KEYS = {
    *("weights_resident_end", "layers_resident_end", "prefetched_layers", "peak_layers", "peak_weight_bytes"),
    *("uploads_per_token", "layer_uploads", "h2d_bytes_per_token", "evictions", "cache_hits", "cache_misses"),
    *("pool_hits", "pool_misses", "host_pinned_bytes", "embed_host_bytes", "peak_device_bytes"),
}
TIMING_KEYS = {"load_ms", "prefill_ms", "ttft_ms", "decode_ms", "tpot_ms_median"}


def test_the_answer_and_nothing_else_is_on_standard_output(kestrel: CommandLine) -> None:
    ran = kestrel("run", "hi")
    assert ran.exit_code == 0
    assert ran.out == f"{TEXT}\nTOKIDS: 10 11 12 99\n"
    assert ran.engine is not None
    assert ran.engine.closed
    assert ran.engine.calls["chat"] == [{"role": "user", "content": "hi"}]
    assert ran.engine.calls["ctx"] == 3 + 256
    assert ran.engine.calls["generate"] == ([1, 2, 3], 256, False, "none")


def test_everything_else_is_on_standard_error(kestrel: CommandLine) -> None:
    err = " ".join(kestrel("run", "hi").err.split(" "))
    words = " ".join(err.split())
    for fact in (
        "no GPU here",
        "every layer resident",
        "end ids: 99",
        "keep=auto",
        '"Hello"',
        "(end)",
        "3.50 ms (median), 285.7 tok/s",
        "512.00 KiB of weights a token, 1.5 GB/s, 50 % of the card's 3 GB/s",
        "29 of 29 weights, 4 of 4 layers; at most 4 layers and 1.00 MiB at once",
        "0 layers, 0 B a token",
    ):
        assert fact in words
    assert err.count("warning: a stray file\n") == 1
    assert "warning: a late warning\n" in err
    assert "TOKIDS" not in err
    assert "\x1b" not in err
    assert BUILT_IN_QUESTION not in err


@pytest.mark.parametrize(
    ("backend", "why"),
    [("cpu", ""), ("cuda", "; the card's read rate was not measured (--vram, or under 2 GiB free)")],
)
def test_a_read_rate_that_was_not_measured(kestrel: CommandLine, backend: str, why: str) -> None:
    words = " ".join(kestrel("run", "hi", backend=backend, device_read_gb_per_s=None).err.split())
    assert f"read 512.00 KiB of weights a token, 1.5 GB/s{why} resident" in words
    read = kestrel("run", "hi", "--json", backend=backend, device_read_gb_per_s=None).json
    assert (read["read_gb_per_s"], read["device_read_gb_per_s"], read["read_share"]) == (1.5, None, None)


def test_quiet_leaves_standard_error_empty(kestrel: CommandLine) -> None:
    ran = kestrel("run", "--quiet")
    assert (ran.exit_code, ran.err) == (0, "")
    assert ran.token_ids == IDS


def test_quiet_still_says_what_went_wrong(kestrel: CommandLine) -> None:
    ran = kestrel("run", "--quiet", "-n", "0")
    assert (ran.exit_code, ran.out) == (2, "")
    assert ran.err == "kestrel-cuda: --max-new-tokens holds '0'; it takes a whole number of at least 1\n"


@pytest.mark.parametrize(
    ("pieces", "out"),
    [((), "TOKIDS: 99\n"), (("a\n",), "a\nTOKIDS: 10 99\n"), (("a", "", "b"), "ab\nTOKIDS: 10 11 12 99\n")],
)
def test_token_ids_have_a_line_of_their_own(kestrel: CommandLine, pieces: tuple[str, ...], out: str) -> None:
    assert kestrel("run", "hi", pieces=pieces).out == out


def test_text_held_back_inside_a_character_comes_at_the_end(kestrel: CommandLine) -> None:
    ran = kestrel("run", "hi", "-n", "2", tail="\ufffd")
    assert ran.out == "Hello, \ufffd\nTOKIDS: 10 11\n"


def test_json_is_one_object_with_every_key(kestrel: CommandLine) -> None:
    ran = kestrel("run", "hi", "--json", "--keep", "2", "-n", "3")
    assert ran.exit_code == 0
    assert set(ran.json) == JSON_KEYS
    assert set(ran.json["residency"]) == RESIDENCY_KEYS
    assert set(ran.json["timing"]) == TIMING_KEYS
    assert ran.json["settings"]["keep"] == {"value": 2, "source": "flag"}
    assert ran.json["settings"]["max_new_tokens"] == {"value": 3, "source": "flag"}
    assert ran.json["keep"] == 2
    assert ran.json["prompt_ids"] == [1, 2, 3]
    assert ran.json["n_prompt"] == 3
    assert ran.json["ids"] == IDS[:3]
    assert ran.json["text"] == TEXT
    assert ran.json["stop_reason"] == "length"
    assert len(ran.json["logits_sha256"]) == 64
    assert (ran.json["bytes_read_per_token"], ran.json["read_gb_per_s"]) == (1 << 19, 1.5)
    assert (ran.json["device_read_gb_per_s"], ran.json["read_share"]) == (3.0, 0.5)
    assert ran.json["warnings"] == ["a stray file", "scales rounded to zero: 3", "a late warning"]
    assert ran.engine is not None
    assert ran.engine.calls["generate"][3] == "hash"
    assert "TOKIDS" not in ran.out


def test_json_says_off_where_everything_is_resident(kestrel: CommandLine) -> None:
    assert kestrel("run", "hi", "--json").json["keep"] == "off"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            ("run", "--jsno"),
            "setting",
            "No such option: --jsno (Possible options: --json); see kestrel-cuda run",
        ),
        (("run", "a", "b"), "setting", "unexpected argument 'b'; put a prompt of several words in quotes; see kestrel"),
        (
            ("selftest", "b"),
            "setting",
            "unexpected argument 'b'; selftest takes options only; see kestrel",
        ),
        (("run", "--keep", "1", "--keep", "2"), "setting", "--keep is given 2 times; give it once"),
        (("run", "--lazy", "--no-lazy"), "setting", "--lazy/--no-lazy is given 2 times; give it once"),
        (("run", "-n", "1", "--max-new-tokens=2"), "setting", "--max-new-tokens/-n is given 2 times; give it once"),
        (("walk",), "setting", "No such command 'walk'"),
        ((), "setting", "Missing command; see kestrel-cuda --help"),
        (("run", "-n"), "setting", "Option '-n' requires an argument; see kestrel-cuda run --help"),
        (("run", "--keep", "-1"), "setting", "--keep holds '-1'"),
        (("run", "--profile", "none"), "setting", "no profile 'none'"),
        (("run", "--raw", ""), "input", "the prompt is empty"),
        (("run", "hi", "-c", "3"), "input", "the prompt has 3 tokens and --ctx holds 3; needed: --ctx 4 or more"),
        (("run", "hi", "--logits", "/no/such/folder/l.npz"), "setting", "--logits /no/such/folder/l.npz: cannot be"),
        (("run", "hi", "--logits", os.devnull), "setting", "--logits /dev/null: not a file"),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    kestrel: CommandLine, arguments: tuple[str, ...], kind: str, message: str
) -> None:
    ran = kestrel(*arguments)
    assert (ran.exit_code, ran.out) == (2, "")
    assert ran.err.splitlines()[-1].startswith(f"kestrel-cuda: {message}")
    assert ran.err.count("kestrel-cuda: ") == 1
    assert "Traceback" not in ran.err

    as_json = kestrel(*arguments[:1], "--json", *arguments[1:])
    assert as_json.exit_code == 2
    assert as_json.json["error"]["kind"] == kind
    if arguments:
        assert as_json.json["error"]["message"].startswith(message)
    assert set(as_json.json) == {"error"}


@pytest.mark.parametrize(
    ("failure", "exit_code", "kind", "message"),
    [
        (DeviceError("2 GiB needed, 1 GiB free"), 2, "device", "2 GiB needed, 1 GiB free"),
        (CheckpointError("line one\nline \x1b[31mtwo"), 2, "checkpoint", r"line one; line \x1b[31mtwo"),
        (MemoryError("Out of memory allocating 8 bytes"), 2, "user", "out of memory: Out of memory allocating 8 bytes"),
        (MemoryError(), 2, "user", "out of memory: no more to be had"),
        (PermissionError(13, "Permission denied", "/models/x"), 2, "user", "/models/x: Permission denied"),
        (InternalError("the pool lost a buffer"), 3, "internal", "the pool lost a buffer"),
        (RuntimeError("can't start new thread"), 2, "user", "out of memory or threads: can't start new thread"),
        (
            ImportError("PLEASE READ\n\nOriginal error: libx.so: failed to map segment from shared object\n"),
            2,
            "user",
            "out of memory or threads: Original error: libx.so: failed to map segment from shared object",
        ),
        (IndexError("list index"), 3, "internal", "internal error: IndexError: list index"),
        (AssertionError(), 3, "internal", "internal error: AssertionError"),
    ],
)
@pytest.mark.parametrize("when", ["load", "step"])
def test_every_failure_has_its_exit_code(
    kestrel: CommandLine, failure: BaseException, exit_code: int, kind: str, message: str, when: str
) -> None:
    fields: dict[str, Any] = {"fail_at_load": failure} if when == "load" else {"fail_at_step": 1, "failure": failure}
    ran = kestrel("run", "hi", "--quiet", **fields)
    assert ran.exit_code == exit_code
    assert ran.err == f"kestrel-cuda: {message}\n"
    assert ran.out == ("" if when == "load" else "Hello\nTOKIDS: 10\n"), "what there was of the answer is not lost"
    assert ran.engine is not None
    assert ran.engine.closed

    as_json = kestrel("run", "hi", "--json", **fields)
    assert as_json.exit_code == exit_code
    assert as_json.json["error"] == {"kind": kind, "message": message}
    if when == "load":
        assert as_json.json.keys() == {"error"}
    else:
        assert as_json.json.keys() == {*JSON_KEYS, "error"}
        assert (as_json.json["ids"], as_json.json["stop_reason"]) == ([10], "error")


@pytest.mark.parametrize("failure", [IndexError("x"), DeviceError("x")])
def test_a_failure_that_leaves_nothing_to_report_is_the_one_that_is_told(
    kestrel: CommandLine, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(generation: FakeGeneration) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(FakeGeneration, "report", fail)
    ran = kestrel("run", "hi", "--quiet", fail_at_step=1, failure=failure)
    assert ran.out == "Hello"
    assert "the device is gone" not in ran.err
    assert ran.err.endswith("x\n")


@pytest.mark.parametrize(("failure", "shown"), [(IndexError("x"), True), (DeviceError("x"), False)])
def test_debug_shows_a_traceback_of_our_own_faults_only(
    kestrel: CommandLine, failure: BaseException, shown: bool
) -> None:
    assert ("Traceback" in kestrel("run", "hi", "--debug", fail_at_load=failure).err) is shown
    assert "Traceback" not in kestrel("run", "hi", fail_at_load=failure).err


def test_an_expectation_that_holds_is_silent(kestrel: CommandLine) -> None:
    ran = kestrel("run", "hi", "--expect", "10,11", "--quiet")
    assert (ran.exit_code, ran.err) == (0, "")


@pytest.mark.parametrize(
    ("expect", "message"),
    [
        ("10,7,12", "first divergence at step 1: expected 7, chose 11"),
        ("10,11,12,99,5", "first divergence at step 4: expected 5, the answer had ended"),
    ],
)
def test_an_expectation_names_the_first_divergence(kestrel: CommandLine, expect: str, message: str) -> None:
    ran = kestrel("run", "hi", "--expect", expect)
    assert ran.exit_code == 1
    assert ran.token_ids == IDS
    assert ran.err.splitlines()[-1] == f"kestrel-cuda: {message}"

    as_json = kestrel("run", "hi", "--expect", expect, "--json")
    assert as_json.exit_code == 1
    assert set(as_json.json) == {*JSON_KEYS, "error"}
    assert as_json.json["error"] == {"kind": "check", "message": message}


@pytest.mark.parametrize(
    ("arguments", "call", "value"),
    [
        (("--raw", "hi"), "raw", "hi"),
        (("--ids", "7,8"), "ids", [7, 8]),
        (("--system", "s", "hi"), "chat", [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]),
        (("--", "--raw"), "chat", [{"role": "user", "content": "--raw"}]),
        ((), "chat", [{"role": "user", "content": BUILT_IN_QUESTION}]),
    ],
)
def test_the_prompt_reaches_the_engine(
    kestrel: CommandLine, arguments: tuple[str, ...], call: str, value: object
) -> None:
    ran = kestrel("run", *arguments)
    assert ran.exit_code == 0
    assert ran.engine is not None
    assert ran.engine.calls[call] == value
    assert ("no prompt given" in ran.err) is (arguments == ())


def test_standard_input_is_the_prompt(kestrel: CommandLine, stdin: Callable[[bytes], None]) -> None:
    stdin(b"from a pipe\n")
    ran = kestrel("run")
    assert ran.engine is not None
    assert ran.engine.calls["chat"][0]["content"] == "from a pipe"
    assert BUILT_IN_QUESTION not in ran.err


def test_flags_and_variables_reach_the_engine(kestrel: CommandLine) -> None:
    ran = kestrel(
        "run", "hi", "--ignore-eos", "--lazy", "--quant", "q4_0",
        variables={"VLLM_CUDA_STREAM": "4", "VLLM_CUDA_INFER": "0", "KESTREL_CUDA_MAX_NEW_TOKENS": "2"},
    )  # fmt: skip
    assert ran.engine is not None
    config = ran.engine.config
    assert (config.keep, config.backend, config.quant, config.lazy) == (4, "cpu", "q4_0", True)
    assert ran.engine.calls["generate"][1:3] == (2, True)
    assert "VLLM_CUDA_STREAM: keep=4" in ran.err
    assert "flag: quant=q4_0 lazy=on ignore_eos=on" in ran.err


@pytest.mark.parametrize(("rows", "first", "num"), [("last", 68, 32), ("all", 0, 100), ("none", None, 0)])
def test_the_table_shows_the_last_rows(kestrel: CommandLine, rows: str, first: int | None, num: int) -> None:
    err = kestrel("run", "hi", "-n", "100", "--table", rows, endless=True).err
    steps = [int(line.split("|")[1]) for line in err.splitlines() if line.startswith("| ") and "step" not in line]
    assert steps == (list(range(first, 100)) if first is not None else [])
    assert ("--table all shows every one" in err) is (rows == "last")


def test_the_text_of_a_model_is_neither_markup_nor_control(kestrel: CommandLine) -> None:
    ran = kestrel("run", "hi", pieces=("[red]x[/red]", "\x1b[31m", "a\nb", ":smile:", "[/]"))
    assert ran.out.startswith("[red]x[/red]\x1b[31ma\nb:smile:[/]\n")
    for piece in ('"[red]x[/red]"', r'"\x1b[31m"', r'"a\nb"', '":smile:"', '"[/]"'):
        assert piece in ran.err
    assert "\x1b" not in ran.err


def test_version_and_help(kestrel: CommandLine) -> None:
    version = kestrel("--version")
    assert (version.exit_code, version.err) == (0, "")
    assert version.out.startswith("kestrel-cuda ")
    for arguments in (("--help",), ("-h",), ("run", "--help"), ("selftest", "-h"), ("run", "--json", "--help")):
        ran = kestrel(*arguments)
        assert (ran.exit_code, ran.err) == (0, "")
        assert ran.out.startswith("Usage: kestrel-cuda ")
        assert "\x1b" not in ran.out
        if len(arguments) > 1:
            assert "KESTREL_CUDA_MODEL for --model" in ran.out
            assert "Exit codes: 0 success" in ran.out


def test_an_error_before_the_engine_opens_none(kestrel: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": []}), encoding="utf-8")
    assert kestrel("run", "--messages", str(file)).engine is None


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (("--keep", "off", "--policy", "past-only", "--prefetch", "1"), "--policy, --prefetch changed nothing"),
        (("--evict", "free"), "--evict changed nothing: every weight is resident"),
        (("--keep", "2", "--lazy"), "--lazy changed nothing: a window uploads layers when they are used anyway"),
        (("--keep", "2", "--policy", "past-only"), None),
        (("--keep", "off", "--lazy"), None),
        (("--keep", "off", "--profile", "default"), None),
    ],
)
def test_a_choice_that_changes_nothing_is_said(
    kestrel: CommandLine, arguments: tuple[str, ...], note: str | None
) -> None:
    notes = json.loads(kestrel("run", "hi", "--json", *arguments).out)["notes"]
    said = [text for text in notes if "changed nothing" in text]
    assert len(said) == (note is not None)
    assert note is None or said[0].startswith(note)


@pytest.mark.parametrize("arguments", [(), ("--json",), ("--logits", "logits.npz")])
def test_room_for_the_prompts_logits_is_asked_for(
    kestrel: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = kestrel("run", "hi", *arguments)
    assert ran.engine is not None
    assert ran.engine.calls["collects_logits"] == bool(arguments)
