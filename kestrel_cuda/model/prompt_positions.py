"""Where pictures stand in a prompt, and the (t, h, w) position of every token. Knows no pixels and no text.

Text counts up on all three axes. A picture, or a frame pair of a video, that starts at position p has temporal position
p, height p + row and width p + column; what follows goes on at p + the larger of its sides (transformers,
modeling_qwen3_vl.py, get_rope_index). A video's time lies in the text between its frame pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.config import Grid, ModelConfig
from kestrel_cuda.errors import InputError, InternalError
from kestrel_cuda.model.rope import text_positions


class Visual(NamedTuple):
    """A picture or a video that a prompt holds."""

    kind: Literal["image", "video"]
    grid: Grid


class VisualSpan(NamedTuple):
    """A picture or a frame pair of rows x columns tokens, the first of which is token `start` of the prompt."""

    start: int
    num_rows: int
    num_columns: int

    @property
    def stop(self) -> int:
        return self.start + self.num_rows * self.num_columns


def find_spans(ids: Sequence[int], visuals: Sequence[Visual], config: ModelConfig) -> tuple[VisualSpan, ...]:
    """Which tokens of a prompt stand for which of its pictures; `visuals` are in the order of the prompt.

    Raises InputError when the prompt's image and video tokens are not exactly those of its pictures.
    """
    if config.vision is None:
        if visuals:
            raise InternalError("a text-only checkpoint was given pictures")
        return ()
    size = config.vision.merge_size
    token_ids = {"image": config.image_token_id, "video": config.video_token_id}
    frames = [
        (visual.kind, name, VisualSpan(0, visual.grid[1] // size, visual.grid[2] // size))
        for visual, name in zip(visuals, _names(visuals), strict=True)
        for name in _frame_names(visual, name)
    ]
    spans: list[VisualSpan] = []
    at = 0
    while at < len(ids):
        if ids[at] not in token_ids.values():
            at += 1
            continue
        if len(spans) == len(frames):
            found = "an image token" if ids[at] == config.image_token_id else "a video token"
            raise InputError(
                f"token {at} of the prompt is {found} ({ids[at]}) too many: {_counted(visuals)} came with the prompt, "
                "and every one has its tokens before; leave it out"
            )
        kind, name, frame = frames[len(spans)]
        span = frame._replace(start=at)
        if set(ids[at : span.stop]) != {token_ids[kind]} or span.stop > len(ids):
            raise InputError(
                f"{name} takes {_tokens(frame, kind, token_ids[kind])} in a row; from token {at} on the prompt has "
                f"{_run(ids[at:], token_ids[kind])}: put {frame.stop} there"
            )
        spans.append(span)
        at = span.stop
    if len(spans) < len(frames):
        kind, name, frame = frames[len(spans)]
        brackets = config.vision_start_token_id, config.vision_end_token_id
        between = "" if None in brackets else f" between {brackets[0]} and {brackets[1]}"
        raise InputError(
            f"{_counted(visuals)} came with the prompt, and {name} has no tokens in it; it takes "
            f"{_tokens(frame, kind, token_ids[kind])} in a row: put them where it belongs{between}"
        )
    return tuple(spans)


def _names(visuals: Sequence[Visual]) -> list[str]:
    """`image 1`, `video 1`, `image 2`: as they were given, each kind counted for itself."""
    counts = Counter[str]()
    names = []
    for visual in visuals:
        counts[visual.kind] += 1
        names.append(f"{visual.kind} {counts[visual.kind]}")
    return names


def _frame_names(visual: Visual, name: str) -> list[str]:
    if visual.kind == "image":
        return [name]
    return [f"frame pair {number} of {name}" for number in range(1, visual.grid[0] + 1)]


def _tokens(frame: VisualSpan, kind: str, token_id: int | None) -> str:
    return f"{frame.stop} {kind} token{'' if frame.stop == 1 else 's'} ({token_id})"


def _run(ids: Sequence[int], token_id: int | None) -> int:
    """How many of these a sequence begins with."""
    return next((index for index, other in enumerate(ids) if other != token_id), len(ids))


def _counted(visuals: Sequence[Visual]) -> str:
    counts = Counter[str](visual.kind for visual in visuals)
    return " and ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in counts.items()) or "nothing"


def prompt_positions(num_tokens: int, spans: Sequence[VisualSpan]) -> NDArray[np.int64]:
    """Positions [3, num_tokens] of a prompt with pictures at `spans`, which are in order."""
    positions_3s = np.empty((3, num_tokens), np.int64)
    done = position = 0
    for span in spans:
        positions_3s[:, done : span.start] = text_positions(span.start - done, position)
        position += span.start - done
        rows, columns = np.indices((span.num_rows, span.num_columns)).reshape(2, -1)
        positions_3s[:, span.start : span.stop] = position + np.stack([np.zeros_like(rows), rows, columns])
        position += max(span.num_rows, span.num_columns)
        done = span.stop
    positions_3s[:, done:] = text_positions(num_tokens - done, position)
    return positions_3s


def position_delta(positions_3s: NDArray[np.int64]) -> int:
    """What to add to a cache length after this prompt to get the position of the token there, on all three axes."""
    length: int = positions_3s.shape[1]
    return int(positions_3s.max()) + 1 - length


def continued(positions_3s: NDArray[np.int64], num_slots: int) -> NDArray[np.int64]:
    """A prompt's positions with those of the text that is decoded after it, `num_slots` in all."""
    length = positions_3s.shape[1]
    return np.concatenate(
        [positions_3s, text_positions(num_slots - length, length + position_delta(positions_3s))], axis=1
    )
