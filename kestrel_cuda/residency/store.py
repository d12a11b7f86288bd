"""Packed layer slabs to device weights: loads them, keeps the one host copy, uploads on use, evicts by the window.

Knows nothing of checkpoints' names or of what the weights compute. With everything resident and preloaded there is no
host copy at all; otherwise each layer has one, packed and contiguous, so an upload is a single copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.base import Backend, PackedTensor, Slab, SourceMatrix
from kestrel_cuda.backends.operands import DeviceWeight
from kestrel_cuda.config import Evict
from kestrel_cuda.errors import InternalError
from kestrel_cuda.quant.packed import SlabEntry, SlabLayout
from kestrel_cuda.residency.cache import MAX_ENTRIES, WeightCache
from kestrel_cuda.residency.host import StreamedHost
from kestrel_cuda.residency.pool import MAX_BUFFERS, BufferPool
from kestrel_cuda.residency.window import ResidencyWindow, upcoming
from kestrel_cuda.weight_keys import LM_HEAD_LAYER, Projection

SlabSink = Callable[[SlabLayout, NDArray[np.uint8]], None]
READ_THREADS = 4
"""Slabs read at once from a strip cache; each is hashed as it is read."""

MemberSource = Callable[[SlabEntry], Sequence[SourceMatrix]]
"""The source matrices of a slab entry, members of a fused one in column order."""


@dataclass
class StoreCounters:
    """What the store has done since it was loaded."""

    layer_uploads: list[int]
    h2d_bytes: int = 0
    peak_layers: int = 0
    peak_weight_bytes: int = 0
    pass_uploads: list[int] = field(default_factory=list)
    pass_h2d_bytes: list[int] = field(default_factory=list)


class WeightStore:
    """Device weights of every layer and lm_head.

    `window` None keeps every layer; `preload` uploads all of them at load time and needs no host copy.
    `evict` FREE gives evicted slabs back to the driver instead of the pool, to show what that costs.
    """

    def __init__(
        self,
        backend: Backend,
        layouts: Sequence[SlabLayout],
        lm_head: SlabLayout,
        *,
        window: ResidencyWindow | None,
        preload: bool,
        budget_bytes: int,
        evict: Evict = Evict.POOL,
    ) -> None:
        self._backend = backend
        self._layouts = {layout.layer: layout for layout in (*layouts, lm_head)}
        self._num_layers = len(layouts)
        self._window = window
        self._preload = preload and window is None
        num_entries = sum(len(layout.entries) for layout in self._layouts.values())
        self.cache = WeightCache(budget_bytes, max(MAX_ENTRIES, num_entries))
        self.pool = BufferPool(MAX_BUFFERS if evict is Evict.POOL else 0)
        self._ahead: set[int] = set()
        self._arriving: dict[int, Slab] = {}
        self._host: dict[int, NDArray[np.uint8]] = {}
        self._streamed: StreamedHost | None = None
        self._save: SlabSink | None = None
        self._keep_host = True
        self.counters = StoreCounters([0] * self._num_layers)

    @property
    def num_weights(self) -> int:
        """Matrices of the checkpoint this store serves."""
        return sum(layout.num_weights for layout in self._layouts.values())

    @property
    def bytes_per_pass(self) -> int:
        """Packed bytes that a token reads: every layer and lm_head once."""
        return sum(layout.num_bytes for layout in self._layouts.values())

    @property
    def host_bytes(self) -> int:
        streamed = self._streamed.num_bytes if self._streamed is not None else 0
        return sum(slab.nbytes for slab in self._host.values()) + streamed

    def load(
        self,
        members: MemberSource,
        on_layer: Callable[[int, int], None],
        *,
        save: SlabSink | None = None,
        keep_host: bool = True,
    ) -> list[PackedTensor]:
        """Quantize and pack every layer, several at a time where the backend gains from it.

        `on_layer(done, total)` is called as layers finish; `save` is given each packed slab in order. Without
        `keep_host` nothing is held: another way to get at the slabs must follow (`stream_from`). Returns what packing
        found, tensor by tensor.
        """
        self._save, self._keep_host = save, keep_host
        total = len(self._layouts)
        found: list[PackedTensor] = []
        if self._backend.num_load_threads > 1:
            with ThreadPoolExecutor(self._backend.num_load_threads) as executor:
                for done, (layer, slab, tensors) in enumerate(
                    executor.map(lambda layout: self._pack_alone(layout, members), self._layouts.values())
                ):
                    self._settle(layer, slab)
                    found += tensors
                    on_layer(done + 1, total)
            return found
        packer = self._backend.packer()
        scratch: Slab | None = None
        for done, layout in enumerate(self._layouts.values()):
            slab = self._slab_to_pack(layout, scratch)
            for entry in layout.entries:
                packer.pack(slab, entry, members(entry))
            scratch = self._settle(layout.layer, slab)
            on_layer(done + 1, total)
        found = packer.finish()
        packer.close()
        if scratch is not None:
            self._backend.free_slab(scratch)
        return found

    def load_packed(self, read: SlabSink, on_layer: Callable[[int, int], None]) -> None:
        """Fill every layer with bytes packed before: `read(layout, host)` writes a slab into `host`."""
        total = len(self._layouts)

        def fetch(layout: SlabLayout) -> tuple[SlabLayout, NDArray[np.uint8]]:
            host = np.empty(layout.num_bytes, np.uint8) if self._preload else self._backend.host_slab(layout)
            read(layout, host)
            return layout, host

        with ThreadPoolExecutor(READ_THREADS) as executor:
            for done, (layout, host) in enumerate(executor.map(fetch, self._layouts.values())):
                if self._preload:
                    slab = self._backend.allocate_slab(layout)
                    self._backend.upload(slab, host)
                    self._backend.wait_upload(slab)
                    self._backend.synchronize()
                    self._enter(layout.layer, slab)
                else:
                    self._host[layout.layer] = host
                on_layer(done + 1, total)

    def stream_from(self, host: StreamedHost, read: SlabSink) -> None:
        """Take layers from `host` instead of copies of all of them; lm_head is uploaded now, to stay."""
        self._streamed = host
        layout = self._layouts[LM_HEAD_LAYER]
        self._host[LM_HEAD_LAYER] = np.empty(layout.num_bytes, np.uint8)
        read(layout, self._host[LM_HEAD_LAYER])
        self.lm_head()
        self._backend.synchronize()
        del self._host[LM_HEAD_LAYER]

    def layer(self, layer: int) -> Slab:
        """Enter a layer: apply the window, upload the layer if it is not there, start what comes next, return it."""
        self._ahead.discard(layer)
        if self._window is not None:
            resident = [other for other in self.cache.layers if other != LM_HEAD_LAYER]
            for dropped in self._window.layers_to_drop(layer, resident, self._ahead):
                self._release(dropped, self.cache.evict(dropped))
        slab = self._fetch(layer)
        self._prefetch(layer)
        self._await(layer)
        return slab

    def lm_head(self) -> DeviceWeight:
        """The output matrix, which never leaves once it is there."""
        slab = self._fetch(LM_HEAD_LAYER)
        self._await(LM_HEAD_LAYER)
        return slab.weights[Projection.LM_HEAD]

    @property
    def prefetched_layers(self) -> int:
        """Layers fetched for a use that has not come yet."""
        return len(self._ahead)

    @property
    def weights_resident(self) -> int:
        """Matrices of the checkpoint on the device, those of prefetched layers left out."""
        ahead = sum(self._layouts[layer].num_weights for layer in self._ahead)
        return self.cache.num_weights - ahead

    @property
    def layers_resident(self) -> int:
        """Layers on the device, prefetched ones left out."""
        return sum(layer != LM_HEAD_LAYER for layer in self.cache.layers) - len(self._ahead)

    def reset_counters(self) -> None:
        """Start counting anew; what is resident now is where the peak starts."""
        self.counters = StoreCounters([0] * self._num_layers)
        self.cache.num_hits = self.cache.num_misses = self.cache.num_evictions = 0
        self.pool.num_hits = self.pool.num_misses = 0
        self._note_peak()

    def begin_pass(self) -> None:
        """Start counting a pass over all layers (one token, or one prefill chunk) on its own."""
        self.counters.pass_uploads.append(0)
        self.counters.pass_h2d_bytes.append(0)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the hits of what is asked for inside out of the count: it is recorded, or counted once it is known to
        be wanted."""
        num_hits = self.cache.num_hits
        try:
            yield
        finally:
            self.cache.num_hits = num_hits

    def count_resident_pass(self) -> None:
        """Count the hits of a pass that found every layer resident and was not counted when it was submitted."""
        self.cache.num_hits += self.num_weights

    def flip_host_bit(self, layer: int) -> None:
        """Damage the host copy of a layer in the sign of its first weight that is not zero."""
        host = self._host[layer]
        host[np.flatnonzero(host)[0]] ^= 0x80

    @property
    def is_static(self) -> bool:
        """Whether every weight is resident to stay, so that its address never changes again."""
        return self._window is None and len(self.cache.layers) == len(self._layouts)

    def set_window(self, window: ResidencyWindow | None, evict: Evict) -> None:
        """Start over with nothing resident under another rule. Raises InternalError when there is no host copy."""
        if len(self._host) < len(self._layouts):
            raise InternalError("a window cannot be laid over weights that have no host copy")
        self._free_device_slabs()
        self._window = window
        self.pool = BufferPool(MAX_BUFFERS if evict is Evict.POOL else 0)

    def close(self) -> None:
        """Give every slab back to the backend."""
        self._free_device_slabs()
        self._host.clear()
        if self._streamed is not None:
            self._streamed.close()

    def _free_device_slabs(self) -> None:
        for layer in self.cache.layers:
            self._backend.free_slab(self.cache.evict(layer))
        for slab in self.pool.drain():
            self._backend.free_slab(slab)
        self._ahead.clear()
        self._arriving.clear()

    def _fetch(self, layer: int) -> Slab:
        return self.cache.get(layer) or self._upload(layer)

    def _upload(self, layer: int) -> Slab:
        layout = self._layouts[layer]
        for crowded_out, slab in self.cache.make_room(layout.num_bytes, len(layout.entries)).items():
            self._release(crowded_out, slab)
        slab = self.pool.take(layout) or self._backend.allocate_slab(layout)
        held = self._host.get(layer)
        if held is None and self._streamed is not None:
            self._backend.upload(slab, self._streamed.get(layer))
            self._streamed.handed_over(layer, self._backend.uploads_done())
        else:
            self._backend.upload(slab, self._host[layer])
        self._arriving[layer] = slab
        self._enter(layer, slab)
        self.counters.h2d_bytes += layout.num_bytes
        if self.counters.pass_uploads:
            self.counters.pass_h2d_bytes[-1] += layout.num_bytes
            self.counters.pass_uploads[-1] += layer != LM_HEAD_LAYER
        if layer != LM_HEAD_LAYER:
            self.counters.layer_uploads[layer] += 1
        return slab

    def _await(self, layer: int) -> None:
        slab = self._arriving.pop(layer, None)
        if slab is not None:
            self._backend.wait_upload(slab)

    def _prefetch(self, current: int) -> None:
        """Start uploading the next missing layers, in the order they are used, until `prefetch` are on their way."""
        if self._window is None or self._window.prefetch == 0:
            return
        for layer in upcoming(current, self._num_layers):
            if len(self._ahead) >= self._window.prefetch:
                return
            if layer not in self.cache:
                self._upload(layer)
                self._ahead.add(layer)

    def _enter(self, layer: int, slab: Slab) -> None:
        keys = tuple(entry.key for entry in self._layouts[layer].entries)
        self.cache.put(layer, slab, keys, pinned=layer == LM_HEAD_LAYER)
        self._note_peak()

    def _note_peak(self) -> None:
        num_layers = sum(layer != LM_HEAD_LAYER for layer in self.cache.layers)
        self.counters.peak_layers = max(self.counters.peak_layers, num_layers)
        self.counters.peak_weight_bytes = max(self.counters.peak_weight_bytes, self.cache.num_bytes)

    def _release(self, layer: int, slab: Slab) -> None:
        self._ahead.discard(layer)
        self._arriving.pop(layer, None)
        self._backend.release(slab)
        if not self.pool.give_back(slab):
            self._backend.free_slab(slab)

    def _pack_alone(self, layout: SlabLayout, members: MemberSource) -> tuple[int, Slab, list[PackedTensor]]:
        packer = self._backend.packer()
        if self._preload:
            slab = self._backend.allocate_slab(layout)
        else:
            # Packed where it will stay: with several layers at a time, slabs beside the host copies would add up.
            slab = self._backend.slab_over(layout, self._backend.host_slab(layout))
        for entry in layout.entries:
            packer.pack(slab, entry, members(entry))
        return layout.layer, slab, packer.finish()

    def _slab_to_pack(self, layout: SlabLayout, scratch: Slab | None) -> Slab:
        if scratch is not None and scratch.layout.geometry == layout.geometry:
            return scratch
        if scratch is not None:
            self._backend.free_slab(scratch)
        return self._backend.allocate_slab(layout)

    def _settle(self, layer: int, slab: Slab) -> Slab | None:
        """Keep a packed slab where it belongs; returns it when its bytes went to the host and it is free again."""
        layout = self._layouts[layer]
        if self._save is not None or not self._preload:
            holds = not self._preload and self._keep_host
            if self._backend.num_load_threads > 1 and not self._preload:
                host = slab.raw
            else:
                host = self._backend.host_slab(layout) if holds else np.empty(layout.num_bytes, np.uint8)
                self._backend.download(host, slab)
            if self._save is not None:
                self._save(layout, host)
            if holds:
                self._host[layer] = host
        if self._preload:
            self._enter(layer, slab)
            return None
        return None if self._backend.num_load_threads > 1 else slab
