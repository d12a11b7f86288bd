"""A token's ring of keys and values, simulated: every warp takes the boxes it means and nobody waits for ever; where
the ring is too small for a split's keys, or warps do not meet behind them, that fails."""

from __future__ import annotations

from random import Random

import pytest

from kestrel_cuda.backends.token_cuts import LEAST_KV_SLOTS, MOST_KV_SLOTS, SPLIT_SLOTS, SUBTILES
from tests.kernel_sources import constants
from tests.kv_ring_simulation import KEY_TAKERS, MOST_KV_ON_THEIR_WAY, KvBlock, SliceBlock
from tests.token_ring_simulation import RingFault, run


def splits_of_layers(rng: Random) -> list[int]:
    """One to three units a layer, whole splits or of any length, in two to four layers."""
    units = [rng.choice((SPLIT_SLOTS, rng.randint(1, SPLIT_SLOTS))) for _ in range(rng.randint(1, 3))]
    return units * rng.randint(2, 4)


def fails(num_slots: int, seed: int, *, meet_behind_keys: bool) -> bool:
    rng = Random(seed)
    block = KvBlock(splits_of_layers(rng), num_slots, meet_behind_keys=meet_behind_keys)
    try:
        run(block, rng, newest_first=seed % 2 == 0)
    except RingFault:
        return True
    return False


def test_the_simulation_has_the_kernels_numbers() -> None:
    kernel = constants("token_int8_boxed")
    assert (kernel["kKeyTakers"], kernel["kMostKvOnTheirWay"]) == (KEY_TAKERS, MOST_KV_ON_THEIR_WAY)


@pytest.mark.parametrize("num_slots", range(LEAST_KV_SLOTS, MOST_KV_SLOTS + 1))
@pytest.mark.parametrize("newest_first", [False, True])
def test_every_warp_takes_the_boxes_it_means(num_slots: int, newest_first: bool) -> None:
    for seed in range(150):
        rng = Random(seed)
        run(KvBlock(splits_of_layers(rng), num_slots), rng, newest_first=newest_first)
    for length in range(1, SPLIT_SLOTS + 1, 5):
        run(KvBlock([length] * 3, num_slots), Random(length), newest_first=newest_first)


@pytest.mark.parametrize("num_slots", [2, 3])
def test_in_fewer_slots_than_subtiles_a_warp_takes_a_wrong_box_or_waits_for_ever(num_slots: int) -> None:
    assert any(fails(num_slots, seed, meet_behind_keys=True) for seed in range(40))


# In more slots a warp that waits for values has seen whatever keys lay there.
@pytest.mark.parametrize("num_slots", [4, 5, 6])
def test_unless_warps_meet_behind_keys_one_takes_a_wrong_box(num_slots: int) -> None:
    assert any(fails(num_slots, seed, meet_behind_keys=False) for seed in range(1000))


@pytest.mark.parametrize("newest_first", [False, True])
def test_every_warp_takes_the_slices_it_means(newest_first: bool) -> None:
    for seed in range(150):
        rng = Random(seed)
        run(SliceBlock(splits_of_layers(rng), SUBTILES), rng, newest_first=newest_first)
    for length in range(1, SPLIT_SLOTS + 1, 5):
        run(SliceBlock([length] * 3, SUBTILES), Random(length), newest_first=newest_first)


@pytest.mark.parametrize("num_slots", [3, SUBTILES])
def test_slices_in_fewer_slots_or_without_a_barrier_are_mistaken(num_slots: int) -> None:
    def fails(seed: int) -> bool:
        rng = Random(seed)
        block = SliceBlock(splits_of_layers(rng), num_slots, meet_behind_boxes=num_slots < SUBTILES)
        try:
            run(block, rng, newest_first=seed % 2 == 0)
        except RingFault:
            return True
        return False

    assert any(fails(seed) for seed in range(1000))
