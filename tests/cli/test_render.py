"""Standard error in any width: nothing breaks inside a word, and no width leaves a table without its cells."""

from __future__ import annotations

import re

import pytest

from kestrel_cli import options
from kestrel_cli.settings_lines import settings_lines
from tests.cli.conftest import CommandLine


@pytest.mark.parametrize("columns", ["", "0", "00", "1", "8", "39", "-5", "x", "٨٠", "9" * 50])
def test_no_width_silences_or_empties(kestrel: CommandLine, columns: str) -> None:
    err = kestrel("run", "hi", variables={"COLUMNS": columns}).err
    assert '| "Hello" |' in err
    assert "| (end)" in err
    assert "warning: a late warning\n" in err


@pytest.mark.parametrize(("columns", "width"), [("40", 40), ("60", 60), ("80", 80), ("", 80), ("200", 200)])
def test_facts_break_between_words(kestrel: CommandLine, columns: str, width: int) -> None:
    err = kestrel("run", "hi", "--keep", "2", "--table", "none", variables={"COLUMNS": columns}).err
    facts = [line for line in err.splitlines() if re.match(r"[a-z ]{13}\S|\s{13}", line)]
    assert len(facts) > 10
    assert max(map(len, facts)) <= width
    words = " ".join(err.split())
    assert "29 of 29 weights, 4 of 4 layers; at most 4 layers and 1.00 MiB at once" in words
    for name in ("cache_budget", "prefill_chunk=", "max_new_tokens=256", "strip_cache"):
        assert name.rstrip("=") in words


def test_a_message_is_one_line_to_whoever_reads_a_pipe(kestrel: CommandLine) -> None:
    note = "word " * 50 + "end"
    assert f"{note}\n" in kestrel("run", "hi", variables={"COLUMNS": "40"}, notes=(note,)).err


def test_the_settings_begin_with_what_somebody_chose() -> None:
    lines = settings_lines(options.settle(options.RUN, {"quant": "q4_0", "lazy": True}, {"VLLM_CUDA_STREAM": "3"}))
    assert sorted(lines[:-1]) == ["VLLM_CUDA_STREAM: keep=3", "flag: quant=q4_0 lazy=on"]
    defaults, off, unset = lines[-1].split("; ")
    assert defaults.startswith("default: model=(kestrel-tiny, embedded) backend=auto device=0 ")
    assert off == "off: keep_tower raw ignore_eos json quiet debug"
    assert unset.startswith("unset: profile kv vram ")
    named = set(re.findall(r"[a-z_]+", " ".join(lines)))
    assert {setting.name for setting in options.RUN if setting.is_option} <= named


def test_the_settings_hold_a_chosen_model_whole() -> None:
    (line, _) = settings_lines(options.settle(options.RUN, {"model": "/models/Qwen3-VL-2B"}, {}))
    assert line == "flag: model=/models/Qwen3-VL-2B"
