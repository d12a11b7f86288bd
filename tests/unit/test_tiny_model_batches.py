"""The arrays of a training step: ids, positions and patches are those of the product."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kestrel_cuda.checkpoint.config_json import read_config
from kestrel_cuda.inputs.pictures import Picture
from kestrel_cuda.inputs.pixels import image_patches
from kestrel_cuda.model.prompt_positions import prompt_positions
from scripts.make_tiny_model import write_json
from scripts.tiny_model.batches import RowEncoder, collate, cut_picture, scaled_values, vision_config
from scripts.tiny_model.checkpoint import MODEL, RULES, model_config, the_tokenizer
from scripts.tiny_model.split import Split
from scripts.tiny_model.stream import item


def test_a_batch_holds_its_rows() -> None:
    encoder = RowEncoder()
    rows = [encoder.row(item(0, Split.TRAIN, index)) for index in range(24)]
    batch = collate(rows)
    assert batch.ids_s.tolist() == [token for row in rows for token in row.ids]
    assert np.diff(batch.row_starts).tolist() == [len(row.ids) for row in rows]
    assert np.diff(batch.picture_starts).tolist() == [len(cut.values_u8) for row in rows for cut in row.cuts]
    assert batch.picture_starts[-1] == len(batch.values_u8) == 4 * len(batch.visual_at_t)
    assert set(batch.ids_s[batch.visual_at_t]) == {the_tokenizer().token_to_id("<|image_pad|>")}
    assert np.array_equal(batch.ids_s[batch.answer_at_a + 1], batch.targets_a)
    for number, row in enumerate(rows):
        assert batch.targets_a[batch.item_a == number].tolist() == row.ids[row.num_prompt :]
        expected = prompt_positions(row.num_prompt, row.spans)
        positions = batch.positions_3s[:, batch.row_starts[number] : batch.row_starts[number + 1]]
        assert np.array_equal(positions[:, : row.num_prompt], expected)
        rest = np.arange(len(row.ids) - row.num_prompt)
        assert (positions[:, row.num_prompt :] == expected.max() + 1 + rest).all()
    assert batch.shares_p4.sum(axis=1) == pytest.approx(1, abs=1e-6)


def test_a_batch_may_have_no_picture() -> None:
    batch = collate([RowEncoder().row(item(0, Split.TRAIN, 0, "sum"))])
    assert [len(array) for array in (batch.visual_at_t, batch.values_u8, batch.taps_p4, batch.places_p2)] == [0] * 4
    assert batch.picture_starts.tolist() == [0]


def test_the_towers_sizes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", model_config(MODEL, the_tokenizer()))
    assert vision_config(MODEL) == read_config(tmp_path / "config.json").vision


def test_a_picture_larger_than_the_limit_is_cut_as_the_product_cuts_it() -> None:
    rgb = item(0, Split.TRAIN, 0, "count").pictures[0].draw().resize((700, 500))
    cut = cut_picture(rgb)
    patches = image_patches(Picture("", rgb), RULES)
    assert cut.grid == patches.size.grid_thw
    assert np.array_equal(scaled_values()[cut.values_u8][:, :256], patches.pixel_values[:, :256])
