"""The weight cache: least recently used first, a budget in bytes, pins, and counts per weight."""

from __future__ import annotations

import numpy as np

from kestrel_cuda.backends.base import Slab
from kestrel_cuda.residency.cache import MAX_ENTRIES, WeightCache
from kestrel_cuda.weight_keys import LM_HEAD, LM_HEAD_LAYER, Projection, WeightKey
from tests.fake_backend import PLAIN, FakeBackend, head_layout, layer_layout

LAYER_BYTES = layer_layout(0).num_bytes


def put(cache: WeightCache, *layers: int) -> dict[int, Slab]:
    held = {}
    for layer in layers:
        layout = head_layout() if layer == LM_HEAD_LAYER else layer_layout(layer)
        held[layer] = FakeBackend().allocate_slab(layout)
        cache.put(layer, held[layer], tuple(entry.key for entry in layout.entries), pinned=layer == LM_HEAD_LAYER)
    return held


def test_weights_are_found_by_key() -> None:
    cache = WeightCache(1 << 30)
    held = put(cache, 2, 5)
    for layer, slab in held.items():
        assert cache.get(layer) is slab
        for projection in PLAIN:
            assert cache.weight(WeightKey(layer, projection)) is slab.weights[projection]
    assert cache.weight(WeightKey(2, Projection.Q)) is None, "a member of a fused weight is no entry of its own"
    assert cache.weight(WeightKey(3, Projection.O)) is None


def test_key_zero_finds_nothing() -> None:
    cache = WeightCache(1 << 30)
    put(cache, 0, 1, LM_HEAD_LAYER)
    nothing = WeightKey(0, Projection.Q)._replace(projection=-1)  # type: ignore[arg-type]
    assert nothing.packed == 0
    assert cache.weight(nothing) is None


def test_counts_are_per_weight_of_the_checkpoint() -> None:
    cache = WeightCache(1 << 30)
    put(cache, *range(28), LM_HEAD_LAYER)
    assert cache.num_weights == 197
    assert len(cache) == 28 * 4 + 1, "four packed weights a layer, two of them fused"
    cache.get(3)
    cache.get(LM_HEAD_LAYER)
    assert (cache.num_hits, cache.num_misses) == (8, 0)
    cache.evict(3)
    assert cache.get(3) is None
    assert (cache.num_weights, cache.num_evictions, cache.num_misses) == (190, 7, 1)
    assert cache.num_bytes == 27 * LAYER_BYTES + head_layout().num_bytes


def test_512_entries_at_least_fit() -> None:
    assert MAX_ENTRIES == 512
    cache = WeightCache(1 << 40)
    for layer in range(129):
        assert bool(cache.make_room(LAYER_BYTES, 4)) == (layer == 128), layer
        put(cache, layer)
    assert len(cache) == 512
    assert 0 not in cache


def test_the_least_recently_used_leaves_first() -> None:
    cache = WeightCache(4 * LAYER_BYTES)
    held = put(cache, 0, 1, 2, 3)
    cache.get(0)
    cache.get(2)
    assert cache.layers == [1, 3, 0, 2]
    assert cache.make_room(2 * LAYER_BYTES, 8) == {1: held[1], 3: held[3]}
    assert cache.layers == [0, 2]
    assert all(cache.weight(WeightKey(1, projection)) is None for projection in PLAIN)


def test_room_that_is_there_evicts_nothing() -> None:
    cache = WeightCache(4 * LAYER_BYTES)
    put(cache, 0, 1, 2)
    assert cache.make_room(LAYER_BYTES, 4) == {}
    assert len(cache.make_room(LAYER_BYTES + 1, 4)) == 1


def test_a_pinned_slab_never_leaves() -> None:
    cache = WeightCache(head_layout().num_bytes + LAYER_BYTES)
    put(cache, LM_HEAD_LAYER, 0)
    assert list(cache.make_room(1 << 40, 4)) == [0]
    assert cache.layers == [LM_HEAD_LAYER]
    assert cache.weight(LM_HEAD) is not None
    assert cache.make_room(1 << 40, 4) == {}


def test_any_order_of_use_keeps_to_the_budget() -> None:
    random = np.random.default_rng(7)
    for _ in range(50):
        room = int(random.integers(1, 9))
        cache = WeightCache(room * LAYER_BYTES)
        recent: list[int] = []
        for layer in random.integers(0, 12, 60).tolist():
            slab = cache.get(layer)
            assert (slab is None) == (layer not in recent[-room:])
            if slab is None:
                cache.make_room(LAYER_BYTES, 4)
                put(cache, layer)
            recent = [other for other in recent if other != layer] + [layer]
            assert cache.num_bytes <= cache.budget_bytes
            assert cache.layers == recent[-room:]
