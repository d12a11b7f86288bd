"""Which rows of a chunk of a prompt belong to which features, however the chunks cut its pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.checkpoint.config_json import read_config
from kestrel_cuda.model.prompt_positions import VisualSpan, continued, prompt_positions
from kestrel_cuda.model.rope import rotation_table, text_positions
from kestrel_cuda.model.sequence import DeviceSequence
from kestrel_cuda.model.vision import VisionFeatures
from kestrel_cuda.model.visual_rows import EncodedVisuals, visual_rows

SPANS = (VisualSpan(2, 2, 3), VisualSpan(8, 1, 2), VisualSpan(13, 2, 2))
NUM_TOKENS = 18


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 17, 18, 100])
def test_every_feature_lands_once_on_its_row(chunk: int) -> None:
    rows_mn = np.arange(12, dtype=np.float32)[:, None]
    features = VisionFeatures(rows_mn, (rows_mn + 100, rows_mn + 200))
    found = np.full((3, NUM_TOKENS), -1.0)
    for first in range(0, NUM_TOKENS, chunk):
        num_rows = min(chunk, NUM_TOKENS - first)
        for visual in visual_rows(features, SPANS, first, num_rows):
            assert 0 <= visual.rows.start < visual.rows.stop <= num_rows
            for level, rows_mk in enumerate((visual.tokens_mk, *visual.deepstack_mk)):
                found[level, first:][visual.rows] = rows_mk[:, 0]
    expected = np.full(NUM_TOKENS, -1.0)
    expected[[*range(2, 10), *range(13, 17)]] = range(12)
    assert np.array_equal(found[0], expected)
    for level in (1, 2):
        assert np.array_equal(found[level], np.where(expected < 0, -1, expected + 100 * level))


def test_features_are_given_back(cpu_backend: Backend) -> None:
    before = cpu_backend.memory().allocated_bytes
    rows_mn = [cpu_backend.zeros((12, 4), np.float32) for _ in range(2)]
    encoded = EncodedVisuals(cpu_backend, [], VisionFeatures(rows_mn[0], (rows_mn[1],)), Path("model"))
    assert cpu_backend.memory().allocated_bytes == before + encoded.num_bytes == before + 2 * 12 * 4 * 4
    encoded.free()
    assert encoded.num_bytes == 0
    assert cpu_backend.memory().allocated_bytes == before


def test_a_sequence_turns_each_slot_by_its_position(cpu_backend: Backend, oracle: Path) -> None:
    """By the pictures' positions with the decoded text's after them; and by those of text again for the next prompt."""
    text = read_config(oracle / "checkpoints/tiny-28L/config.json").text
    sequence = DeviceSequence(cpu_backend, text, 40)
    arrays = sequence.state.cos_sd, sequence.state.sin_sd
    pictures = prompt_positions(NUM_TOKENS, SPANS)
    for positions, of_slots in (
        (None, text_positions(40)),
        (pictures, continued(pictures, 40)),
        (pictures[:, :7], continued(pictures[:, :7], 40)),
        (None, text_positions(40)),
    ):
        num_ids = 5 if positions is None else positions.shape[1]
        sequence.start(sequence, list(range(num_ids)), positions)
        for found, expected in zip(arrays, rotation_table(text, of_slots), strict=True):
            assert np.array_equal(found, expected)
        assert sequence.state.tokens[:num_ids].tolist() == list(range(num_ids))
        assert sequence.state.position.tolist() == [0]
