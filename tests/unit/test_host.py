"""Host slabs streamed from a file: the order of reads, reuse of the ring, what stays, and errors of the reader."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kestrel_cuda.backends.base import Slab
from kestrel_cuda.config import Policy
from kestrel_cuda.quant.packed import SlabLayout
from kestrel_cuda.residency.host import RING_SLOTS, StreamedHost
from kestrel_cuda.residency.store import WeightStore
from kestrel_cuda.residency.window import make_window
from kestrel_cuda.weight_keys import LM_HEAD_LAYER
from tests.fake_backend import FakeBackend, head_layout, layer_layout, marker, run_token

L = 9


class FakeFile:
    """Slabs full of their layer's number; remembers what was read and forgotten."""

    def __init__(self, broken: int | None = None) -> None:
        self.reads: list[int] = []
        self.forgotten: list[int] = []
        self.broken = broken

    def read_into(self, layout: SlabLayout, host: NDArray[np.uint8], *, verify: bool = True) -> None:
        if layout.layer == self.broken:
            raise OSError("a bad disk")
        self.reads.append(layout.layer)
        host[:] = marker(layout.layer)

    def advise_away(self, layer: int) -> None:
        self.forgotten.append(layer)


def streamed(file: FakeFile, num_kept: int, cycle: list[int] | None = None) -> StreamedHost:
    layouts = [layer_layout(layer) for layer in range(L)]
    return StreamedHost(
        file, layouts, list(range(L)) if cycle is None else cycle, num_kept, lambda x: np.zeros(x.num_bytes, np.uint8)
    )


def use(host: StreamedHost, layer: int) -> None:
    slab = host.get(layer)
    assert (slab == layer).all()
    assert slab.nbytes == layer_layout(layer).num_bytes
    host.handed_over(layer, lambda: None)


@pytest.mark.parametrize("num_kept", [0, 1, 3, 8, 9, 40])
def test_every_layer_holds_its_own_bytes_over_and_over(num_kept: int) -> None:
    file = FakeFile()
    host = streamed(file, num_kept)
    for _ in range(4):
        for layer in range(L):
            use(host, layer)
    assert len(host.kept_layers) == min(num_kept, L)
    one = layer_layout(0).num_bytes
    assert host.num_bytes <= (len(host.kept_layers) + RING_SLOTS) * one
    assert all(file.reads.count(layer) == 1 for layer in host.kept_layers), "what stays is read once"
    host.close()


def test_layers_outside_the_cycle_are_served_too() -> None:
    """The first token uploads every layer, also those that stay on the device afterwards."""
    host = streamed(FakeFile(), 1, cycle=[0, 1, 2, 3, 4])
    for layer in [*range(L), *range(5), *range(5)]:
        use(host, layer)
    host.close()


def test_a_slot_is_not_overwritten_before_its_upload_is_done() -> None:
    file, released = FakeFile(), threading.Event()
    host = streamed(file, 0)
    slab = host.get(0)
    host.handed_over(0, lambda: (released.wait(10), None)[1])
    for layer in (1, 2):
        use(host, layer)
    assert (slab == 0).all(), "its upload is still under way"
    released.set()
    for layer in (3, 4, 5):
        use(host, layer)
    host.close()


def test_an_error_of_the_reader_surfaces_where_it_is_waited_for() -> None:
    host = streamed(FakeFile(broken=4), 0)
    for layer in range(4):
        use(host, layer)
    with pytest.raises(OSError, match="a bad disk"):
        host.get(4)
    host.close()


def test_the_systems_copy_is_let_go_behind() -> None:
    file = FakeFile()
    host = streamed(file, 2)
    for layer in range(L):
        use(host, layer)
    host.close()
    assert set(file.forgotten) >= set(range(L))


class LateBackend(FakeBackend):
    """Uploads leave host memory when somebody waits for them, not before; until then the slot must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[int] = []
        self._lock = threading.Lock()
        self._num_uploads = 0
        self._leaving: dict[int, tuple[Slab, NDArray[np.uint8]]] = {}

    def upload(self, slab: Slab, host: NDArray[np.uint8]) -> None:
        # A ring's slot is met as many layers; which one is seen by what it holds, and checked again where it is read.
        self._host_layouts[id(host)] = head_layout() if host[0] == marker(LM_HEAD_LAYER) else layer_layout(int(host[0]))
        with self._lock:
            super().upload(slab, host)
            self._leaving[self._num_uploads] = (slab, host)
            self._num_uploads += 1

    def uploads_done(self) -> Callable[[], None]:
        count = self._num_uploads

        def wait() -> None:
            with self._lock:
                for number in [number for number in self._leaving if number < count]:
                    self._leave(number)
                self.left.append(count)

        return wait

    def wait_upload(self, slab: Slab) -> None:
        with self._lock:
            for number in [number for number, (into, _) in self._leaving.items() if into is slab]:
                self._leave(number)
            super().wait_upload(slab)

    def synchronize(self) -> None:
        pass

    def _leave(self, number: int) -> None:
        slab, host = self._leaving.pop(number)
        self._arriving[id(slab)] = host.copy()


@pytest.mark.parametrize("policy", [Policy.PAST_ONLY, Policy.PINNED])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("num_kept", [0, 2])
def test_a_store_gives_slots_back_when_their_uploads_are_done(policy: Policy, prefetch: int, num_kept: int) -> None:
    backend, window = LateBackend(), make_window(policy, L, 3, prefetch)
    assert window is not None
    layouts = [layer_layout(layer) for layer in range(L)]
    store = WeightStore(
        backend,  # type: ignore[arg-type]
        layouts,
        head_layout(),
        window=window,
        preload=False,
        budget_bytes=1 << 40,
    )
    backend.store = store
    file = FakeFile()
    store.stream_from(
        StreamedHost(file, layouts, window.upload_cycle, num_kept, lambda x: np.zeros(x.num_bytes, np.uint8)),
        lambda layout, host: file.read_into(layout, host),
    )
    for _ in range(6):
        run_token(store, L)
    store.close()
    streamed_uploads = backend.count("upload") - 1
    assert len(backend.left) >= 6 * (L - 3 - num_kept) - RING_SLOTS
    assert set(backend.left) <= set(range(2, streamed_uploads + 2)), "each is of the uploads up to its own"
