"""The weight store over a backend that only records: what is uploaded, where to, and what is allocated for it."""

from __future__ import annotations

import pytest

from kestrel_cuda.config import Evict, Policy
from kestrel_cuda.quant.packed import Element
from kestrel_cuda.residency.store import WeightStore
from kestrel_cuda.residency.window import PastOnlyWindow, make_window
from kestrel_cuda.weight_keys import LM_HEAD_LAYER, Projection
from tests.fake_backend import (
    PLAIN,
    FakeBackend,
    head_layout,
    layer_layout,
    loaded_store,
    members,
    no_progress,
    run_token,
)

L = 28
LAYER_BYTES, HEAD_BYTES = layer_layout(0).num_bytes, head_layout().num_bytes
RESIDENT_WEIGHTS = {27: 190, 26: 183, 20: 141, 12: 85, 4: 29, 1: 8}


def windowed(backend: FakeBackend, num_layers: int, keep: int) -> WeightStore:
    return loaded_store(backend, num_layers, window=PastOnlyWindow(num_layers, keep), preload=True)


@pytest.mark.parametrize("num_load_threads", [1, 3])
def test_loading_reports_each_layer_and_each_tensor(num_load_threads: int) -> None:
    done = []
    for options in ({"preload": True}, {"preload": False}):
        backend = FakeBackend(num_load_threads)
        store = WeightStore(
            backend,  # type: ignore[arg-type]
            [layer_layout(layer) for layer in range(5)],
            head_layout(),
            window=None,
            budget_bytes=1 << 40,
            **options,
        )
        done.clear()
        found = store.load(members, lambda number, total: done.append((number, total)))
        assert done == [(number, 6) for number in range(1, 7)]
        names = [f"{layer}.{member.name}" for layer in range(5) for p in PLAIN for member in p.members]
        assert [tensor.name for tensor in found] == [*names, f"{LM_HEAD_LAYER}.LM_HEAD"]
        assert store.num_weights == 36


@pytest.mark.parametrize("num_load_threads", [1, 3])
def test_preloaded_weights_are_packed_in_place(num_load_threads: int) -> None:
    backend = FakeBackend(num_load_threads)
    store = loaded_store(backend, 6, preload=True)
    assert store.is_static
    before = list(backend.events)
    run_token(store, 6)
    run_token(store, 6)
    assert backend.events == before, "nothing moves"
    assert (backend.count("upload"), backend.count("download"), backend.count("free")) == (0, 0, 0)
    assert backend.count("allocate") == 7
    assert (store.cache.num_hits, store.cache.num_misses) == (2 * 43, 0)


@pytest.mark.parametrize("num_load_threads", [1, 3])
def test_lazy_weights_are_uploaded_once(num_load_threads: int) -> None:
    backend = FakeBackend(num_load_threads)
    store = loaded_store(backend, 6)
    assert not store.is_static
    assert backend.allocated_bytes == 0, "packing gave its scratch back"
    assert backend.uploads() == []
    run_token(store, 6)
    assert store.is_static
    assert backend.uploads() == [*range(6), LM_HEAD_LAYER]
    assert backend.bytes_uploaded == 6 * LAYER_BYTES + HEAD_BYTES == store.counters.h2d_bytes == store.bytes_per_pass
    before = list(backend.events)
    run_token(store, 6)
    assert backend.events == before


def test_packing_one_by_one_needs_one_layer_of_scratch() -> None:
    backend = FakeBackend(num_load_threads=1)
    loaded_store(backend, 10)
    assert backend.peak_bytes == max(LAYER_BYTES, HEAD_BYTES)
    assert backend.count("allocate") == 2


@pytest.mark.parametrize("num_load_threads", [1, 3])
@pytest.mark.parametrize("keep", RESIDENT_WEIGHTS)
def test_a_window_over_28_layers(keep: int, num_load_threads: int) -> None:
    backend = FakeBackend(num_load_threads)
    store = windowed(backend, L, keep)
    assert store.cache.layers == [], "a window skips the preload"
    loading = len(backend.events)
    run_token(store, L)
    assert backend.uploads() == [*range(L), LM_HEAD_LAYER]
    run_token(store, L)
    warm = len(backend.events)
    store.reset_counters()
    for _ in range(3):
        run_token(store, L)
        assert store.cache.num_weights == RESIDENT_WEIGHTS[keep]
    since = backend.events[warm:]
    assert {event.what for event in since} == {"upload"}, "no allocation and no free once warm"
    assert [event.layer for event in since] == list(range(L - keep)) * 3
    assert store.counters.pass_uploads == [L - keep] * 3
    assert store.counters.pass_h2d_bytes == [(L - keep) * LAYER_BYTES] * 3
    assert store.counters.layer_uploads == [3] * (L - keep) + [0] * keep
    peak = min(L, 2 * keep)
    assert store.counters.peak_layers == peak
    assert store.counters.peak_weight_bytes == peak * LAYER_BYTES + HEAD_BYTES
    assert backend.allocated_bytes == peak * LAYER_BYTES + HEAD_BYTES, "the pool holds no more than the peak needs"
    assert sum(event.what == "allocate" for event in backend.events[loading:]) == peak + 1
    assert (store.pool.num_hits, store.pool.num_misses) == (3 * (L - keep), 0)
    assert store.cache.num_evictions == 3 * 7 * (L - keep)
    assert store.cache.num_misses == 3 * (L - keep)
    assert store.cache.num_hits == 3 * (7 * keep + 1)


def test_a_window_of_every_layer_uploads_each_once() -> None:
    backend = FakeBackend()
    store = windowed(backend, 5, 5)
    for _ in range(3):
        run_token(store, 5)
    assert backend.uploads() == [*range(5), LM_HEAD_LAYER]
    assert not store.is_static, "an address under a window may change"


def test_random_sizes_and_keeps_hold_their_own_bytes() -> None:
    """`run_token` and the fake check every byte; here only that no shape of window escapes them."""
    for num_layers in range(1, 9):
        for keep in range(1, num_layers + 1):
            backend = FakeBackend()
            store = windowed(backend, num_layers, keep)
            for _ in range(4):
                run_token(store, num_layers)
            assert backend.count("upload") == num_layers + 1 + 3 * (num_layers - keep)


def test_slabs_are_reused_by_exact_geometry() -> None:
    """Layers of two shapes in turn: a slab of one never serves the other."""
    backend = FakeBackend()
    layouts = [layer_layout(layer, 32 if layer % 2 else 64) for layer in range(6)]
    store = WeightStore(
        backend,  # type: ignore[arg-type]
        layouts,
        head_layout(),
        window=PastOnlyWindow(6, 1),
        preload=False,
        budget_bytes=1 << 40,
    )
    backend.store = store
    store.load(members, no_progress)
    for _ in range(2):
        run_token(store, 6)
    warm = len(backend.events)
    for _ in range(3):
        run_token(store, 6)
    assert {event.what for event in backend.events[warm:]} == {"upload"}
    small = {event.slab for event in backend.events if event.what == "upload" and event.layer in (1, 3, 5)}
    large = {event.slab for event in backend.events if event.what == "upload" and event.layer in (0, 2, 4)}
    assert not small & large


def test_a_budget_below_the_model_evicts_the_least_recently_used() -> None:
    """Without a window a cyclic scan then misses every time, which is why the plan chooses a window instead."""
    backend = FakeBackend()
    store = loaded_store(backend, 6, budget_bytes=3 * LAYER_BYTES + HEAD_BYTES)
    for _ in range(3):
        run_token(store, 6)
        assert store.cache.num_bytes <= store.cache.budget_bytes
    assert store.counters.pass_uploads == [6, 6, 6]
    assert store.cache.layers == [3, 4, 5, LM_HEAD_LAYER]
    assert backend.allocated_bytes <= store.cache.budget_bytes + LAYER_BYTES
    assert not store.is_static
    warm = len(backend.events)
    run_token(store, 6)
    assert {event.what for event in backend.events[warm:]} == {"upload"}


def test_more_than_512_weights_raise_the_slot_limit() -> None:
    backend = FakeBackend()
    store = loaded_store(backend, 150, preload=True)
    assert store.cache.max_entries == len(store.cache) == 150 * 4 + 1
    run_token(store, 150)
    assert store.cache.num_weights == 150 * 7 + 1
    assert (store.cache.num_misses, store.cache.num_evictions, backend.count("upload")) == (0, 0, 0)
    assert loaded_store(FakeBackend(), 3).cache.max_entries == 512


def test_counters_start_anew_and_the_peak_from_what_is_resident() -> None:
    store = windowed(FakeBackend(), 8, 3)
    run_token(store, 8)
    run_token(store, 8)
    assert store.counters.peak_layers == 6
    store.reset_counters()
    assert (store.counters.peak_layers, store.counters.h2d_bytes) == (3, 0)
    assert store.counters.layer_uploads == [0] * 8
    assert (store.cache.num_hits, store.cache.num_misses, store.cache.num_evictions) == (0, 0, 0)


def test_a_replayed_pass_counts_as_hits() -> None:
    store = loaded_store(FakeBackend(), 4, preload=True)
    run_token(store, 4)
    hits = store.cache.num_hits
    store.begin_pass()
    store.count_resident_pass()
    assert store.cache.num_hits == 2 * hits == 2 * 29


@pytest.mark.parametrize("keep", [None, 2])
def test_closing_gives_every_slab_back(keep: int | None) -> None:
    backend = FakeBackend()
    store = loaded_store(backend, 6, window=PastOnlyWindow(6, keep) if keep else None, preload=not keep)
    run_token(store, 6)
    run_token(store, 6)
    store.close()
    assert backend.allocated_bytes == 0
    assert backend.count("allocate") == backend.count("free")
    assert len(store.cache) == len(store.pool) == 0


def test_layouts_are_what_these_tests_take_them_for() -> None:
    layout = layer_layout(3)
    assert layout.num_weights == 7
    assert {entry.geometry.element for entry in layout.entries} == {Element.INT8}
    assert [entry.key.projection for entry in layout.entries] == [
        Projection.QKV, Projection.O, Projection.GATE_UP, Projection.DOWN,
    ]  # fmt: skip


class TestTheFakeItself:
    """It has to see the faults it is there for."""

    def test_an_upload_over_a_resident_layer(self) -> None:
        backend = FakeBackend()
        store = loaded_store(backend, 3)
        run_token(store, 3)
        held = store.cache.get(1)
        assert held is not None
        with pytest.raises(AssertionError, match="layer 0 is uploaded over layer 1"):
            backend.upload(held, store._host[0])

    def test_another_layers_bytes(self) -> None:
        backend = FakeBackend()
        store = loaded_store(backend, 3)
        store._host[1][:] = store._host[2]
        with pytest.raises(AssertionError, match="host copy of layer 1"):
            run_token(store, 3)

    def test_a_slab_overwritten_while_it_is_resident(self) -> None:
        store = loaded_store(FakeBackend(), 3)
        run_token(store, 3)
        held = store.cache.get(2)
        assert held is not None
        held.raw[:] = 0
        with pytest.raises(AssertionError, match="layer 2: QKV"):
            run_token(store, 3)

    def test_freed_slabs(self) -> None:
        backend = FakeBackend()
        store = loaded_store(backend, 3)
        run_token(store, 3)
        slab = store.cache.evict(1)
        backend.free_slab(slab)
        with pytest.raises(AssertionError, match="freed twice"):
            backend.free_slab(slab)
        with pytest.raises(AssertionError, match="was freed"):
            backend.upload(slab, store._host[1])

    @pytest.mark.parametrize("method", ["wait_upload", "release"])
    def test_steps_that_read_too_early_or_too_late(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        """A wait left out; a release right behind the wait, ahead of the steps that read."""
        backend = FakeBackend()
        store = loaded_store(backend, 3, window=make_window(Policy.PINNED, 3, 1, 0), preload=True)
        wait = backend.wait_upload
        faulty = {"wait_upload": lambda _slab: None, "release": lambda slab: (wait(slab), backend.release(slab))}
        monkeypatch.setattr(backend, "wait_upload", faulty[method])
        said = {"wait_upload": "before its upload was waited for", "release": "released before"}
        with pytest.raises(AssertionError, match=said[method]):
            run_token(store, 3)


@pytest.mark.parametrize(("evict", "num_freed"), [(Evict.POOL, 0), (Evict.FREE, 3 * (L - 4))])
def test_evicted_slabs_go_where_they_are_told_to(evict: Evict, num_freed: int) -> None:
    backend = FakeBackend()
    store = loaded_store(backend, L, window=PastOnlyWindow(L, 4), preload=True, evict=evict)
    run_token(store, L)
    before, evictions = backend.count("free"), store.cache.num_evictions
    for _ in range(3):
        run_token(store, L)
    assert backend.count("free") - before == num_freed
    assert backend.count("allocate") - len(backend._live) == backend.count("free")
    assert store.cache.num_evictions - evictions == 3 * (L - 4) * 7


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3, 9])
def test_every_rule_and_depth_reads_its_own_bytes_within_its_peak(policy: Policy, prefetch: int) -> None:
    for num_layers in (1, 2, 3, 5, 8):
        for keep in range(1, num_layers + 1):
            backend, window = FakeBackend(), make_window(policy, num_layers, keep, prefetch)
            assert window is not None
            store = loaded_store(backend, num_layers, window=window, preload=True)
            for _ in range(4):
                run_token(store, num_layers)
            warm = len(backend.events)
            store.reset_counters()
            for _ in range(3):
                run_token(store, num_layers)
            since, case = backend.events[warm:], (num_layers, keep)
            assert {event.what for event in since} <= {"upload"}, case
            assert store.counters.pass_uploads == [window.uploads_per_token] * 3, case
            assert sorted({event.layer for event in since}) == window.upload_cycle, case
            assert store.counters.peak_layers <= window.peak_layers, case
            assert backend.allocated_bytes <= window.peak_layers * LAYER_BYTES + HEAD_BYTES, case


@pytest.mark.parametrize("policy", [Policy.PAST_ONLY, Policy.PINNED])
def test_what_is_fetched_ahead_costs_no_upload(policy: Policy) -> None:
    for keep in (1, 4, 13, 27):
        per_token = {make_window(policy, L, keep, depth).uploads_per_token for depth in (0, 1, 2, 5)}  # type: ignore[union-attr]
        assert per_token == {L - keep}
