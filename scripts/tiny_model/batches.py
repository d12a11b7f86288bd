"""Items to the arrays of a training step, pictures by the product's own preprocessing. Needs NumPy, no PyTorch.

Nothing is padded: rows follow one another, pictures too, patches in 8 bits a value, and index arrays say where each
belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kestrel_cuda.config import Grid, ImageProcessorConfig, VisionConfig
from kestrel_cuda.inputs.image_size import image_size
from kestrel_cuda.inputs.pixels import resize
from kestrel_cuda.inputs.tokenizer import Tokenizer
from kestrel_cuda.model.patch_positions import frame_places
from kestrel_cuda.model.prompt_positions import VisualSpan, continued, prompt_positions
from scripts.make_tiny_model import MERGE_SIZE, PATCH_SIZE, TEMPORAL_PATCH_SIZE, TinyModel
from scripts.tiny_model.checkpoint import MAX_PIXELS, MODEL, RULES, the_tokenizer
from scripts.tiny_model.items import Item
from scripts.tiny_model.split import Split
from scripts.tiny_model.stream import item

Ints = NDArray[np.int64]
MOST_IDS, MOST_PATCHES = 512, MAX_PIXELS // PATCH_SIZE**2
"""Of a row and of a picture."""


@dataclass(frozen=True)
class Cut:
    """A picture as the tower takes it: patches [patches, 3 * 256] of 8-bit values, channel by channel, and its grid.

    The two frames of a patch are the same for a picture, so one is kept.
    """

    values_u8: NDArray[np.uint8]
    grid: Grid


_NOTHING = Cut(np.zeros((0, 3 * PATCH_SIZE**2), np.uint8), (1, 0, 0))


@dataclass(frozen=True)
class Row:
    """An item in ids, its answer from `num_prompt` on, the end token included."""

    ids: list[int]
    num_prompt: int
    spans: tuple[VisualSpan, ...]
    cuts: tuple[Cut, ...]


@dataclass(frozen=True)
class Batch:
    """The arrays of a step for B rows of S ids in all, I pictures of P patches and T tokens in all, A ids of answers.

    `*_at` arrays are indices into the ids; the id at `answer_at` is followed by the target. `*_starts` say where each
    row and picture begins, with the end of the last.
    """

    ids_s: Ints
    positions_3s: Ints
    row_starts: NDArray[np.int32]
    visual_at_t: Ints
    answer_at_a: Ints
    targets_a: Ints
    item_a: Ints
    values_u8: NDArray[np.uint8]
    picture_starts: NDArray[np.int32]
    taps_p4: Ints
    shares_p4: NDArray[np.float32]
    places_p2: Ints

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def vision_config(model: TinyModel) -> VisionConfig:
    """The tower's sizes in the product's words."""
    return VisionConfig(
        depth=model.vision_depth,
        hidden_size=model.vision_hidden_size,
        num_heads=model.vision_num_heads,
        intermediate_size=model.vision_intermediate_size,
        out_hidden_size=model.hidden_size,
        in_channels=3,
        patch_size=PATCH_SIZE,
        temporal_patch_size=TEMPORAL_PATCH_SIZE,
        merge_size=MERGE_SIZE,
        position_side=round(model.num_positions**0.5),
        deepstack_blocks=model.deepstack,
        rope_theta=10_000.0,
    )


def cut_picture(rgb: Image.Image, rules: ImageProcessorConfig = RULES) -> Cut:
    """What the product makes of a picture, before values are scaled."""
    size = image_size(rgb.height, rgb.width, rules)
    merge, patch = rules.merge_size, rules.patch_size
    _, rows, columns = size.grid_thw
    cells = resize(rgb, size).reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    return Cut(cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3 * patch * patch), size.grid_thw)


@cache
def scaled_values(rules: ImageProcessorConfig = RULES) -> NDArray[np.float32]:
    """What each of the 256 values becomes, [256]; mean and deviation are the same in every channel."""
    scaled = (np.arange(256, dtype=np.float64) * rules.rescale_factor).astype(np.float32)
    values: NDArray[np.float32] = (scaled - np.float32(rules.image_mean[0])) / np.float32(rules.image_std[0])
    return values


class RowEncoder:
    """Makes rows of items as the checkpoint's template and the product's prompt encoder would."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer(the_tokenizer())
        names = ("im_start", "im_end", "vision_start", "vision_end", "image_pad")
        self._ids = {name: self._tokenizer.encode(f"<|{name}|>")[0] for name in names}
        fixed = ("user\n", "\n", "assistant\n")
        self._user, self._line_end, self._assistant = (self._tokenizer.encode_plain(text) for text in fixed)

    def row(self, one: Item) -> Row:
        cuts = tuple(cut_picture(picture.draw()) for picture in one.pictures)
        ids, encode = self._ids, self._tokenizer.encode_plain
        prompt, spans = [ids["im_start"]], []
        for number, cut in enumerate(cuts):
            prompt += [*([] if number else self._user), ids["vision_start"]]
            rows, columns = cut.grid[1] // MERGE_SIZE, cut.grid[2] // MERGE_SIZE
            spans.append(VisualSpan(len(prompt), rows, columns))
            prompt += [ids["image_pad"]] * (rows * columns) + [ids["vision_end"]]
        # Text between two added tokens is encoded in one piece.
        prompt += encode(one.question if cuts else f"user\n{one.question}")
        prompt += [ids["im_end"], *self._line_end, ids["im_start"], *self._assistant]
        return Row([*prompt, *encode(one.answer), ids["im_end"]], len(prompt), tuple(spans), cuts)


def collate(rows: Sequence[Row], model: TinyModel = MODEL) -> Batch:
    """The rows of one step together."""
    starts = _starts([len(row.ids) for row in rows])
    visual_at, answer_at, targets, owners = [], [], [], []
    for number, (row, start) in enumerate(zip(rows, starts[:-1], strict=True)):
        count = len(row.ids)
        visual_at += [np.arange(start + span.start, start + span.stop) for span in row.spans]
        answer_at.append(np.arange(start + row.num_prompt - 1, start + count - 1))
        targets.append(np.array(row.ids[row.num_prompt :]))
        owners.append(np.full(count - row.num_prompt, number))
    cuts = [cut for row in rows for cut in row.cuts]
    assert max(np.diff(starts)) <= MOST_IDS
    where = [_grid_places(model, cut.grid) for cut in (_NOTHING, *cuts)]
    return Batch(
        np.concatenate([row.ids for row in rows]),
        np.concatenate([continued(prompt_positions(row.num_prompt, row.spans), len(row.ids)) for row in rows], axis=1),
        starts,
        np.concatenate([np.zeros(0, np.int64), *visual_at]),
        np.concatenate(answer_at),
        np.concatenate(targets),
        np.concatenate(owners),
        np.concatenate([cut.values_u8 for cut in (_NOTHING, *cuts)]),
        _starts([len(cut.values_u8) for cut in cuts]),
        np.concatenate([taps for taps, _, _ in where]),
        np.concatenate([shares for _, shares, _ in where]),
        np.concatenate([places for _, _, places in where]),
    )


class BatchStream:
    """The `size` items of a split from any one on: the same whoever asks, so a run can go on later."""

    def __init__(self, seed: int, split: Split, size: int) -> None:
        self._seed, self._split, self._size = seed, split, size
        self._encoder: RowEncoder | None = None

    def batch(self, first: int) -> Batch:
        self._encoder = self._encoder or RowEncoder()
        items = [item(self._seed, self._split, first + number) for number in range(self._size)]
        return collate([self._encoder.row(one) for one in items])


@lru_cache(maxsize=4096)
def _grid_places(model: TinyModel, grid: Grid) -> tuple[Ints, NDArray[np.float32], Ints]:
    """Of a grid's patches: the four entries of the position table each lies between, their shares, row and column."""
    config = vision_config(model)
    places = frame_places(config, grid[1], grid[2])
    side = config.position_side
    rows_p, columns_p = places.places_m2[:, 0], places.places_m2[:, 1]
    row_taps, column_taps = places.row_taps_p2[rows_p], places.column_taps_p2[columns_p]
    down, right = places.row_shares_p[rows_p], places.column_shares_p[columns_p]
    taps = np.stack([row_taps[:, i] * side + column_taps[:, j] for i in (0, 1) for j in (0, 1)], axis=1)
    shares = np.stack([(1 - down) * (1 - right), (1 - down) * right, down * (1 - right), down * right], axis=1)
    return taps.astype(np.int64), shares.astype(np.float32), places.places_m2.astype(np.int64)


def _starts(counts: Sequence[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *counts]).astype(np.int32)
