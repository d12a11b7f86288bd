"""What the model is (`ModelConfig`) and how to run it (`EngineConfig`): frozen, checked once. Reads no files."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral
from pathlib import Path
from typing import Literal, TypeAlias, TypeGuard

from kestrel_cuda.errors import SettingError


@dataclass(frozen=True)
class TextConfig:
    """Shape and constants of the decoder. `head_dim` is the checkpoint's own, never hidden_size / num_heads."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    max_positions: int

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


Grid: TypeAlias = tuple[int, int, int]
"""A picture or a video in patches: frame pairs, rows, columns."""


@dataclass(frozen=True)
class VisionConfig:
    """Shape and constants of the vision tower. `deepstack_blocks` are the blocks, counted from 0, after which features
    are taken: the feature after `deepstack_blocks[i]` goes through deepstack merger i."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    position_side: int
    deepstack_blocks: tuple[int, ...]
    rope_theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_inputs(self) -> int:
        """Values in a row of pixels: one patch, every channel and frame of it."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    @property
    def merged_size(self) -> int:
        """Inputs of a merger: the patches of one token side by side."""
        return self.patches_per_token * self.hidden_size

    def num_tokens(self, grid: Grid) -> int:
        """Tokens that a picture or a video of `grid` takes in the prompt."""
        return grid[0] * grid[1] * grid[2] // self.patches_per_token


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint's config.json in this project's words.

    `vision` is None for a text-only checkpoint. The tokens `vision_start_token_id` and `vision_end_token_id` stand
    around a picture; None where config.json does not say. `eos_ids` are the ids config.json alone names.
    """

    architecture: str
    text: TextConfig
    tie_word_embeddings: bool
    vision: VisionConfig | None
    image_token_id: int | None
    video_token_id: int | None
    eos_ids: tuple[int, ...] = ()
    defaults_used: tuple[str, ...] = ()
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None


@dataclass(frozen=True)
class ImageProcessorConfig:
    """How a checkpoint wants its pictures: preprocessor_config.json in this project's words.

    `min_pixels` and `max_pixels` bound the area that a picture is resized to, a video's area over all its frames.
    Mean and deviation are a value a channel, taken after the multiplication by `rescale_factor`.
    """

    min_pixels: int
    max_pixels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    rescale_factor: float

    @property
    def factor(self) -> int:
        """Pixels along a side of what becomes one token: sizes are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def pixels_per_token(self) -> int:
        return self.factor**2


LEAST_FPS, MOST_FPS = 0.001, 1_000_000
"""Frames a second: from one in a quarter of an hour, whose timestamps are still short, to any camera's."""


@dataclass(frozen=True)
class VideoProcessorConfig(ImageProcessorConfig):
    """The same for videos: video_preprocessor_config.json. A video file is sampled at `fps` frames a second."""

    fps: float
    min_frames: int
    max_frames: int


class Quant(StrEnum):
    """How the language model's linears are stored."""

    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    G256 = "g256"
    NONE = "none"


class KvDtype(StrEnum):
    """How entries of the key-value cache are stored; q8 is int8 with a float16 scale for 32 channels."""

    F16 = "f16"
    F32 = "f32"
    Q8 = "q8"


class Policy(StrEnum):
    """Which layers a residency window lets go of; residency/window.py has the rules."""

    PAST_ONLY = "past-only"
    PINNED = "pinned"
    BOTH_SIDES = "both-sides"


class Evict(StrEnum):
    """Where evicted device buffers go: kept for reuse, or back to the driver."""

    POOL = "pool"
    FREE = "free"


_MAY_BE_NONE = {"ctx", "keep", "vram_bytes", "prefill_chunk"}
_LEAST = {"device": 0, "ctx": 1, "keep": 0, "prefetch": 0, "host_keep": 0, "vram_bytes": 1, "prefill_chunk": 1}

DEFAULT_PREFETCH = 2
"""Layers fetched ahead under a window when nobody says otherwise."""

CacheBudget = Literal["seeds"] | int | None


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it counts something: a whole number, NumPy's too, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class EngineConfig:
    """How to run a checkpoint. Raises SettingError when a value is out of range; paths and names may be text.

    `keep` is the residency window in layers: None chooses by what fits, 0 keeps everything resident.
    `kv` None means f32 with `quant` none and f16 otherwise. `ctx` None means prompt + new tokens.
    `vram_bytes` None means what is free less a margin. `strip_cache` is a folder for packed weights, saved and found
    again; `host_keep` above 0 holds that many of a window's layers in host memory and reads the others from there.
    `keep_tower` leaves the vision tower on the device after pictures were encoded, for the next ones.
    `whole_token` decodes a token in one launch where a backend can; the bits are the same.
    """

    model: Path
    backend: Literal["auto", "cuda", "cpu"] = "auto"
    device: int = 0
    quant: Quant = Quant.Q8_0
    kv: KvDtype | None = None
    ctx: int | None = None
    keep: int | None = None
    policy: Policy = Policy.PINNED
    prefetch: int = DEFAULT_PREFETCH
    evict: Evict = Evict.POOL
    lazy: bool = False
    strip_cache: Path | None = None
    host_keep: int = 0
    vram_bytes: int | None = None
    cache_budget: CacheBudget = None
    prefill_chunk: int | None = None
    keep_tower: bool = False
    whole_token: bool = True

    def __post_init__(self) -> None:
        for name in ("model", "strip_cache"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, Path(value))
            elif not isinstance(value, Path) and not (name == "strip_cache" and value is None):
                raise SettingError(f"{name} is {value!r}; it takes a path")
        for name, kind in (("quant", Quant), ("kv", KvDtype), ("policy", Policy), ("evict", Evict)):
            value = getattr(self, name)
            if name == "kv" and value is None:
                continue
            if value not in list(kind):
                raise SettingError(f"{name} is {value!r}; it takes {', '.join(kind)}")
            object.__setattr__(self, name, kind(value))
        for name in ("lazy", "keep_tower", "whole_token"):
            if not isinstance(value := getattr(self, name), bool):
                raise SettingError(f"{name} is {value!r}; it takes True or False")
        if (budget := self.cache_budget) not in (None, "seeds") and not (is_whole(budget) and budget >= 1):
            raise SettingError(f"cache_budget is {budget!r}; it takes at least 1 byte, 'seeds' or None")
        if self.backend not in ("auto", "cuda", "cpu"):
            raise SettingError(f"backend is {self.backend!r}; it takes auto, cuda, cpu")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if not is_whole(value) or value < least:
                raise SettingError(f"{name} is {value!r}; it takes a whole number of at least {least}")
        if self.host_keep and self.strip_cache is None:
            raise SettingError(
                f"--host-keep {self.host_keep} reads layers from disk as they are needed and so needs --strip-cache DIR"
            )

    @property
    def kv_dtype(self) -> KvDtype:
        if self.kv is not None:
            return self.kv
        return KvDtype.F32 if self.quant is Quant.NONE else KvDtype.F16
