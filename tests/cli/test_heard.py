"""Notes and warnings: all of them in the object of --json, each once on standard error, none there with --quiet."""

from __future__ import annotations

import pytest

from tests.cli.conftest import CommandLine


def test_what_is_said_is_in_the_object(kestrel: CommandLine) -> None:
    ran = kestrel("run", "--json")
    assert ran.json["warnings"] == ["a stray file", "scales rounded to zero: 3", "a late warning"]
    *_, asked, load, model = ran.json["notes"]
    assert asked.startswith("no prompt given; asking: ")
    assert (load, model) == ("no GPU here", "no --model given: the small embedded one answers")
    for text in ran.json["warnings"]:
        assert ran.err.count(f"warning: {text}\n") == 1
    for text in ran.json["notes"]:
        assert ran.err.count(f"{text}\n") == 1


def test_what_is_said_names_where_the_wish_came_from(kestrel: CommandLine) -> None:
    note = "--keep 9 is more than the model's 4 layers: 4 are kept"
    ran = kestrel("run", "hi", "--json", "-m", ".", variables={"VLLM_CUDA_STREAM": "9"}, notes=(note,))
    assert ran.json["notes"][0] == f"{note} (--keep comes from VLLM_CUDA_STREAM)"


@pytest.mark.parametrize("device", ["0", "1"])
def test_a_gpu_that_was_chosen_and_not_used(kestrel: CommandLine, device: str) -> None:
    warning = f"--device {device} is not followed: it chooses a GPU, and this ran on the CPU"
    assert warning in kestrel("run", "hi", "--json", "--device", device).json["warnings"]
    by_variable = kestrel("run", "hi", "--json", variables={"KESTREL_CUDA_DEVICE": device}).json["warnings"]
    assert any("KESTREL_CUDA_DEVICE 1 is not followed" in text for text in by_variable) is (device == "1")


def test_what_was_set_and_is_not_read(kestrel: CommandLine) -> None:
    variables = {"KESTREL_CUDA_KEEP": "4", "KESTREL_CUDA_IDS": "1", "KESTREL_CUDA_PROMPT_FILE": "p", "VLLM_KEEP": "1"}
    ran = kestrel("run", "hi", "--json", variables=variables)
    assert ran.exit_code == 0
    assert "KESTREL_CUDA_KEEP is not read; the variable of --keep is VLLM_CUDA_STREAM" in ran.json["warnings"]
    for name in ("KESTREL_CUDA_IDS", "KESTREL_CUDA_PROMPT_FILE"):
        assert f"{name} is not read, since PROMPT is given: a run has one prompt" in ran.json["notes"]
    assert "VLLM_KEEP" not in ran.err


def test_quiet_says_none_of_it(kestrel: CommandLine) -> None:
    ran = kestrel("run", "--json", "--quiet", "--device", "1", variables={"KESTREL_CUDA_KEEP": "4"})
    assert ran.err == ""
    assert len(ran.json["warnings"]) == 5
