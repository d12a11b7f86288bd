"""Puts weights where they are used: packed ones into a store, from the checkpoint, from a strip cache saved before, or
layer by layer from that one's file; norms and embeddings onto the device as they are.

Says in `notes` where the weights came from when it was not the checkpoint, and in `warnings` what packing lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.base import Backend, PackedTensor, SourceMatrix
from kestrel_cuda.checkpoint.names import FINAL_NORM, Norm, norm_name
from kestrel_cuda.checkpoint.reader import Checkpoint
from kestrel_cuda.checkpoint.tensor_file import widen
from kestrel_cuda.config import EngineConfig
from kestrel_cuda.errors import CheckpointError, DeviceError
from kestrel_cuda.host_memory import available_bytes
from kestrel_cuda.model.text import LayerNorms, Unquantized
from kestrel_cuda.model.weights import DecoderWeights
from kestrel_cuda.paths import shown_path
from kestrel_cuda.quant.packed import Element, SlabEntry
from kestrel_cuda.quant.strip_cache import DamagedStripCache, Miss, StripCache, find
from kestrel_cuda.quant.strip_cache_writer import StripCacheWriter
from kestrel_cuda.quant.strip_manifest import Fingerprint, fingerprint
from kestrel_cuda.residency.host import RING_SLOTS, StreamedHost
from kestrel_cuda.residency.store import READ_THREADS, WeightStore
from kestrel_cuda.residency.window import ResidencyWindow
from kestrel_cuda.sizes import format_size
from kestrel_cuda.weight_keys import WeightKey

OnLayer = Callable[[int, int], None]

_ELEMENTS = {"BF16": Element.BF16, "F16": Element.F16, "F32": Element.F32}


def stored_element(checkpoint: Checkpoint, key: WeightKey) -> Element:
    """What a weight's values are in the checkpoint's file."""
    return _ELEMENTS[checkpoint.weight(key).dtype]


def unquantized(checkpoint: Checkpoint, backend: Backend, table: Any, *, on_device: bool) -> Unquantized:
    """What a decoder has beside its packed weights: `table`, the embeddings where the plan has them, and every norm.

    Raises CheckpointError for a norm that is not finite.
    """

    def norm(name: str) -> Any:
        weight = widen(checkpoint.tensor(name))
        if not np.isfinite(weight).all():
            raise checkpoint.not_finite(name)
        return backend.to_device(weight)

    layers = tuple(
        LayerNorms(*(norm(norm_name(layer, n)) for n in (Norm.INPUT, Norm.POST_ATTENTION, Norm.Q, Norm.K)))
        for layer in range(checkpoint.config.text.num_layers)
    )
    return Unquantized(table, on_device, layers, norm(FINAL_NORM))


def map_table(
    backend: Backend, table: NDArray[Any], plan_on_device: Callable[[], None]
) -> tuple[Any | None, tuple[str, ...]]:
    """The embedding table where steps read it from host memory, and warnings.

    None where the driver refuses to map it and `plan_on_device`, which raises DeviceError where that does not fit, has
    planned everything again with the table on the device. Raises DeviceError with both reasons otherwise.
    """
    try:
        return backend.map_host(table), ()
    except DeviceError as refused:
        try:
            plan_on_device()
        except DeviceError as error:
            raise DeviceError(
                f"{refused}; free host memory, or raise the limit of locked memory: on the device {error}"
            ) from error
        return None, (f"{refused}: they are on the device",)


def host_copy_bytes(config: EngineConfig, weights: DecoderWeights, window: ResidencyWindow | None) -> int:
    """Host memory that packed weights take beside the device: what a window uploads again, or `lazy` at first use."""
    if window is None and not config.lazy:
        return 0
    if _streams(config, window):
        assert window is not None
        num_held = min(config.host_keep, len(window.upload_cycle)) + RING_SLOTS
        return num_held * max(layout.num_bytes for layout in weights.layers)
    return sum(layout.num_bytes for layout in weights.layouts)


def too_little_host_memory(config: EngineConfig, copy_bytes: int) -> Iterator[str]:
    """A warning where the host has less than its copy takes."""
    available = available_bytes()
    if available is None or copy_bytes <= available:
        return
    fewer = ""
    if config.host_keep > 1:
        fewer = ", or hold fewer with a smaller --host-keep"
    elif not config.host_keep and not config.lazy:
        fewer = ", or hold fewer with --strip-cache DIR --host-keep N"
    yield (
        f"the weights to upload take {format_size(copy_bytes)} of host memory, where {format_size(available)} are "
        f"available: the system may move them to disk, or end this; free host memory{fewer}"
    )


def _streams(config: EngineConfig, window: ResidencyWindow | None) -> bool:
    """Whether layers come from the strip cache's file for every token."""
    has_file = config.strip_cache is not None and config.host_keep > 0
    return has_file and window is not None and bool(window.upload_cycle)


class WeightLoader:
    """One load of one checkpoint into one store. Raises CheckpointError when a weight cannot be quantized."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        weights: DecoderWeights,
        config: EngineConfig,
        notes: list[str],
        warnings: list[str],
        on_layer: OnLayer,
    ) -> None:
        self._checkpoint = checkpoint
        self._weights = weights
        self._config = config
        self._notes, self._warnings = notes, warnings
        self._on_layer = on_layer
        self._zeros: list[str] = []

    def fill(self, store: WeightStore, backend: Backend, window: ResidencyWindow | None) -> None:
        """Load every layer, by way of the strip cache where one is asked for."""
        if self._config.strip_cache is None:
            self._say_lost(_lost_groups(self._checkpoint, store.load(self._members, self._on_layer)))
            return
        streams = _streams(self._config, window)
        if self._config.host_keep and not streams:
            idle = f"--host-keep {self._config.host_keep} has nothing to hold"
            self._warnings.append(f"{idle}: no layer is uploaded again")
        expected = fingerprint(self._checkpoint, self._config.quant, list(self._weights.layouts))
        found = find(self._config.strip_cache, expected)
        if isinstance(found, Miss):
            cache = self._build(store, expected, found.reason, keep_host=not streams)
        else:
            cache = found
        try:
            if streams:
                if cache is found:
                    self._verify(cache)
                self._stream(store, backend, window, cache)
            elif cache is found:
                store.load_packed(cache.read_into, self._on_layer)
            if cache is found:
                # Not sooner: what turns out damaged while it is read gives no weights.
                self._notes.append(f"the packed weights come from the strip cache {shown_path(cache.path)}")
        except DamagedStripCache as error:
            cache.close()
            cache = self._build(store, expected, str(error), keep_host=not streams)
            if streams:
                self._stream(store, backend, window, cache)
        self._say_lost(cache.lost_groups)
        if not streams:
            cache.close()

    def _stream(self, store: WeightStore, backend: Backend, window: ResidencyWindow | None, cache: StripCache) -> None:
        assert window is not None
        cycle, num_kept = window.upload_cycle, self._config.host_keep
        host = StreamedHost(cache, self._weights.layers, cycle, num_kept, backend.host_slab)
        store.stream_from(host, cache.read_into)
        if num_kept > len(cycle):
            self._warnings.append(
                f"--host-keep {num_kept} is more than the {len(cycle)} layers that are uploaded again: all are held"
            )
        self._notes.append(
            f"{len(host.kept_layers)} of the {len(cycle)} layers that are uploaded again stay in host memory, "
            f"the others are read from disk: {format_size(host.num_bytes)} in all"
        )

    def _verify(self, cache: StripCache) -> None:
        """Look at every slab once before any is trusted: a layer read in the middle of an answer is too late."""
        layouts = list(self._weights.layouts)
        with ThreadPoolExecutor(READ_THREADS) as executor:
            for done, _ in enumerate(executor.map(cache.verify, layouts)):
                self._on_layer(done + 1, len(layouts))

    def _build(self, store: WeightStore, expected: Fingerprint, reason: str | None, *, keep_host: bool) -> StripCache:
        assert self._config.strip_cache is not None
        if reason:
            self._warnings.append(f"{reason}; it is rebuilt")
        with StripCacheWriter(self._config.strip_cache, expected, reason) as writer:
            found = store.load(self._members, self._on_layer, save=writer.add, keep_host=keep_host)
            cache = writer.commit(_lost_groups(self._checkpoint, found))
        self._notes.append(f"the packed weights were saved in the strip cache {shown_path(cache.path)}")
        return cache

    def _members(self, entry: SlabEntry) -> Sequence[SourceMatrix]:
        tensors = [self._checkpoint.weight(WeightKey(entry.key.layer, p)) for p in entry.key.projection.members]
        # The first value ends most of these.
        self._zeros += [t.name for t in tensors if not (t.data.reshape(-1)[:1].any() or t.data.any())]
        return [SourceMatrix(tensor.name, tensor.data) for tensor in tensors]

    def _say_lost(self, lost: Mapping[str, int]) -> None:
        if self._zeros:
            self._warnings.append(
                f"tensors of nothing but zeros ({len(self._zeros)}, the first {min(self._zeros)}): a file that was not "
                "fetched to its end may look like this; fetch it again"
            )
        if lost:
            self._warnings.append(
                f"{sum(lost.values())} groups of {len(lost)} tensors are too small for a float16 scale and became "
                f"zero, the first in {next(iter(lost))}"
            )


def _lost_groups(checkpoint: Checkpoint, found: Sequence[PackedTensor]) -> dict[str, int]:
    """Lost groups by tensor. Raises CheckpointError for a tensor that has no packed form."""
    for tensor in found:
        if tensor.num_nonfinite:
            raise checkpoint.not_finite(tensor.name)
        if tensor.num_oversized_scales:
            raise CheckpointError(
                f"{shown_path(checkpoint.path_of(tensor.name))}: {tensor.name} needs a scale over 65504, the largest "
                "a float16 holds; use --quant none"
            )
    return {tensor.name: tensor.num_lost_groups for tensor in found if tensor.num_lost_groups}
