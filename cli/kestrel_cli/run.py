"""The command `run`: one prompt in, its answer out. Knows the order of things; the parts know the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from kestrel_cli import flags, logits_file, options
from kestrel_cli.output import Output, error_object
from kestrel_cli.prompt import ChatPrompt, IdsPrompt, Prompt, RawPrompt, read_prompt, standard_input
from kestrel_cli.result import run_result
from kestrel_cli.settings import Settings
from kestrel_cuda.config import EngineConfig
from kestrel_cuda.errors import CheckFailed, InputError, InternalError
from kestrel_cuda.report import RunReport, Token

if TYPE_CHECKING:
    from kestrel_cli.render import Screen
    from kestrel_cuda.engine import Engine
    from kestrel_cuda.generate import Generation


def run(
    context: typer.Context,
    prompt: flags.Prompt = None,
    model: flags.Model = None,
    prompt_file: flags.PromptFile = None,
    system: flags.System = None,
    messages: flags.Messages = None,
    raw: flags.Raw = False,
    ids: flags.Ids = None,
    max_new_tokens: flags.MaxNewTokens = None,
    ignore_eos: flags.IgnoreEos = None,
    ctx: flags.Ctx = None,
    quant: flags.Quant = None,
    kv: flags.Kv = None,
    keep: flags.Keep = None,
    policy: flags.Policy = None,
    prefetch: flags.Prefetch = None,
    evict: flags.Evict = None,
    lazy: flags.Lazy = None,
    vram: flags.Vram = None,
    cache_budget: flags.CacheBudget = None,
    prefill_chunk: flags.PrefillChunk = None,
    strip_cache: flags.StripCache = None,
    host_keep: flags.HostKeep = None,
    backend: flags.Backend = None,
    device: flags.Device = None,
    profile: flags.Profile = None,
    json: flags.Json = False,
    logits: flags.Logits = None,
    expect: flags.Expect = None,
    table: flags.Table = None,
    quiet: flags.Quiet = False,
    debug: flags.Debug = False,
) -> flags.Invocation:
    """Answer a prompt.

    Prints the text as it is generated, then one line TOKIDS with every token id, an end token's too.
    """
    return flags.Invocation(answer, flags.given(context.params))


def answer(given: flags.Given, variables: Mapping[str, str], output: Output) -> None:
    """Do what `run` was asked. Raises CheckFailed when --expect does not hold, KeyboardInterrupt after a signal."""
    from kestrel_cli.render import Screen

    settings = options.settle(options.RUN, given, variables)
    screen = Screen(settings[options.QUIET], variables)
    prompt = read_prompt(settings, standard_input(), screen.note)
    logits_path = settings[options.LOGITS]
    if logits_path is not None:
        logits_file.check_writable(logits_path)
    with closing(open_engine(options.run_config(settings))) as engine:
        _answer(engine, _encode(engine, prompt), settings, screen, output)


def open_engine(config: EngineConfig) -> Engine:
    # The engine brings NumPy and the tokenizer with it, which --help and a mistyped flag need not wait for.
    from kestrel_cuda.engine import Engine

    return Engine.open(config)


def _encode(engine: Engine, prompt: Prompt) -> list[int]:
    match prompt:
        case ChatPrompt(messages):
            return engine.encode_chat(messages)
        case RawPrompt(text):
            return engine.encode_raw(text)
        case IdsPrompt(ids):
            return engine.check_ids(ids)


def _answer(engine: Engine, prompt_ids: list[int], settings: Settings, screen: Screen, output: Output) -> None:
    max_new_tokens = settings[options.MAX_NEW_TOKENS]
    ctx = settings[options.CTX] or len(prompt_ids) + max_new_tokens
    room = room_for_answer(len(prompt_ids), ctx)
    warnings = list(engine.checkpoint.warnings)
    if room < max_new_tokens:
        warnings.append(f"at most {room} new tokens: {ctx} of context less {len(prompt_ids)} of the prompt")
    with screen.progress() as on_progress:
        load = engine.load(ctx, num_prompt=len(prompt_ids), on_progress=on_progress)
    screen.load_report(load, settings.as_json())
    warnings += [text for text in load.warnings if text not in warnings]
    screen.warnings(warnings)

    generation = engine.generate(
        prompt_ids, min(max_new_tokens, room), settings[options.IGNORE_EOS], logits=_logits_wanted(settings)
    )
    tokens, interrupt = _stream(generation, output)
    run = generation.report()
    output.text(_closing_lines(run, "".join(token.text for token in tokens)))
    late = [*run.warnings, *_save_logits(generation, settings[options.LOGITS], interrupt)]
    late = [text for text in late if text not in warnings]
    screen.warnings(late)

    expected = settings[options.EXPECT]
    divergence = None if expected is None or interrupt else divergence_of(expected, run.ids)
    result = run_result(load, run, settings, [*warnings, *late])
    if divergence:
        result["error"] = error_object(CheckFailed.kind, divergence)
    output.result(result)
    screen.table(tokens, load.eos_ids, settings[options.TABLE])
    screen.summary(load, run)
    if interrupt:
        raise interrupt
    if divergence:
        raise CheckFailed(divergence)


def room_for_answer(num_prompt_tokens: int, ctx: int) -> int:
    """New tokens that fit behind the prompt. Raises InputError when not one does: a prompt is never cut."""
    if num_prompt_tokens >= ctx:
        raise InputError(
            f"the prompt has {num_prompt_tokens} tokens and the context holds {ctx}; "
            f"needed: --ctx {num_prompt_tokens + 1} or more"
        )
    return ctx - num_prompt_tokens


def divergence_of(expected: Sequence[int], chosen: Sequence[int]) -> str | None:
    """The first step at which the chosen ids leave the expected ones, in words; None when they begin with them."""
    for step, token_id in enumerate(expected):
        if step == len(chosen):
            return f"first divergence at step {step}: expected {token_id}, the answer had ended"
        if chosen[step] != token_id:
            return f"first divergence at step {step}: expected {token_id}, chose {chosen[step]}"
    return None


def _logits_wanted(settings: Settings) -> Literal["none", "hash", "keep"]:
    if settings[options.LOGITS] is not None:
        return "keep"
    return "hash" if settings[options.JSON] else "none"


def _stream(generation: Generation, output: Output) -> tuple[list[Token], KeyboardInterrupt | None]:
    """Print the answer as it comes; a signal ends it early and is handed back."""
    tokens: list[Token] = []
    try:
        for token in generation:
            # Noted first: a signal that arrives in the write must not make it come out twice.
            tokens.append(token)
            output.text(token.text)
    except KeyboardInterrupt as interrupt:
        generation.interrupt()
        return tokens, interrupt
    return tokens, None


def _closing_lines(run: RunReport, written: str) -> str:
    """What is still to be printed: text held back inside a character, a line end if one is missing, TOKIDS."""
    line_end = "" if not run.text or run.text.endswith("\n") else "\n"
    token_ids = " ".join(["TOKIDS:", *map(str, run.ids)])
    return f"{run.text[len(written) :]}{line_end}{token_ids}\n"


def _save_logits(generation: Generation, path: Path | None, interrupt: KeyboardInterrupt | None) -> list[str]:
    if path is None:
        return []
    if interrupt:
        return [f"{path}: not written, the run was interrupted"]
    prompt_logits, step_logits = generation.prompt_logits, generation.step_logits
    if prompt_logits is None or step_logits is None:
        raise InternalError("logits were asked for and not kept")
    logits_file.save(path, prompt_logits, step_logits)
    return []
