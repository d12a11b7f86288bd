"""How long a run may get: --ctx, else the model's positions, and whose fault it is where that is too little."""

from __future__ import annotations

import pytest

from kestrel_cli import options
from kestrel_cli.context import Context, context_of
from kestrel_cuda.errors import InputError, SettingError
from tests.cli.conftest import CommandLine


def context(num_prompt_tokens: int, max_positions: int = 100, **flags: str) -> Context:
    return context_of(options.settle(options.RUN, flags, {}), num_prompt_tokens, max_positions)


def test_by_default_what_the_run_needs() -> None:
    assert context(10, max_new_tokens="20") == Context(30, 20, None)
    assert context(10, max_new_tokens="90") == Context(100, 90, None)
    assert context(10, max_new_tokens="20", ctx="50") == Context(50, 20, None)


@pytest.mark.parametrize("max_new_tokens", ["91", "256", "9" * 18])
def test_the_answer_is_cut_to_the_models_positions(max_new_tokens: str) -> None:
    warning = f"at most 90 new tokens, not {max_new_tokens}: the model's 100 positions less 10 of the prompt"
    assert context(10, max_new_tokens=max_new_tokens) == Context(100, 90, warning)
    assert context(10) == Context(100, 90, warning.replace(max_new_tokens, "256"))


@pytest.mark.parametrize("flags", [{}, {"max_new_tokens": "1"}, {"ctx": "100"}, {"ctx": "5"}])
def test_only_a_prompt_that_does_not_fit_is_refused(flags: dict[str, str]) -> None:
    assert context(99).max_new_tokens == 1
    with pytest.raises(InputError) as raised:
        context(100, **flags)
    assert "the prompt has 100 tokens" in str(raised.value)
    assert "100 positions" in str(raised.value)
    assert "--ctx" not in str(raised.value)


def test_a_context_over_the_positions_is_refused() -> None:
    with pytest.raises(SettingError, match="--ctx 101 is over the 100 positions this model has"):
        context(10, ctx="101")


@pytest.mark.parametrize("ctx", ["3", "5000"])
def test_the_variable_that_said_so_is_named(kestrel: CommandLine, ctx: str) -> None:
    ran = kestrel("run", "hi", variables={"KESTREL_CUDA_CTX": ctx})
    assert ran.exit_code == 2
    assert ran.err.splitlines()[-1].endswith("(--ctx comes from KESTREL_CUDA_CTX)")


def test_a_cut_answer_is_a_warning(kestrel: CommandLine) -> None:
    ran = kestrel("run", "hi", "--json", max_positions=8)
    assert ran.exit_code == 0
    assert ran.engine is not None
    assert (ran.engine.calls["ctx"], ran.engine.calls["generate"][1]) == (8, 5)
    assert "at most 5 new tokens, not 256: the model's 8 positions less 3 of the prompt" in ran.json["warnings"]


@pytest.mark.parametrize(("ctx", "room"), [("4", 1), ("10", 7)])
def test_a_context_too_small_for_all_new_tokens_is_said(kestrel: CommandLine, ctx: str, room: int) -> None:
    ran = kestrel("run", "hi", "--json", "-c", ctx)
    assert ran.engine is not None
    assert (ran.engine.calls["ctx"], ran.engine.calls["generate"][1]) == (int(ctx), room)
    tokens = "token" if room == 1 else "tokens"
    warning = f"at most {room} new {tokens}, not 256: {ctx} of context (--ctx) less 3 of the prompt"
    assert warning in ran.json["warnings"]
