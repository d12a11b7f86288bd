"""The command `run`: one prompt in, its answer out. Knows the order of things; the parts know the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from kestrel_cli import flags, logits_file, options, signals
from kestrel_cli.context import context_of
from kestrel_cli.failures import failure_of
from kestrel_cli.files_read import files_read
from kestrel_cli.heard import Heard
from kestrel_cli.output import Output, StdoutClosed, error_object
from kestrel_cli.prompt import ChatPrompt, IdsPrompt, Prompt, RawPrompt, read_prompt, standard_input
from kestrel_cli.result import run_result
from kestrel_cli.settings import Settings
from kestrel_cli.visuals import Visuals
from kestrel_cuda.config import EngineConfig
from kestrel_cuda.errors import CheckFailed, InternalError
from kestrel_cuda.report import PlanReport, RunReport, Token

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
    image: flags.Image = None,
    video: flags.Video = None,
    fps: flags.Fps = None,
    min_pixels: flags.MinPixels = None,
    max_pixels: flags.MaxPixels = None,
    image_tokens: flags.ImageTokens = None,
    raw: flags.RawSwitch = False,
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
    keep_tower: flags.KeepTower = None,
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

    Prints the text as it is generated, then one line TOKIDS with every token id, an end token's too. A run that is
    interrupted prints what it has, with --json the whole object, and exits with 130 (Ctrl-C) or 143 (SIGTERM).
    """
    return flags.Invocation(answer, flags.given(context.params, context.meta.get(flags.VISUAL_ORDER, ())))


def answer(given: flags.Given, variables: Mapping[str, str], output: Output) -> None:
    """Do what `run` was asked. Raises CheckFailed when --expect does not hold, KeyboardInterrupt after a signal."""
    with signals.held():
        from kestrel_cli.render import Screen

    settings = options.settle(options.RUN, given, variables)
    screen = Screen(settings[options.QUIET], variables)
    heard = Heard(screen, settings)
    stdin = standard_input()
    with settings.naming_sources():
        prompt = read_prompt(settings, stdin, heard.note, heard.warn)
        logits_path = settings[options.LOGITS]
        if logits_path is not None:
            read = files_read(settings, prompt, stdin)
            logits_file.check_writable(logits_path, read, settings[options.STRIP_CACHE])
        with closing(open_engine(options.run_config(settings))) as engine:
            visuals = Visuals.open(engine, prompt.visuals, settings, heard)
            _answer(engine, _encode(engine, prompt, visuals), visuals, settings, screen, heard, output)


def open_engine(config: EngineConfig) -> Engine:
    # The engine brings NumPy and the tokenizer with it, which --help and a mistyped flag need not wait for.
    with signals.held():
        from kestrel_cuda.engine import Engine

    return Engine.open(config)


def _encode(engine: Engine, prompt: Prompt, visuals: Visuals) -> list[int]:
    match prompt:
        case ChatPrompt(messages):
            return engine.encode_chat(messages, visuals.opened)
        case RawPrompt(text):
            return engine.encode_raw(text, visuals.opened)
        case IdsPrompt(ids):
            return engine.check_ids(ids, visuals.opened)


def _answer(
    engine: Engine,
    prompt_ids: list[int],
    visuals: Visuals,
    settings: Settings,
    screen: Screen,
    heard: Heard,
    output: Output,
) -> None:
    context = context_of(settings, len(prompt_ids), engine.checkpoint.config.text.max_positions, visuals)
    # Before the weights are there, the tower has the device to itself.
    encoded = visuals.encode(engine)

    def show_plan(plan: PlanReport) -> None:
        screen.plan_report(plan)
        heard.add(plan.notes, plan.warnings)

    with screen.progress() as on_progress:
        load = engine.load(
            context.num_slots,
            len(prompt_ids),
            on_progress,
            on_plan=show_plan,
            collects_logits=_logits_wanted(settings) != "none",
        )
    screen.load_report(load, settings)
    heard.add(load.notes, load.warnings)
    heard.add(options.unused_window(settings, load.keep), options.unused_device(settings, load.backend))
    if settings.source(options.MODEL) == "default":
        heard.note("no --model given: the small embedded one answers")
    if load.keep == load.num_layers and (wished := settings[options.KEEP]):
        heard.note(
            f"{settings.label(options.KEEP)} {wished} keeps all {load.num_layers} layers, and a copy of them in host "
            "memory that --keep off does without"
        )
    if context.warning:
        heard.warn(context.warning)

    generation = engine.generate(
        prompt_ids,
        context.max_new_tokens,
        settings[options.IGNORE_EOS],
        logits=_logits_wanted(settings),
        encoded=encoded,
    )
    tokens, ended_by = _stream(generation, output)
    # From here on a signal waits: what the run has is printed before it ends.
    with signals.held():
        run = _report(generation, ended_by)
        output.model_text(_closing_text(run, tokens))
        output.text(_token_ids_line(run))
        heard.add((), run.warnings)
        if ended_by is None:
            ended_by = _failure_afterwards(generation, run, settings)
        elif settings[options.LOGITS] is not None:
            how = "was interrupted" if run.stop_reason == "interrupt" else "broke off"
            heard.warn(f"{settings[options.LOGITS]}: not written, the run {how}")
        result = run_result(load, run, visuals, settings, heard)
        if ended_by is not None and run.stop_reason != "interrupt":
            failure = failure_of(ended_by)
            result["error"] = error_object(failure.kind, failure.message)
        output.result(result)
        screen.table(tokens, load.eos_ids, settings[options.TABLE])
        screen.summary(load, run, visuals.summary())
    if ended_by is not None:
        raise ended_by


def _failure_afterwards(generation: Generation, run: RunReport, settings: Settings) -> BaseException | None:
    """Save the logits and compare with --expect. What goes wrong is handed back: the answer is there all the same."""
    try:
        # Logits may be many gigabytes.
        signals.release()
        with settings.naming_sources():
            _save_logits(generation, settings[options.LOGITS])
        _check_expected(settings[options.EXPECT], run.ids)
    except BaseException as error:
        return error
    finally:
        signals.hold()
    return None


def _check_expected(expected: Sequence[int] | None, chosen: Sequence[int]) -> None:
    divergence = None if expected is None else divergence_of(expected, chosen)
    if divergence:
        raise CheckFailed(divergence)


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


def _report(generation: Generation, ended_by: BaseException | None) -> RunReport:
    """What the run did; after a failure that leaves nothing to ask the device, that failure is raised."""
    try:
        return generation.report()
    except Exception:
        if ended_by is None or isinstance(ended_by, KeyboardInterrupt):
            raise
        raise ended_by from None


def _stream(generation: Generation, output: Output) -> tuple[list[Token], BaseException | None]:
    """Print the answer as it comes; a signal, or a failure after the first id, ends it early and is handed back."""
    tokens: list[Token] = []
    try:
        for token in generation:
            # Noted first: a signal that arrives in the write must not make it come out twice.
            tokens.append(token)
            output.model_text(token.text)
    except KeyboardInterrupt as interrupt:
        generation.interrupt()
        return tokens, interrupt
    except StdoutClosed:
        raise
    except Exception as failure:
        if not tokens:
            raise
        generation.abandon()
        return tokens, failure
    return tokens, None


def _closing_text(run: RunReport, tokens: Sequence[Token]) -> str:
    """What is still to be printed of the answer: text held back inside a character, a line end if one is missing."""
    num_written = sum(len(token.text) for token in tokens)
    return run.text[num_written:] + ("" if not run.text or run.text.endswith("\n") else "\n")


def _token_ids_line(run: RunReport) -> str:
    return " ".join(["TOKIDS:", *map(str, run.ids)]) + "\n"


def _save_logits(generation: Generation, path: Path | None) -> None:
    if path is None:
        return
    prompt_logits, step_logits = generation.prompt_logits, generation.step_logits
    if prompt_logits is None or step_logits is None:
        raise InternalError("logits were asked for and not kept")
    logits_file.save(path, prompt_logits, step_logits)
