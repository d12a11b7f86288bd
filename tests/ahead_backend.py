"""A CPU backend whose steps count as unfinished until they are waited for; writes down what is submitted and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.backends.cpu import CpuBackend
from kestrel_cuda.backends.operands import SequenceState

UNREAD = -77
"""What the host sees of shared memory before it has waited: an id that nobody may take."""


class Event(NamedTuple):
    """`slot` is the cache slot that an id is for; of a wait for everything, the last one submitted."""

    what: str
    slot: int


@dataclass(frozen=True)
class Mark:
    """When it was set, the slot of the last id submitted before it, and what was in shared memory then."""

    time: float
    slot: int
    shared: tuple[NDArray[Any], ...]


class AheadBackend(CpuBackend):
    """Shared memory is as the host left it until a mark is waited for; then it is as it was at the mark or, of a device
    that is fast, as everything submitted has left it."""

    runs_ahead = True

    def __init__(self, *, is_fast: bool = False, captures: bool = False) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.is_fast, self.can_capture = is_fast, captures
        self.nan_slot: int | None = None
        self.interrupted_slot: int | None = None
        self._last_slot = 0
        self._shared: list[NDArray[Any]] = []
        self._seen: list[NDArray[Any]] = []

    def shared_zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        self._shared.append(np.zeros(shape, dtype))
        self._seen.append(np.full(shape, UNREAD, dtype))
        return self._shared[-1]

    def peek(self, array: NDArray[Any]) -> NDArray[Any]:
        return next(seen for shared, seen in zip(self._shared, self._seen, strict=True) if shared is array)

    def mark(self) -> Any:
        return Mark(super().mark(), self._last_slot, tuple(shared.copy() for shared in self._shared))

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return super().elapsed_ms(start.time, end.time)

    def wait(self, mark: Any) -> None:
        self.events.append(Event("read", mark.slot))
        if mark.slot == self.interrupted_slot:
            raise KeyboardInterrupt
        for seen, then, now in zip(self._seen, mark.shared, self._shared, strict=True):
            seen[...] = now if self.is_fast else then

    def synchronize(self) -> None:
        self.events.append(Event("wait for everything", self._last_slot))

    def choose(self, logits_v: NDArray[np.float32], num_ids: int, state: SequenceState, num_rows: int) -> None:
        self._last_slot = int(state.position[0]) + num_rows
        self.events.append(Event("submit", self._last_slot))
        if self._last_slot == self.nan_slot:
            logits_v = np.full_like(logits_v, np.nan)
        super().choose(logits_v, num_ids, state, num_rows)

    def attend(self, *arguments: Any) -> None:
        # A captured token is told of more slots than are filled.
        *others, num_rows, _num_slots = arguments
        state = next(argument for argument in others if isinstance(argument, SequenceState))
        super().attend(*others, num_rows, int(state.position[0]) + num_rows)

    def capture(self, steps: Any) -> Any:
        self.events.append(Event("capture", self._last_slot))
        return steps
