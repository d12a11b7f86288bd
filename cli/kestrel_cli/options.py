"""The table of settings: name, words, default and variable of each, which command has which, and what contradicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from kestrel_cli import values
from kestrel_cli.settings import Conflict, Raw, Setting, Settings, resolve
from kestrel_cli.strays import stray_variables
from kestrel_cuda.config import (
    DEFAULT_PREFETCH,
    LEAST_FPS,
    MOST_FPS,
    CacheBudget,
    EngineConfig,
    Evict,
    KvDtype,
    Policy,
    Quant,
)
from kestrel_cuda.errors import SettingError
from kestrel_cuda.inputs.visual_source import VisualKind
from kestrel_cuda.profiles import Profile, load_profile
from kestrel_cuda.sizes import parse_size

BackendName = Literal["auto", "cuda", "cpu"]
TableRows = Literal["last", "all", "none"]

_NUMBER_FROM_ONE = "a whole number of at least 1"
_SIZE = "a size like 6GiB or 500MB"
_FILE = "the path of a file"


def _infer(text: str) -> BackendName:
    if text not in ("0", "1"):
        raise ValueError(text)
    return "cuda" if text == "1" else "cpu"


def _show_keep(keep: int | None) -> int | str:
    return "auto" if keep is None else keep or "off"


def _show_paths(paths: tuple[str, ...]) -> object:
    return paths or None


def _show_keeps(keeps: tuple[int, ...] | None) -> tuple[int | str, ...] | None:
    return None if keeps is None else tuple(keep or "off" for keep in keeps)


PROFILE = Setting[str | None](
    "profile", None, "a profile's name or a .toml file", values.non_blank, variable="KESTREL_CUDA_PROFILE"
)
MODEL = Setting[Path](
    "model",
    Path(str(files("kestrel_cuda"))) / "data" / "kestrel-tiny",
    "a checkpoint's folder",
    values.path,
    variable="KESTREL_CUDA_MODEL",
)
BACKEND = Setting[BackendName](
    "backend",
    "auto",
    "auto, cuda or cpu",
    values.one_of("auto", "cuda", "cpu"),
    variable="VLLM_CUDA_INFER",
    parse_variable=_infer,
    variable_takes="0 (CPU backend) or 1 (require the GPU); unset or empty: the GPU if there is one",
)
DEVICE = Setting[int]("device", 0, "a whole number", values.number, variable="KESTREL_CUDA_DEVICE")
QUANT = Setting[Quant]("quant", Quant.Q8_0, "q8_0, q4_0, g256 or none", Quant, variable="KESTREL_CUDA_QUANT")
KV = Setting[KvDtype | None]("kv", None, "f16, f32 or q8", KvDtype, variable="KESTREL_CUDA_KV")
CTX = Setting[int | None]("ctx", None, _NUMBER_FROM_ONE, values.at_least_one, variable="KESTREL_CUDA_CTX")
KEEP = Setting[int | None](
    "keep",
    None,
    "a whole number of layers, off (or 0) or auto",
    values.keep,
    variable="VLLM_CUDA_STREAM",
    parse_variable=values.window_variable,
    variable_takes="a whole number of layers to keep, or 0 (everything resident); unset, empty or blank: what fits",
    blank_is_unset=True,
    show=_show_keep,
)
HOST_KEEP = Setting[int](
    "host_keep",
    0,
    "a whole number of layers, 0 = all of them",
    values.number,
    variable="VLLM_VQF_STREAM",
    parse_variable=values.window_variable,
    variable_takes="a whole number of layers to hold in host memory, or 0 (all); unset, empty or blank: all",
    blank_is_unset=True,
)
STRIP_CACHE = Setting[Path | None]("strip_cache", None, "a folder", values.path, variable="KESTREL_CUDA_STRIP_CACHE")
POLICY = Setting[Policy](
    "policy", Policy.PINNED, "past-only, pinned or both-sides", Policy, variable="KESTREL_CUDA_POLICY"
)
PREFETCH = Setting[int](
    "prefetch", DEFAULT_PREFETCH, "a whole number of layers", values.number, variable="KESTREL_CUDA_PREFETCH"
)
EVICT = Setting[Evict]("evict", Evict.POOL, "pool or free", Evict, variable="KESTREL_CUDA_EVICT")
LAZY = Setting[bool]("lazy", False)
KEEP_TOWER = Setting[bool]("keep_tower", False)
VRAM = Setting[int | None]("vram", None, _SIZE, parse_size, variable="KESTREL_CUDA_VRAM")
CACHE_BUDGET = Setting[CacheBudget](
    "cache_budget", None, f"seeds or {_SIZE}", values.cache_budget, variable="KESTREL_CUDA_CACHE_BUDGET"
)
PREFILL_CHUNK = Setting[int | None](
    "prefill_chunk", None, _NUMBER_FROM_ONE, values.at_least_one, variable="KESTREL_CUDA_PREFILL_CHUNK"
)

PROMPT = Setting[str | None]("prompt", None, "text", str, is_option=False)
PROMPT_FILE = Setting[Path | None]("prompt_file", None, _FILE, values.file, variable="KESTREL_CUDA_PROMPT_FILE")
SYSTEM = Setting[str | None]("system", None, "text", str, variable="KESTREL_CUDA_SYSTEM")
MESSAGES = Setting[Path | None]("messages", None, _FILE, values.file, variable="KESTREL_CUDA_MESSAGES")
IMAGE = Setting[tuple[str, ...]](
    "image",
    (),
    "the path of a picture",
    values.single(values.input_path),
    variable="KESTREL_CUDA_IMAGE",
    show=_show_paths,
)
VIDEO = Setting[tuple[str, ...]](
    "video",
    (),
    "the path of a video or of a folder of frames",
    values.single(values.input_path),
    variable="KESTREL_CUDA_VIDEO",
    show=_show_paths,
)
VISUAL_ORDER = Setting[tuple[VisualKind, ...]](
    "visual_order",
    (),
    "image or video",
    values.single(values.one_of("image", "video")),
    is_option=False,
)
FPS = Setting[float | None](
    "fps",
    None,
    f"a number from {LEAST_FPS} to {MOST_FPS}, of frames a second, in plain digits like 2 or 0.5",
    values.frame_rate,
    variable="KESTREL_CUDA_FPS",
)
RAW = Setting[bool]("raw", False)
_IDS = "token ids separated by commas, like 1,2,3"
IDS = Setting[tuple[int, ...] | None]("ids", None, _IDS, values.token_ids, variable="KESTREL_CUDA_IDS")
MAX_NEW_TOKENS = Setting[int](
    "max_new_tokens", 256, _NUMBER_FROM_ONE, values.at_least_one, variable="KESTREL_CUDA_MAX_NEW_TOKENS"
)
IGNORE_EOS = Setting[bool]("ignore_eos", False)
LOGITS = Setting[Path | None]("logits", None, _FILE, values.named_file, variable="KESTREL_CUDA_LOGITS")
EXPECT = Setting[tuple[int, ...] | None]("expect", None, _IDS, values.token_ids, variable="KESTREL_CUDA_EXPECT")
TABLE = Setting[TableRows](
    "table", "last", "last, all or none", values.one_of("last", "all", "none"), variable="KESTREL_CUDA_TABLE"
)
SWEEP_KEEP = Setting[bool]("sweep_keep", False)
KEEPS = Setting[tuple[int, ...] | None](
    "keeps",
    None,
    "numbers of layers or off, separated by commas, like off,27,20,1",
    values.distinct(values.fixed_keep),
    variable="KESTREL_CUDA_KEEPS",
    show=_show_keeps,
)
POLICIES = Setting[tuple[Policy, ...] | None](
    "policies",
    None,
    "past-only, pinned or both-sides, separated by commas",
    values.distinct(Policy),
    variable="KESTREL_CUDA_POLICIES",
)
EVICTS = Setting[tuple[Evict, ...] | None](
    "evicts", None, "pool or free, separated by commas", values.distinct(Evict), variable="KESTREL_CUDA_EVICTS"
)
PROMPT_TOKENS = Setting[int](
    "prompt_tokens", 16, _NUMBER_FROM_ONE, values.at_least_one, variable="KESTREL_CUDA_PROMPT_TOKENS"
)
NEW_TOKENS = Setting[int](
    "new_tokens", 24, "a whole number of at least 4", values.at_least(4), variable="KESTREL_CUDA_NEW_TOKENS"
)
ROUNDS = Setting[int]("rounds", 5, _NUMBER_FROM_ONE, values.at_least_one, variable="KESTREL_CUDA_ROUNDS")

_PIXELS = "a whole number of pixels, of at least 1"
MIN_PIXELS = Setting[int | None]("min_pixels", None, _PIXELS, values.at_least_one, variable="KESTREL_CUDA_MIN_PIXELS")
MAX_PIXELS = Setting[int | None]("max_pixels", None, _PIXELS, values.at_least_one, variable="KESTREL_CUDA_MAX_PIXELS")
IMAGE_TOKENS = Setting[int | None](
    "image_tokens",
    None,
    "a whole number of tokens, of at least 1",
    values.at_least_one,
    variable="KESTREL_CUDA_IMAGE_TOKENS",
)

JSON = Setting[bool]("json", False)
QUIET = Setting[bool]("quiet", False)
DEBUG = Setting[bool]("debug", False)

_EVERYWHERE = (PROFILE, MODEL, BACKEND, DEVICE, QUANT, KV, VRAM, CACHE_BUDGET, PREFILL_CHUNK)
_STORED: tuple[Setting[Any], ...] = (STRIP_CACHE, HOST_KEEP)
_PROMPTS: tuple[Setting[Any], ...] = (PROMPT, PROMPT_FILE, MESSAGES, IDS)
_VISUALS: tuple[Setting[Any], ...] = (IMAGE, VIDEO, VISUAL_ORDER, FPS)
_LIMITS: tuple[Setting[Any], ...] = (MIN_PIXELS, MAX_PIXELS, IMAGE_TOKENS)
_OUTPUT = (JSON, QUIET, DEBUG)

RUN: tuple[Setting[Any], ...] = (
    *_EVERYWHERE,
    *_STORED,
    *(CTX, KEEP, POLICY, PREFETCH, EVICT, LAZY, KEEP_TOWER),
    *_PROMPTS,
    *_VISUALS,
    *_LIMITS,
    *(SYSTEM, RAW, MAX_NEW_TOKENS, IGNORE_EOS, LOGITS, EXPECT, TABLE),
    *_OUTPUT,
)
SELFTEST: tuple[Setting[Any], ...] = (*_EVERYWHERE, *_OUTPUT)
INSPECT: tuple[Setting[Any], ...] = (PROFILE, MODEL, VIDEO, FPS, *_LIMITS, *_OUTPUT)
_BENCH = (*_EVERYWHERE, STRIP_CACHE, POLICY, PREFETCH, EVICT, PROMPT_TOKENS, NEW_TOKENS, ROUNDS, SWEEP_KEEP)
_OF_A_SWEEP: tuple[Setting[Any], ...] = (KEEPS, POLICIES, EVICTS)
BENCH_ONE: tuple[Setting[Any], ...] = (*_BENCH, KEEP, *_OUTPUT)
BENCH_SWEEP: tuple[Setting[Any], ...] = (*_BENCH, *_OF_A_SWEEP, *_OUTPUT)

CONFLICTS = (
    *(Conflict(one, other, "a run has one prompt") for one, other in combinations(_PROMPTS, 2)),
    Conflict(RAW, SYSTEM, "a raw prompt has no system message"),
    Conflict(RAW, MESSAGES, "a conversation needs the chat template"),
    Conflict(RAW, IDS, "token ids are taken as they are"),
    Conflict(IDS, SYSTEM, "token ids are the whole prompt"),
    Conflict(MESSAGES, SYSTEM, "a conversation carries its own system message"),
    Conflict(MESSAGES, IMAGE, "a conversation names its own pictures"),
    Conflict(MESSAGES, VIDEO, "a conversation names its own videos"),
    Conflict(POLICY, POLICIES, "a sweep has one list of policies"),
    Conflict(EVICT, EVICTS, "a sweep has one list of ways to evict"),
    Conflict(MAX_PIXELS, IMAGE_TOKENS, "both say how large a picture may be"),
)


_NO_UNREAD: Mapping[Setting[Any], str] = MappingProxyType({})
_UNREAD_BY_BENCH: Mapping[Setting[Any], str] = MappingProxyType(
    {
        HOST_KEEP: "bench holds every layer in host memory",
        LAZY: "bench uploads what a window needs before it is timed",
        KEEP_TOWER: "bench has no pictures",
    }
)


def _chosen_profile(flags: Mapping[str, Raw], variables: Mapping[str, str]) -> Profile | None:
    chosen = resolve((PROFILE,), (), flags, variables, None)
    name = chosen[PROFILE]
    if name is None:
        return None
    try:
        return load_profile(name)
    except SettingError as error:
        if chosen.source(PROFILE) != "flag":
            error.args = (f"{chosen.label(PROFILE)}: {error}",)
        raise


def settle(
    known: tuple[Setting[Any], ...],
    flags: Mapping[str, Raw],
    variables: Mapping[str, str],
    unread: Mapping[Setting[Any], str] = _NO_UNREAD,
) -> Settings:
    """Every setting of a command, the profile that --profile or its variable names laid below them.

    Of `unread` settings, which the command has no use for, a note is made where somebody chose one.
    """
    settings = resolve(known, CONFLICTS, flags, variables, _chosen_profile(flags, variables), unread)
    settings.warnings += stray_variables((*RUN, *INSPECT, *BENCH_ONE, *BENCH_SWEEP), variables)
    if BACKEND in settings and settings[BACKEND] == "cpu" and settings.source(DEVICE) == "flag":
        raise SettingError(f"--device chooses a GPU, and {settings.label(BACKEND)} asks for the CPU backend")
    if HOST_KEEP in settings and settings[HOST_KEEP] and settings[STRIP_CACHE] is None:
        raise SettingError(
            f"{settings.label(HOST_KEEP)} {settings[HOST_KEEP]} reads layers from disk as they are needed and so needs "
            "--strip-cache DIR"
        )
    if TABLE in known and settings[QUIET] and settings.source(TABLE) == "flag" and settings[TABLE] != "none":
        raise SettingError("--quiet and --table contradict each other: the table is printed on standard error")
    expected = settings[EXPECT] if EXPECT in known else None
    if expected is not None and len(expected) > settings[MAX_NEW_TOKENS]:
        raise SettingError(
            f"{settings.label(EXPECT)} lists {len(expected)} ids, but at most {settings[MAX_NEW_TOKENS]} are chosen; "
            "raise --max-new-tokens"
        )
    return settings


def settle_bench(flags: Mapping[str, Raw], variables: Mapping[str, str]) -> Settings:
    """The settings of `bench`: of one window, or of a sweep. A note says where the other kind's are set."""
    sweeps = SWEEP_KEEP.name in flags
    if sweeps and KEEP.name in flags:
        raise SettingError("--sweep-keep and --keep contradict each other: a sweep takes its windows from --keeps")
    stray = next((setting for setting in _OF_A_SWEEP if setting.name in flags), None)
    if stray is not None and not sweeps:
        raise SettingError(f"{stray.flag} is for a sweep over windows; add --sweep-keep")
    if sweeps:
        others = {KEEP: "a sweep takes its windows from --keeps"}
    else:
        others = dict.fromkeys(_OF_A_SWEEP, "it is for a sweep over windows (--sweep-keep)")
    return settle(BENCH_SWEEP if sweeps else BENCH_ONE, flags, variables, {**_UNREAD_BY_BENCH, **others})


def unused_device(settings: Settings, backend: str) -> list[str]:
    """A warning where somebody chose a GPU and there was none to use."""
    if backend != "cpu" or not (settings[DEVICE] or settings.source(DEVICE) == "flag"):
        return []
    return [f"{settings.label(DEVICE)} {settings[DEVICE]} is not followed: it chooses a GPU, and this ran on the CPU"]


def unused_window(settings: Settings, keep: int) -> list[str]:
    """A note on what somebody chose that this window, or there being none, has no use for."""
    idle = (LAZY,) if keep else (POLICY, POLICIES, PREFETCH, EVICT, EVICTS)
    why = (
        "a window uploads layers when they are used anyway" if keep else "every weight is resident, there is no window"
    )
    chosen = [settings.label(one) for one in idle if one in settings and settings.is_asked_for(one)]
    return [f"{', '.join(chosen)} changed nothing: {why}"] if chosen else []


def unused_inspect(settings: Settings, *, has_pictures: bool) -> list[str]:
    """Notes on what somebody chose that only pictures, or only videos, have a use for."""
    notes = []
    for idle, used, what in ((_LIMITS, has_pictures, "picture"), ((FPS,), bool(settings[VIDEO]), "video")):
        chosen = [settings.label(setting) for setting in idle if settings.is_asked_for(setting)]
        if chosen and not used:
            notes.append(f"{', '.join(chosen)} changed nothing: there is no {what}")
    return notes


def selftest_config(settings: Settings) -> EngineConfig:
    """How to open the engine for what every command shares."""
    return EngineConfig(
        model=settings[MODEL],
        backend=settings[BACKEND],
        device=settings[DEVICE],
        quant=settings[QUANT],
        kv=settings[KV],
        vram_bytes=settings[VRAM],
        cache_budget=settings[CACHE_BUDGET],
        prefill_chunk=settings[PREFILL_CHUNK],
    )


def run_config(settings: Settings) -> EngineConfig:
    """The same for a run, which chooses its context and its window too."""
    return replace(
        selftest_config(settings),
        ctx=settings[CTX],
        keep=settings[KEEP],
        policy=settings[POLICY],
        prefetch=settings[PREFETCH],
        evict=settings[EVICT],
        lazy=settings[LAZY],
        keep_tower=settings[KEEP_TOWER],
        strip_cache=settings[STRIP_CACHE],
        host_keep=settings[HOST_KEEP],
    )


def bench_config(settings: Settings) -> EngineConfig:
    """The same for a bench, whose windows are laid over what is loaded."""
    return replace(selftest_config(settings), prefetch=settings[PREFETCH], strip_cache=settings[STRIP_CACHE])


def bench_windows(settings: Settings) -> tuple[Sequence[int | None] | None, Sequence[Policy], Sequence[Evict]]:
    """Keeps, policies and ways to evict to be measured; keeps are None for a sweep's own choice."""
    if not settings[SWEEP_KEEP]:
        return (settings[KEEP],), (settings[POLICY],), (settings[EVICT],)
    policies, evicts = settings[POLICIES] or (settings[POLICY],), settings[EVICTS] or (settings[EVICT],)
    return settings[KEEPS], policies, evicts
