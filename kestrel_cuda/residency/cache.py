"""Device weights by key, least recently used first, with a byte budget. Knows nothing of uploads or layer order.

Entries are weights; they live and leave by slab, since a slab is one allocation. A pinned slab never leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kestrel_cuda.backends.base import Slab
from kestrel_cuda.backends.operands import DeviceWeight
from kestrel_cuda.weight_keys import WeightKey

MAX_ENTRIES = 512


@dataclass
class _Resident:
    slab: Slab
    keys: tuple[int, ...]
    num_weights: int
    pinned: bool


class WeightCache:
    """Slabs by layer and weights by packed key. `max_entries` rises to what a model needs, 512 at least."""

    def __init__(self, budget_bytes: int, max_entries: int = MAX_ENTRIES) -> None:
        self.budget_bytes = budget_bytes
        self.max_entries = max_entries
        self._resident: OrderedDict[int, _Resident] = OrderedDict()
        self._by_key: dict[int, DeviceWeight] = {}
        self.num_hits = 0
        self.num_misses = 0
        self.num_evictions = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, layer: int) -> bool:
        return layer in self._resident

    @property
    def layers(self) -> list[int]:
        """Resident layers, least recently used first; lm_head's number among them."""
        return list(self._resident)

    @property
    def num_weights(self) -> int:
        """Resident matrices of the checkpoint; the members of a fused weight count one each."""
        return sum(resident.num_weights for resident in self._resident.values())

    @property
    def num_bytes(self) -> int:
        return sum(resident.slab.layout.num_bytes for resident in self._resident.values())

    def get(self, layer: int) -> Slab | None:
        """The layer's slab, now the most recently used; counts its weights as hits, or one miss."""
        resident = self._resident.get(layer)
        if resident is None:
            self.num_misses += 1
            return None
        self._resident.move_to_end(layer)
        self.num_hits += resident.num_weights
        return resident.slab

    def weight(self, key: WeightKey) -> DeviceWeight | None:
        """One resident weight by its key; key 0 is never cached."""
        return self._by_key.get(key.packed)

    def make_room(self, num_bytes: int, num_entries: int) -> dict[int, Slab]:
        """Evict least recently used layers until this much more fits; returns what left, by layer.

        Pinned slabs stay, so the budget is exceeded when nothing else is left to evict.
        """
        left = {}
        for layer in self.layers:
            if self.num_bytes + num_bytes <= self.budget_bytes and len(self) + num_entries <= self.max_entries:
                break
            if not self._resident[layer].pinned:
                left[layer] = self.evict(layer)
        return left

    def put(self, layer: int, slab: Slab, keys: tuple[WeightKey, ...], *, pinned: bool = False) -> None:
        """Enter a slab under its layer; `keys` name its weights for this layer."""
        packed = tuple(key.packed for key in keys)
        self._resident[layer] = _Resident(slab, packed, sum(key.num_weights for key in keys), pinned)
        for key in keys:
            self._by_key[key.packed] = slab.weights[key.projection]

    def evict(self, layer: int) -> Slab:
        """Take a layer's weights out and hand its slab over."""
        resident = self._resident.pop(layer)
        for key in resident.keys:
            del self._by_key[key]
        self.num_evictions += resident.num_weights
        return resident.slab
