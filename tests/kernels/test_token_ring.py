"""A token's ring of weights, simulated: no box is taken for another and nobody waits for ever, up to the bound that the
host sets; one slot less and somebody does."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from kestrel_cuda.backends.token_cuts import (
    BOX_ITEMS,
    LEAST_ON_THEIR_WAY,
    MOST_ON_THEIR_WAY,
    Cut,
    copy_order,
    cut_token,
    most_on_their_way,
)
from kestrel_cuda.quant.packed import Element, PackedGeometry
from tests.token_ring_simulation import Block, RingFault, run, walk_of

SHAPES = {
    "2b": (2048, 2048, 4096, 6144),
    "4b": (2560, 4096, 6144, 9728),
    "8b": (4096, 4096, 6144, 12288),
    "halves of few items": (1024, 1024, 2048, 4608),
}
"""(hidden size, attended, joint projection, products of the MLP)"""

VOCABULARY, NUM_BLOCKS, NUM_LAYERS = 20000, 132, 2


def cuts_of(name: str) -> list[Cut]:
    hidden, attended, joint, products = SHAPES[name]
    shapes = ((hidden, joint), (attended, hidden), (hidden, 2 * products), (products, hidden), (hidden, VOCABULARY))
    *layer, lm_head = (PackedGeometry(Element.INT8, k, n, 32) for k, n in shapes)
    return [replace(cut, sets_at_once=2) for cut in cut_token(layer, lm_head, NUM_BLOCKS)]


def blocks(name: str, most: int, *, slots_less: int = 0) -> list[Block]:
    """A lower half, an upper half, one without a half and the last, in the fewest slots they may have."""
    cuts = cuts_of(name)
    num_slots = most + max(cut.most_ahead(NUM_BLOCKS) for cut in cuts)
    assert most_on_their_way(cuts, num_slots, NUM_BLOCKS) == most
    found = []
    for block in (0, 1, NUM_BLOCKS - 6, NUM_BLOCKS - 1):
        walks = [walk_of(cut, block, NUM_BLOCKS) for cut in cuts[:4] * NUM_LAYERS + cuts[4:]]
        found.append(Block([walk for walk in walks if walk], num_slots - slots_less, most))
    return found


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("newest_first", [False, True])
def test_every_warp_takes_the_boxes_it_means(name: str, newest_first: bool) -> None:
    for most in range(LEAST_ON_THEIR_WAY, MOST_ON_THEIR_WAY + 1):
        for seed in range(3):
            for block in blocks(name, most):
                run(block, Random(seed), newest_first=newest_first)


def test_boxes_are_as_many_as_the_host_lists() -> None:
    cuts = cuts_of("4b")
    for block, (num_of_layer, num_of_head, *_) in enumerate(copy_order(cuts, NUM_BLOCKS).tolist()):
        walks = [walk_of(cut, block, NUM_BLOCKS) for cut in cuts]
        num_boxes = [sum(-(-items // BOX_ITEMS) for items, _ in walk) for walk in walks]
        assert (sum(num_boxes[:4]), num_boxes[4]) == (num_of_layer, num_of_head)


@pytest.mark.parametrize("most", [2, 3])
def test_with_a_slot_less_a_warp_takes_a_wrong_box_or_waits_for_ever(most: int) -> None:
    def fails(block: Block, seed: int) -> bool:
        try:
            run(block, Random(seed), newest_first=True)
        except RingFault:
            return True
        return False

    assert any(fails(block, seed) for seed in range(10) for block in blocks("2b", most, slots_less=1))
