"""Host copies of layer slabs that do not all fit in memory: a few stay, the others come from disk through a ring.

A reader thread fills ring slots ahead of use, in the order the device window will ask for them, and lets the system
forget the file's pages behind it. Knows the order of layers and when a slot is free again; nothing of what slabs hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.quant.packed import SlabLayout

RING_SLOTS = 3
"""One slot on its way to the device, one full, one being read."""


class SlabFile(Protocol):
    """Where slabs lie on disk; quant/strip_cache.py is one."""

    def read_into(self, layout: SlabLayout, host: NDArray[np.uint8], *, verify: bool = True) -> None: ...

    def advise_away(self, layer: int) -> None: ...


@dataclass
class _Slot:
    host: NDArray[np.uint8]
    layer: int = -1
    ready: bool = False
    taken: bool = False
    wait_free: Callable[[], None] = field(default=lambda: None)
    freed: int = 0


class StreamedHost:
    """Host slabs of `cycle`, the layers a token uploads in their order, each again and again, from a verified file.

    `make_slab` gives a host buffer the device can copy from. `num_kept` of the cycle's layers, spread evenly, are held
    for good; the others pass through the ring. Errors of the reader thread surface in `get`.
    """

    def __init__(
        self,
        file: SlabFile,
        layouts: Sequence[SlabLayout],
        cycle: Sequence[int],
        num_kept: int,
        make_slab: Callable[[SlabLayout], NDArray[np.uint8]],
    ) -> None:
        self._file = file
        self._layouts = {layout.layer: layout for layout in layouts}
        num_kept = min(num_kept, len(cycle))
        kept = {cycle[i * len(cycle) // num_kept] for i in range(num_kept)}
        self._kept = {layer: make_slab(self._layouts[layer]) for layer in sorted(kept)}
        for layer, host in self._kept.items():
            file.read_into(self._layouts[layer], host)
            file.advise_away(layer)
        self._cycle = [layer for layer in cycle if layer not in kept]
        largest = max(layouts, key=lambda layout: layout.num_bytes)
        self._slots = [_Slot(make_slab(largest)) for _ in range(RING_SLOTS)] if len(kept) < len(layouts) else []
        self._changed = threading.Condition()
        self._wanted: list[int] = []
        self._error: BaseException | None = None
        self._closed = False
        self._num_handed_over = 0
        self._thread = threading.Thread(target=self._read_ahead, name="host-residency", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Host memory held: kept layers and the ring."""
        return sum(host.nbytes for host in self._kept.values()) + sum(slot.host.nbytes for slot in self._slots)

    @property
    def kept_layers(self) -> list[int]:
        return list(self._kept)

    def get(self, layer: int) -> NDArray[np.uint8]:
        """The layer's bytes, waited for if they are still being read; valid until `handed_over` says otherwise.

        Raises whatever reading raised (DamagedStripCache, OSError).
        """
        if layer in self._kept:
            return self._kept[layer]
        with self._changed:
            if self._find(layer) is None:
                # First in line; what falls off the end gives its slot up, or none might ever be free.
                self._wanted = [layer, *(other for other in self._wanted if other != layer)][:RING_SLOTS]
            self._changed.notify_all()
            while (slot := self._find(layer)) is None or not slot.ready:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            slot.taken = True
            return slot.host[: self._layouts[layer].num_bytes]

    def handed_over(self, layer: int, wait_free: Callable[[], None]) -> None:
        """The layer's upload has been submitted; `wait_free` blocks until it has left the slot."""
        if layer in self._kept:
            return
        with self._changed:
            slot = self._find(layer)
            if slot is not None:
                self._num_handed_over += 1
                slot.layer, slot.ready, slot.taken = -1, False, False
                slot.wait_free, slot.freed = wait_free, self._num_handed_over
            self._wanted = self._after(layer)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop reading and let the buffers go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._slots.clear()
        self._kept.clear()

    def _after(self, layer: int) -> list[int]:
        """The next layers of the cycle, as many as the ring can hold."""
        later = [x for x in self._cycle if x > layer] + [x for x in self._cycle if x <= layer]
        return later[:RING_SLOTS]

    def _find(self, layer: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.layer == layer), None)

    def _next_read(self) -> tuple[_Slot, int] | None:
        """A slot that may be overwritten and the layer to read into it; None when there is nothing to do."""
        missing = [layer for layer in self._wanted if self._find(layer) is None]
        if not missing:
            return None
        # The one handed over longest ago first: its upload is the likeliest to be done.
        free = sorted((slot for slot in self._slots if slot.layer < 0), key=lambda slot: slot.freed)
        unwanted = [slot for slot in self._slots if slot.ready and not slot.taken and slot.layer not in self._wanted]
        candidates = free + unwanted
        return (candidates[0], missing[0]) if candidates else None

    def _read_ahead(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._closed and (work := self._next_read()) is None:
                        self._changed.wait()
                    if self._closed:
                        return
                    slot, layer = work  # type: ignore[misc]
                    slot.layer, slot.ready = layer, False
                slot.wait_free()
                layout = self._layouts[layer]
                self._file.read_into(layout, slot.host[: layout.num_bytes], verify=False)
                self._file.advise_away(layer)
                with self._changed:
                    slot.ready = True
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
