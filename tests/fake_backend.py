"""A backend of slabs alone: records what a store asks of it and refuses what would corrupt a weight.

A slab's bytes are the number of the layer whose weights it holds; fresh and freed slabs hold other bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.base import PackedTensor, Slab, SourceMatrix
from kestrel_cuda.backends.operands import DeviceWeight
from kestrel_cuda.quant.packed import Element, PackedGeometry, SlabEntry, SlabLayout, entry_views, slab_layout
from kestrel_cuda.residency.store import WeightStore
from kestrel_cuda.weight_keys import LM_HEAD, LM_HEAD_LAYER, Projection, WeightKey

UNSET, FREED = 0xEE, 0xDD
PLAIN = (Projection.QKV, Projection.O, Projection.GATE_UP, Projection.DOWN)


class Event(NamedTuple):
    """`layer` is the layer uploaded; for the others the one the slab was first allocated for."""

    what: Literal["allocate", "free", "upload", "download"]
    slab: int
    layer: int


class FakeBackend:
    """What `WeightStore` uses of a backend."""

    def __init__(self, num_load_threads: int = 1) -> None:
        self.num_load_threads = num_load_threads
        self.events: list[Event] = []
        self.bytes_uploaded = 0
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.store: WeightStore | None = None
        self._live: dict[int, Slab] = {}
        self._freed: list[Slab] = []
        self._numbers: dict[int, int] = {}
        self._host_layouts: dict[int, SlabLayout] = {}
        self._host: list[NDArray[np.uint8]] = []
        self._arriving: dict[int, NDArray[np.uint8]] = {}
        self._readable: set[int] = set()
        self._released: set[int] = set()

    def count(self, what: str) -> int:
        return sum(event.what == what for event in self.events)

    def uploads(self) -> list[int]:
        """Layers uploaded, in order."""
        return [event.layer for event in self.events if event.what == "upload"]

    def slab_over(self, layout: SlabLayout, raw: NDArray[np.uint8]) -> Slab:
        weights = {}
        for entry in layout.entries:
            codes_kn, scales_gn = entry_views(raw, entry)
            weights[entry.key.projection] = DeviceWeight(entry.geometry, codes_kn, scales_gn)
        return Slab(layout, raw, weights)

    def allocate_slab(self, layout: SlabLayout) -> Slab:
        slab = self.slab_over(layout, np.full(layout.num_bytes, UNSET, np.uint8))
        self._live[id(slab)] = slab
        self._numbers[id(slab)] = len(self._numbers)
        self.allocated_bytes += layout.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        self._record("allocate", slab, layout.layer)
        return slab

    def free_slab(self, slab: Slab) -> None:
        assert self._live.pop(id(slab), None) is slab, "a slab was freed twice, or never allocated"
        slab.raw[:] = FREED
        self._readable.discard(id(slab))
        self._freed.append(slab)  # so that id(slab) is not met again
        self.allocated_bytes -= slab.layout.num_bytes
        self._record("free", slab, slab.layout.layer)

    def host_slab(self, layout: SlabLayout) -> NDArray[np.uint8]:
        host = np.full(layout.num_bytes, UNSET, np.uint8)
        self._host.append(host)
        self._host_layouts[id(host)] = layout
        return host

    def upload(self, slab: Slab, host: NDArray[np.uint8]) -> None:
        """The bytes arrive at `wait_upload`; until then the slab holds other ones."""
        layout = self._host_layouts[id(host)]
        assert id(slab) in self._live, "an upload into a slab that was freed"
        assert slab.layout.geometry == layout.geometry, "an upload into a slab of another geometry"
        for layer in self._layers_in(slab):
            raise AssertionError(f"layer {layout.layer} is uploaded over layer {layer}, which is resident")
        assert (host == marker(layout.layer)).all(), f"the host copy of layer {layout.layer} holds another's bytes"
        assert id(slab) not in self._readable, "an upload over a slab that submitted steps may still read"
        slab.raw[:] = UNSET
        self._arriving[id(slab)] = host
        self.bytes_uploaded += host.nbytes
        self._record("upload", slab, layout.layer)

    def wait_upload(self, slab: Slab) -> None:
        slab.raw[:] = self._arriving.pop(id(slab))
        self._readable.add(id(slab))
        self._released.discard(id(slab))

    def release(self, slab: Slab) -> None:
        """After the last step that reads it: what is copied there next waits for the steps submitted by then."""
        assert id(slab) not in self._released, "released anew, so that a copy waits for steps that do not read the slab"
        self._readable.discard(id(slab))
        self._released.add(id(slab))

    def read(self, slab: Slab) -> None:
        """A step that reads a slab is submitted."""
        assert id(slab) in self._live, "a step reads a slab that was freed"
        assert id(slab) not in self._arriving, "a step reads a slab before its upload was waited for"
        assert id(slab) not in self._released, "a step reads a slab that was released before"

    def download(self, host: NDArray[np.uint8], slab: Slab) -> None:
        assert id(slab) in self._live, "a download from a slab that was freed"
        host[:] = slab.raw
        self._record("download", slab, self._host_layouts[id(host)].layer)

    def packer(self) -> FakePacker:
        return FakePacker()

    def _layers_in(self, slab: Slab) -> list[int]:
        """Layers that the store's cache still finds in a slab."""
        if self.store is None:
            return []
        cache = self.store.cache
        return [
            layer
            for layer in cache.layers
            for projection, weight in slab.weights.items()
            if (held := cache.weight(WeightKey(layer, projection))) and held.codes_kn is weight.codes_kn
        ]

    def _record(self, what: Literal["allocate", "free", "upload", "download"], slab: Slab, layer: int) -> None:
        self.events.append(Event(what, self._numbers[id(slab)], layer))


class FakePacker:
    """Writes the layer's marker over a whole entry, padding included."""

    def __init__(self) -> None:
        self._found: list[PackedTensor] = []

    def pack(self, slab: Slab, entry: SlabEntry, members: Sequence[SourceMatrix]) -> None:
        later = [other.codes_offset for other in slab.layout.entries if other.codes_offset > entry.codes_offset]
        slab.raw[entry.codes_offset : min(later, default=slab.layout.num_bytes)] = marker(entry.key.layer)
        self._found += [PackedTensor(member.name, 0, 0, 0) for member in members]

    def finish(self) -> list[PackedTensor]:
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        pass


def marker(layer: int) -> int:
    """The byte a layer's slab is full of."""
    return 200 if layer == LM_HEAD_LAYER else layer % 200


def layer_layout(layer: int, size: int = 32) -> SlabLayout:
    """Fused QKV, O, fused gate and up, down: `size` inputs and outputs each."""
    geometry = PackedGeometry(Element.INT8, size, size, 32)
    return slab_layout(layer, [(WeightKey(layer, projection), geometry) for projection in PLAIN])


def head_layout(size: int = 64) -> SlabLayout:
    return slab_layout(LM_HEAD_LAYER, [(LM_HEAD, PackedGeometry(Element.INT8, size, size, 32))])


def members(entry: SlabEntry) -> list[SourceMatrix]:
    names = [f"{entry.key.layer}.{member.name}" for member in entry.key.projection.members]
    return [SourceMatrix(name, np.zeros((1, 1), np.float32)) for name in names]


def no_progress(done: int, total: int) -> None:
    pass


def loaded_store(
    backend: FakeBackend, num_layers: int, on_layer: Callable[[int, int], None] = no_progress, **options: Any
) -> WeightStore:
    """A store of equal layers, loaded; by default lazy, without a window and without a bound."""
    defaults: dict[str, Any] = {"window": None, "preload": False, "budget_bytes": 1 << 40}
    layouts = [layer_layout(layer) for layer in range(num_layers)]
    store = WeightStore(backend, layouts, head_layout(), **defaults | options)  # type: ignore[arg-type]
    backend.store = store
    store.load(members, on_layer)
    return store


def run_token(store: WeightStore, num_layers: int) -> None:
    """One pass over all layers and lm_head, each found to hold its own bytes."""
    store.begin_pass()
    for layer in range(num_layers):
        slab = store.layer(layer)
        store._backend.read(slab)  # type: ignore[attr-defined]
        for projection, weight in slab.weights.items():
            codes = np.asarray(weight.codes_kn).view(np.uint8)
            assert (codes == marker(layer)).all(), f"layer {layer}: {projection.name} holds another's bytes"
    head = np.asarray(store.lm_head().codes_kn).view(np.uint8)
    assert (head == marker(LM_HEAD_LAYER)).all(), "lm_head holds another's bytes"
