"""Pictures and videos of a run: which the command line names, when they are opened and encoded, what is said of them.

Knows no picture format and no tower.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kestrel_cli import options
from kestrel_cli.heard import Heard
from kestrel_cli.settings import Setting, Settings
from kestrel_cuda.inputs.visual_source import VisualKind, VisualSource

if TYPE_CHECKING:
    from kestrel_cuda.engine import Engine
    from kestrel_cuda.inputs.visuals import OpenedVisual, VisualLimits
    from kestrel_cuda.model.visual_rows import EncodedVisuals


def sources_of(settings: Settings) -> tuple[VisualSource, ...]:
    """What --image and --video name, in the order of the command line; variables after flags, pictures first."""
    images, videos = settings[options.IMAGE], settings[options.VIDEO]
    waiting: dict[VisualKind, list[str]] = {"image": list(images), "video": list(videos)}
    sources: list[VisualSource] = []
    rest: list[VisualKind] = [kind for kind, paths in waiting.items() for _ in paths]
    for kind in (*settings[options.VISUAL_ORDER], *rest):
        if waiting[kind]:
            sources.append(VisualSource(kind, waiting[kind].pop(0)))
    return tuple(sources)


@dataclass
class Visuals:
    """Those of one prompt, in its order. `time_ms` is what they have taken so far: files, sizes, patches, the tower."""

    opened: tuple[OpenedVisual, ...] = ()
    time_ms: float = 0.0

    @classmethod
    def open(cls, engine: Engine, sources: tuple[VisualSource, ...], settings: Settings, heard: Heard) -> Visuals:
        """Decode them and say what was done to them. Raises InputError for one that cannot be used."""
        heard.add(_unused(settings, sources), ())
        if not sources:
            return cls()
        started = time.perf_counter()
        opened = engine.open_visuals(sources, _limits(settings))
        time_ms = (time.perf_counter() - started) * 1e3
        for visual in opened:
            heard.add(visual.notes, visual.warnings)
        return cls(opened, time_ms)

    def encode(self, engine: Engine) -> EncodedVisuals | None:
        """Their features; None where there are none."""
        if not self.opened:
            return None
        started = time.perf_counter()
        encoded = engine.encode_opened(self.opened)
        self.time_ms += (time.perf_counter() - started) * 1e3
        return encoded

    @property
    def counted(self) -> str:
        """`2 pictures and 1 video`, say."""
        kinds = [visual.kind for visual in self.opened]
        counts = {"picture": kinds.count("image"), "video": kinds.count("video")}
        return " and ".join(f"{n} {name}{'s' if n > 1 else ''}" for name, n in counts.items() if n)

    @property
    def num_tokens(self) -> int:
        return sum(visual.size.num_tokens for visual in self.opened)

    def advice(self, room: int) -> str | None:
        """What would make them fit `room` tokens, where anything on the command line does."""
        if not self.opened:
            return None
        # The engine brought this, and all that it brings, with it.
        from kestrel_cuda.inputs.visuals import fits_unenlarged, image_tokens_that_fit

        image_tokens = image_tokens_that_fit(self.opened, room)
        if image_tokens is not None:
            return f"--image-tokens {image_tokens}"
        if fits_unenlarged(self.opened, room):
            return "a lower --min-pixels"
        has_video = any(visual.kind == "video" for visual in self.opened)
        return "fewer videos or frames of them (of a file, by a lower --fps)" if has_video else None

    def summary(self) -> str | None:
        """One fact for people; None without any."""
        if not self.opened:
            return None
        return f"{self.counted}, {self.num_tokens} tokens, {self.time_ms:.1f} ms"

    def as_json(self) -> dict[str, object]:
        """`images`, `videos` and `vision_ms`; sizes are [height, width]."""
        images: list[dict[str, object]] = []
        videos: list[dict[str, object]] = []
        for visual in self.opened:
            size = visual.size
            if visual.kind == "image":
                orig = [visual.picture.height, visual.picture.width]
                became = {"resized": [size.height, size.width], "grid": list(size.grid_thw), "tokens": size.num_tokens}
                images.append({"path": visual.path, "orig": orig, **became})
            else:
                videos.append(visual.facts())
        return {"images": images, "videos": videos, "vision_ms": self.time_ms if self.opened else None}


def _limits(settings: Settings) -> VisualLimits:
    from kestrel_cuda.inputs.visuals import VisualLimits

    return VisualLimits(
        min_pixels=settings[options.MIN_PIXELS],
        max_pixels=settings[options.MAX_PIXELS],
        image_tokens=settings[options.IMAGE_TOKENS],
        fps=settings[options.FPS],
    )


def _unused(settings: Settings, sources: tuple[VisualSource, ...]) -> list[str]:
    """Notes on what somebody chose for pictures or videos that the prompt does not have, or that go by their own."""
    bounds_size = (options.MAX_PIXELS, options.IMAGE_TOKENS)
    notes: list[str] = []
    of_kinds: tuple[tuple[tuple[Setting[Any], ...], VisualKind, str], ...] = (
        ((options.MIN_PIXELS, *bounds_size), "image", "picture"),
        ((options.FPS,), "video", "video"),
    )
    for idle, kind, what in of_kinds:
        chosen = _chosen(settings, idle)
        if chosen and not any(source.kind == kind for source in sources):
            notes.append(f"{', '.join(chosen)} changed nothing: the prompt has no {what}")
    own: tuple[tuple[tuple[Setting[Any], ...], str, str, list[float | None]], ...] = (
        ((options.MIN_PIXELS,), "picture", "min_pixels", [one.min_pixels for one in sources if one.kind == "image"]),
        (bounds_size, "picture", "max_pixels", [one.max_pixels for one in sources if one.kind == "image"]),
        ((options.FPS,), "video", "fps", [one.fps for one in sources if one.kind == "video"]),
    )
    for idle, what, key, values in own:
        chosen = _chosen(settings, idle)
        if chosen and values and None not in values:
            notes.append(f"{', '.join(chosen)} changed nothing: every {what} of the conversation has its own {key}")
    if settings[options.KEEP_TOWER] and not sources:
        notes.append(f"{settings.label(options.KEEP_TOWER)} changed nothing: the prompt has no picture and no video")
    return notes


def _chosen(settings: Settings, some: Sequence[Setting[Any]]) -> list[str]:
    """What messages call those of them that somebody set."""
    return [settings.label(setting) for setting in some if settings.source(setting) != "default"]
