"""What stands in a prompt for pictures and videos: tokens repeated, timestamps written. Knows no pixels, no template.

A picture's token is repeated for each token that it becomes. A video's token, with the tokens that stand around it, is
replaced by a line for each frame pair: `<0.2 seconds>` as text, then its tokens between those two (transformers 4.57,
processing_qwen3_vl.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kestrel_cuda.config import ModelConfig
from kestrel_cuda.errors import CheckpointError, InputError
from kestrel_cuda.inputs.visual_source import VisualKind
from kestrel_cuda.paths import shown_path

Piece = int | str


class Placeholder(NamedTuple):
    """A picture of `num_tokens`, or a video whose frame pairs have that many each and stand at `seconds`."""

    kind: VisualKind
    num_tokens: int
    seconds: tuple[float, ...] = ()


def expand(
    pieces: Sequence[Piece],
    visuals: Sequence[Placeholder],
    config: ModelConfig,
    where: str,
    advice: str,
    config_path: Path,
) -> list[Piece]:
    """A prompt in pieces, ids of added tokens and the text between them, with the tokens of its pictures and videos.

    `visuals` are in the order of the prompt. Raises InputError, which calls the prompt's form `where` and says what to
    do about it, unless it has a place for each and no more; CheckpointError where config.json (`config_path`) lacks
    the tokens around a frame pair.
    """
    kinds: dict[Piece, VisualKind] = {}
    if config.image_token_id is not None and config.video_token_id is not None:
        kinds = {config.image_token_id: "image", config.video_token_id: "video"}
    places = [kinds[piece] for piece in pieces if piece in kinds]
    if places != [visual.kind for visual in visuals]:
        raise InputError(_mismatch(places, visuals, where, advice))
    brackets = config.vision_start_token_id, config.vision_end_token_id
    waiting = iter(visuals)
    expanded: list[Piece] = []
    index = 0
    while index < len(pieces):
        piece = pieces[index]
        index += 1
        if piece not in kinds:
            expanded.append(piece)
            continue
        visual = next(waiting)
        if visual.kind == "image":
            expanded += [piece] * visual.num_tokens
            continue
        if expanded and (expanded[-1], *pieces[index : index + 1]) == brackets:
            expanded.pop()
            index += 1
        expanded += _frame_pairs(piece, visual, *brackets, config_path)
    return _joined(expanded)


def _frame_pairs(
    token: Piece, video: Placeholder, start: int | None, end: int | None, config_path: Path
) -> list[Piece]:
    if start is None or end is None:
        raise CheckpointError(
            f"{shown_path(config_path)} lacks vision_start_token_id or vision_end_token_id, which stand around each "
            "frame pair of a video; take it from the original checkpoint"
        )
    return [
        piece
        for seconds in video.seconds
        for piece in (f"<{seconds:.1f} seconds>", start, *[token] * video.num_tokens, end)
    ]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with neighbouring texts as one: a tokenizer may join characters across them."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, str) and isinstance(last, str):
            joined[-1] = last + piece
        else:
            joined.append(piece)
    return joined


def _mismatch(places: Sequence[VisualKind], visuals: Sequence[Placeholder], where: str, advice: str) -> str:
    given = [visual.kind for visual in visuals]
    if sorted(places) == sorted(given):
        return (
            f"{where} puts pictures and videos in another order ({', '.join(places)}) than they were given "
            f"({', '.join(given)}); give them in its order"
        )
    return f"{where} has places for {_counted(places)}, and {_counted(given)} came with the prompt; {advice}"


def _counted(kinds: Sequence[VisualKind]) -> str:
    counts = {"picture": kinds.count("image"), "video": kinds.count("video")}
    return (
        " and ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items() if count) or "none"
    )
