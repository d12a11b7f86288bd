"""Packs checkpoints, saves and finds the packed form for tests. Knows no expected value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.base import SourceMatrix
from kestrel_cuda.backends.cpu import CpuBackend
from kestrel_cuda.checkpoint.reader import open_checkpoint
from kestrel_cuda.config import Quant
from kestrel_cuda.model.weights import plan_weights
from kestrel_cuda.quant.packed import Element
from kestrel_cuda.quant.strip_cache import Miss, StripCache, find
from kestrel_cuda.quant.strip_cache_writer import StripCacheWriter
from kestrel_cuda.quant.strip_manifest import Fingerprint, fingerprint
from kestrel_cuda.weight_keys import WeightKey

ELEMENTS = {"BF16": Element.BF16, "F16": Element.F16, "F32": Element.F32}


@dataclass(frozen=True)
class Packed:
    """A checkpoint packed without any cache: what a cache has to give back."""

    expected: Fingerprint
    slabs: dict[int, NDArray[np.uint8]]


def pack(model: Path, quant: Quant = Quant.Q8_0) -> Packed:
    checkpoint, backend = open_checkpoint(model), CpuBackend()
    weights = plan_weights(checkpoint.config, quant, lambda key: ELEMENTS[checkpoint.weight(key).dtype])
    slabs = {}
    for layout in weights.layouts:
        slab, packer = backend.allocate_slab(layout), backend.packer()
        for entry in layout.entries:
            tensors = [checkpoint.weight(WeightKey(entry.key.layer, p)) for p in entry.key.projection.members]
            packer.pack(slab, entry, [SourceMatrix(tensor.name, tensor.data) for tensor in tensors])
        slabs[layout.layer] = slab.raw
    return Packed(fingerprint(checkpoint, quant, list(weights.layouts)), slabs)


def save(directory: Path, packed: Packed, lost_groups: dict[str, int] | None = None) -> StripCache:
    with StripCacheWriter(directory, packed.expected) as writer:
        for layout in packed.expected.layouts:
            writer.add(layout, packed.slabs[layout.layer])
        return writer.commit(lost_groups or {})


def hit(directory: Path, packed: Packed) -> StripCache:
    found = find(directory, packed.expected)
    assert isinstance(found, StripCache), found
    return found


def missed(directory: Path, packed: Packed) -> str | None:
    found = find(directory, packed.expected)
    assert isinstance(found, Miss)
    return found.reason


def check_slabs(cache: StripCache, packed: Packed) -> None:
    for layout in packed.expected.layouts:
        host = np.full(layout.num_bytes, 0xA5, np.uint8)
        cache.read_into(layout, host)
        np.testing.assert_array_equal(host, packed.slabs[layout.layer])
        np.testing.assert_array_equal(cache.view(layout), packed.slabs[layout.layer])


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}
