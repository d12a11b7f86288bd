"""The command `inspect`: what a checkpoint makes of pictures and videos, one after the other. Knows no format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kestrel_cli import flags, options, signals, values
from kestrel_cli.heard import Heard
from kestrel_cli.output import Output, escape_controls
from kestrel_cli.result import inspect_result
from kestrel_cuda.config import ImageProcessorConfig
from kestrel_cuda.errors import SettingError
from kestrel_cuda.sizes import format_size

if TYPE_CHECKING:
    from kestrel_cuda.encode import EncodeCost
    from kestrel_cuda.inputs.inspection import Inspection
    from kestrel_cuda.inputs.visuals import OpenedVideo


def inspect(
    context: typer.Context,
    files: flags.Files = None,
    video: flags.InspectedVideo = None,
    fps: flags.Fps = None,
    model: flags.Model = None,
    min_pixels: flags.MinPixels = None,
    max_pixels: flags.MaxPixels = None,
    image_tokens: flags.ImageTokens = None,
    profile: flags.Profile = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    debug: flags.Debug = False,
) -> flags.Invocation:
    """Say what pictures and videos become.

    For each: its size, what is done to it (orientation, transparency, frames taken), its size after the resize, its
    grid of patches, its tokens, the limit that would halve those of a picture, and what encoding it takes. Loads no
    weights.
    """
    return flags.Invocation(partial(look, tuple(files or ())), flags.given(context.params))


def look(files: Sequence[str], given: flags.Given, variables: Mapping[str, str], output: Output) -> None:
    """Do what `inspect` was asked. Raises InputError at the first file that cannot be used."""
    with signals.held():
        from kestrel_cli.render import Screen
        from kestrel_cuda.encode import encode_cost
        from kestrel_cuda.inputs.image_size import with_limits
        from kestrel_cuda.inputs.inspection import inspect_picture, inspect_video, picture_rules

    paths = [_path(file) for file in files]
    settings = options.settle(options.INSPECT, given, variables)
    if not paths and not settings[options.VIDEO]:
        raise SettingError("nothing to inspect: give a picture's FILE, or --video FILE|DIR")
    screen = Screen(settings[options.QUIET], variables)
    screen.hold()
    screen.settings(settings)
    heard = Heard(screen, settings)
    if settings.source(options.MODEL) == "default":
        heard.note("no --model given: sizes are those of the small embedded model, whose limits are low")
    with settings.naming_sources():
        rules, vision = picture_rules(settings[options.MODEL])
        if paths:
            rules = with_limits(
                rules,
                min_pixels=settings[options.MIN_PIXELS],
                max_pixels=settings[options.MAX_PIXELS],
                image_tokens=settings[options.IMAGE_TOKENS],
            )
    heard.add(options.unused_inspect(settings, has_pictures=bool(paths)), ())
    inspections, costs = [], []
    for file in paths:
        inspections.append(inspect_picture(file, rules))
        costs.append(encode_cost(vision, inspections[-1].size.grid_thw))
        screen.begin()
        output.text(_lines(inspections[-1], rules, costs[-1]))
    videos = []
    for file in settings[options.VIDEO]:
        video = inspect_video(file, settings[options.FPS], settings[options.MODEL])
        screen.begin()
        heard.add(video.notes, video.warnings)
        videos.append((video.facts(), encode_cost(vision, video.size.grid_thw)))
        output.text(_video_lines(video, videos[-1][1]))
    output.result(inspect_result(inspections, costs, videos, settings, heard))


def _path(file: str) -> str:
    """A file's path, read as --image of a run is. Raises SettingError for a blank one."""
    try:
        return values.input_path(file)
    except ValueError as error:
        raise SettingError(f"FILE holds {file!r}; it takes {options.IMAGE.takes}") from error


def _lines(inspection: Inspection, rules: ImageProcessorConfig, cost: EncodeCost) -> str:
    size, half = inspection.size, inspection.half
    done = "".join(f"; {note}" for note in inspection.notes)
    grid = " x ".join(map(str, size.grid_thw))
    if half is not None:
        limit = f"--image-tokens {half.image_tokens} (--max-pixels {half.max_pixels}) would make it {half.tokens}"
    elif size.num_tokens == 1:
        limit = "no picture has fewer"
    else:
        limit = f"no smaller limit halves that: pictures have at least {rules.min_pixels} pixels (--min-pixels)"
    tokens = "1 token" if size.num_tokens == 1 else f"{size.num_tokens} tokens"
    return (
        f"{escape_controls(inspection.path)}: {inspection.height} x {inspection.width} (height x width)"
        f"{escape_controls(done)}\n"
        f"  resized to {size.height} x {size.width}, grid {grid}, {tokens}; {limit}\n{_cost_line(cost)}"
    )


def _video_lines(opened: OpenedVideo, cost: EncodeCost) -> str:
    video, size = opened.video, opened.size
    pairs = size.grid_thw[0]
    grid = " x ".join(map(str, size.grid_thw))
    can_take_fewer = not Path(str(opened.path)).is_dir() and len(video.indices) > opened.rules.min_frames
    fewer = "; a lower --fps takes fewer frames" if can_take_fewer else ""
    frames = "1 frame" if len(video.indices) == 1 else f"{len(video.indices)} frames"
    return (
        f"{escape_controls(str(opened.path))}: {frames} of {video.height} x {video.width} (height x width), "
        f"{video.taken_fps:g} a second\n"
        f"  resized to {size.height} x {size.width}, grid {grid}, {size.num_tokens} tokens, "
        f"{size.num_tokens // pairs} for each of {pairs} times{fewer}\n"
        f"{_cost_line(cost)}"
    )


def _cost_line(cost: EncodeCost) -> str:
    return (
        f"  encoding takes {_operations(cost.flops)}, about {cost.h200_ms:.0f} ms on an H200, and "
        f"{format_size(cost.device_bytes)} of a GPU: tower {format_size(cost.tower_bytes)}, buffers "
        f"{format_size(cost.buffer_bytes)}, features {format_size(cost.feature_bytes)}\n"
    )


def _operations(flops: int) -> str:
    return f"{flops / 1e12:.3g} TFLOP" if flops >= 10**11 else f"{flops / 1e9:.3g} GFLOP"
