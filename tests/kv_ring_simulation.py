"""One block's ring of keys and values on the CPU: the copying thread and the warps of kernels/token_boxes.cuh with
attention_few.cuh, and of token_slice.cuh, over the barriers of tests/token_ring_simulation.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from kestrel_cuda.backends.token_cuts import SUBTILE_SLOTS, SUBTILES
from tests.token_ring_simulation import WARPS, Barrier, Block, RingFault, Waits

TILE_SLOTS = 8
KEY_TAKERS = SUBTILE_SLOTS // TILE_SLOTS
WARPS_PER_SUBTILE = WARPS // SUBTILES
MOST_KV_ON_THEIR_WAY = 2


class Place(NamedTuple):
    slot: int
    parity: int


class KvBlock(Block):
    """`splits` are the slots of each split in turn. `meet_behind_keys`: as the kernel's warps do."""

    def __init__(self, splits: Sequence[int], num_slots: int, *, meet_behind_keys: bool = True) -> None:
        super().__init__([], num_slots, MOST_KV_ON_THEIR_WAY)
        self.splits, self.meet_behind_keys = splits, meet_behind_keys
        self.empty = [Barrier(KEY_TAKERS) for _ in range(num_slots)]
        self.num_boxes = sum(2 * num_boxes_of(split) for split in splits)

    def step(self, place: Place, boxes: int) -> Place:
        """KvRing's, but that fewer slots than boxes to step over do not lead out of the ring."""
        laps, slot = divmod(place.slot + boxes, self.num_slots)
        return Place(slot, place.parity ^ laps % 2)

    def copies(self) -> Waits:
        """KvRing's `copy_all`."""
        place = Place(0, 1)
        for box in range(self.num_boxes):
            yield partial(self.empty[place.slot].is_over, place.parity)
            before = self.step(place, self.num_slots - MOST_KV_ON_THEIR_WAY)
            yield partial(self.full[before.slot].is_over, place.parity ^ (before.slot < place.slot))
            self.holds[place.slot] = None
            self.on_their_way.append(box)
            place = self.step(place, 1)

    def sums(self, warp: int) -> Waits:
        """BoxedSplit's `load_keys`, attend_split_of_row's barrier, split_of_few_rows, BoxedSplit's `go_on`."""
        place, box = Place(0, 0), 0
        subtile = (warp + WARPS // 2) % WARPS // WARPS_PER_SUBTILE
        for num_slots in self.splits:
            num_boxes = num_boxes_of(num_slots)
            for tile in (warp, warp + WARPS):
                own = tile // KEY_TAKERS
                if tile * TILE_SLOTS < num_slots:
                    yield from self._read(self.step(place, own), box + own)
                if own < num_boxes:
                    self.empty[self.step(place, own).slot].arrive()
            if self.meet_behind_keys:
                yield from self._meet()
            values = self.step(place, num_boxes)
            if subtile < num_boxes:
                own_values = self.step(values, subtile)
                yield from self._read(own_values, box + num_boxes + subtile)
                self.empty[own_values.slot].arrive(KEY_TAKERS // WARPS_PER_SUBTILE)
            for _ in range(3):
                yield from self._meet()
            place, box = self.step(values, num_boxes), box + 2 * num_boxes

    def _read(self, place: Place, box: int) -> Waits:
        """Others may go on between a box's arrival and the end of reading it."""
        for is_over in (partial(self.full[place.slot].is_over, place.parity), lambda: True):
            yield is_over
            if self.holds[place.slot] != box:
                raise RingFault(f"{self.holds[place.slot]} was taken for box {box}")


class SliceBlock(KvBlock):
    """Boxes of keys with a slice of their values; `splits` are the slots of each unit in turn."""

    def __init__(self, splits: Sequence[int], num_slots: int, *, meet_behind_boxes: bool = True) -> None:
        super().__init__(splits, num_slots, meet_behind_keys=meet_behind_boxes)
        self.empty = [Barrier(KEY_TAKERS + WARPS_PER_SUBTILE) for _ in range(num_slots)]
        self.num_boxes = sum(num_boxes_of(split) for split in splits)

    def sums(self, warp: int) -> Waits:
        """SlicePart's `load`, attend_slice's barriers."""
        place, box = Place(0, 0), 0
        subtile = (warp + WARPS // 2) % WARPS // WARPS_PER_SUBTILE
        for num_slots in self.splits:
            num_boxes, num_known = num_boxes_of(num_slots), num_slots - 1
            for tile in (warp, warp + WARPS):
                own = tile // KEY_TAKERS
                if own < num_boxes and tile * TILE_SLOTS < num_known:
                    yield from self._read(self.step(place, own), box + own)
                if own < num_boxes:
                    self.empty[self.step(place, own).slot].arrive()
            if subtile < num_boxes:
                yield from self._read(self.step(place, subtile), box + subtile)
                self.empty[self.step(place, subtile).slot].arrive()
            for _ in range(4 if self.meet_behind_keys else 0):
                yield from self._meet()
            place, box = self.step(place, num_boxes), box + num_boxes


def num_boxes_of(num_slots: int) -> int:
    """Of a split's keys, and as many of its values."""
    return -(-num_slots // SUBTILE_SLOTS)
