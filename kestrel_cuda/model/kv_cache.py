"""Keys and values of every layer in one allocation, split into per-layer views. Knows nothing of what is in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kestrel_cuda.backends.base import Backend, KvLayer
from kestrel_cuda.config import KvDtype, TextConfig

_DTYPES: dict[KvDtype, np.dtype[Any]] = {KvDtype.F16: np.dtype(np.float16), KvDtype.F32: np.dtype(np.float32)}


def kv_cache_bytes(config: TextConfig, ctx: int, dtype: KvDtype) -> int:
    """Bytes of keys and values of `ctx` slots over all layers."""
    return 2 * config.num_layers * ctx * config.kv_size * _DTYPES[dtype].itemsize


class KvCache:
    """`ctx` slots for every layer, [layers, 2, kv_heads, ctx, head_dim]."""

    def __init__(self, backend: Backend, config: TextConfig, ctx: int, dtype: KvDtype) -> None:
        self.ctx = ctx
        shape = (config.num_layers, 2, config.num_kv_heads, ctx, config.head_dim)
        joined = backend.zeros(shape, _DTYPES[dtype])
        self.layers = [KvLayer(joined[layer, 0], joined[layer, 1]) for layer in range(config.num_layers)]
