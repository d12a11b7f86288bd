"""Freed device slabs kept for reuse by exact geometry. Knows nothing of layers or of when to evict.

Giving memory back to the driver waits for the whole device, once a layer under a window; keeping the buffer turns an
eviction into a pointer move.
"""

from __future__ import annotations

from kestrel_cuda.backends.base import Slab
from kestrel_cuda.quant.packed import PackedGeometry, SlabLayout

MAX_BUFFERS = 128


class BufferPool:
    """At most `max_buffers` slabs, found again by equal geometry."""

    def __init__(self, max_buffers: int = MAX_BUFFERS) -> None:
        self._max_buffers = max_buffers
        self._free: dict[tuple[PackedGeometry, ...], list[Slab]] = {}
        self.num_hits = 0
        self.num_misses = 0

    def __len__(self) -> int:
        return sum(map(len, self._free.values()))

    @property
    def num_bytes(self) -> int:
        return sum(slab.layout.num_bytes for slabs in self._free.values() for slab in slabs)

    def take(self, layout: SlabLayout) -> Slab | None:
        """A slab whose every matrix has the shape `layout` asks for; None when there is none."""
        slabs = self._free.get(layout.geometry)
        if not slabs:
            self.num_misses += 1
            return None
        self.num_hits += 1
        return slabs.pop()

    def give_back(self, slab: Slab) -> bool:
        """Keep a slab; False when the pool is full and the caller must free it."""
        if len(self) >= self._max_buffers:
            return False
        self._free.setdefault(slab.layout.geometry, []).append(slab)
        return True

    def drain(self) -> list[Slab]:
        """Every slab held, handed over."""
        slabs = [slab for held in self._free.values() for slab in held]
        self._free.clear()
        return slabs
