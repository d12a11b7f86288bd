"""One block's ring of weights on the CPU: the copying thread and the warps of kernels/token_ring.cuh and
token_sums.cuh, stepped in any order, over barriers that know their turns by parity alone, as the hardware's do.

Boxes have numbers in the order of their use and land in any order. What a warp takes must be the box it means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

WARPS, BOX_ITEMS, MOST_WHILE_WAITING = 16, 4, 2

Waits = Iterator[Callable[[], bool]]
"""What a thread waits for, one after the other."""


class RingFault(Exception):
    """A warp took another box than it meant, or nobody can go on."""


@dataclass
class Barrier:
    """Turns over when `count` have arrived."""

    count: int
    arrived: int = 0
    turns: int = 0

    def arrive(self, times: int = 1) -> None:
        self.arrived += times
        if self.arrived > self.count:
            raise RingFault(f"{self.arrived} arrivals at a barrier of {self.count}")
        if self.arrived == self.count:
            self.arrived, self.turns = 0, self.turns + 1

    def is_over(self, parity: int) -> bool:
        """The hardware's answer: the turn under way has the other parity."""
        return self.turns % 2 != parity


class Block:
    """`walks` are the stages in turn, each a list of (items, whether the warps meet behind them)."""

    def __init__(self, walks: Sequence[Sequence[tuple[int, bool]]], num_slots: int, most_while_summing: int) -> None:
        self.walks, self.num_slots, self.most = walks, num_slots, most_while_summing
        self.full = [Barrier(1) for _ in range(num_slots)]
        self.empty = [Barrier(BOX_ITEMS) for _ in range(num_slots)]
        self.holds: list[int | None] = [None] * num_slots
        self.on_their_way: list[int] = []
        self.is_summing = False
        self.meeting = Barrier(WARPS)
        self.num_boxes = sum(-(-items // BOX_ITEMS) for walk in walks for items, _ in walk)

    def land(self, box: int) -> None:
        self.on_their_way.remove(box)
        self.holds[box % self.num_slots] = box
        self.full[box % self.num_slots].arrive()

    def copies(self) -> Waits:
        """Ring's `copy_all`."""
        behind = 0
        for box in range(self.num_boxes):
            lap, slot = divmod(box, self.num_slots)
            yield lambda slot=slot, lap=lap: self.empty[slot].is_over(1 - lap % 2)  # type: ignore[misc]
            while box - behind >= (self.most if self.is_summing else MOST_WHILE_WAITING):
                lap, older = divmod(behind, self.num_slots)
                yield lambda older=older, lap=lap: self.full[older].is_over(lap % 2)  # type: ignore[misc]
                behind += 1
            self.holds[slot] = None
            self.on_their_way.append(box)

    def sums(self, warp: int) -> Waits:
        """Summer, stage by stage: its first item before the input is awaited, the others as their turn comes."""
        start = 0
        for walk in self.walks:
            is_taken = warp < walk[0][0]
            if is_taken:
                yield from self._take(start, warp, walk[0][0])
            yield from self._meet()
            self.is_summing = True
            for items, meets in walk:
                for item in range(warp, items, WARPS):
                    if not is_taken:
                        yield from self._take(start, item, items)
                    is_taken = False
                is_taken = False
                start += -(-items // BOX_ITEMS)
                if meets:
                    yield from self._meet()
            if warp == 0:
                self.is_summing = False

    def _take(self, start: int, item: int, items: int) -> Waits:
        box = start + item // BOX_ITEMS
        lap, slot = divmod(box, self.num_slots)
        yield lambda: self.full[slot].is_over(lap % 2)
        if self.holds[slot] != box:
            raise RingFault(f"warp {item % WARPS} took {self.holds[slot]} for box {box}")
        self.empty[slot].arrive(BOX_ITEMS - item % BOX_ITEMS if item == items - 1 else 1)

    def _meet(self) -> Waits:
        turn = self.meeting.turns
        self.meeting.arrive()
        yield lambda: self.meeting.turns > turn


def walk_of(cut: Any, block: int, num_blocks: int) -> list[tuple[int, bool]]:
    """What a block sums up of a matrix: items of its half and of its sets, and whether the warps meet behind each."""
    num_whole = cut.num_sets - cut.num_halved
    if block >= num_whole:
        return []
    walk = []
    if block < 2 * cut.num_halved:
        lower = (cut.num_pieces // 2) << cut.gate_up
        walk.append((cut.num_items - lower, False) if block % 2 else (lower, True))
    num_own = len(range(block, num_whole, num_blocks))
    return walk + [(cut.num_items, i % cut.sets_at_once == 0 or i == num_own) for i in range(1, num_own + 1)]


def run(block: Block, rng: Random, *, newest_first: bool) -> None:
    """Until every warp is through. Raises RingFault. `newest_first`: boxes land as late as can be, in reverse."""
    threads = [block.copies(), *(block.sums(warp) for warp in range(WARPS))]
    waits: dict[int, Callable[[], bool]] = dict.fromkeys(range(len(threads)), lambda: True)
    while waits:
        ready = [thread for thread, is_over in waits.items() if is_over()]
        if block.on_their_way and (not ready or (not newest_first and rng.random() < 0.2)):
            block.land(max(block.on_their_way) if newest_first else rng.choice(block.on_their_way))
        elif ready:
            thread = rng.choice(ready)
            following = next(threads[thread], None)
            if following is None:
                del waits[thread]
            else:
                waits[thread] = following
        else:
            raise RingFault(f"threads {sorted(waits)} wait for ever")
    if block.on_their_way or any(barrier.arrived for barrier in (*block.full, *block.empty)):
        raise RingFault("boxes are left over")
