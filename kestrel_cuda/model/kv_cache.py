"""Keys and values of every layer in one allocation, split into per-layer views. Knows nothing of what is in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import KvLayer
from kestrel_cuda.config import KvDtype, TextConfig
from kestrel_cuda.errors import SettingError
from kestrel_cuda.quant.kv_rows import KV_GROUP

_DTYPES: dict[KvDtype, np.dtype[Any]] = {
    KvDtype.F16: np.dtype(np.float16),
    KvDtype.F32: np.dtype(np.float32),
    KvDtype.Q8: np.dtype(np.int8),
}
_SCALE_DTYPE = np.dtype(np.float16)


def kv_cache_bytes(config: TextConfig, ctx: int, dtype: KvDtype) -> int:
    """Bytes of keys and values of `ctx` slots over all layers, scales counted in."""
    row_bytes = config.kv_size * _DTYPES[dtype].itemsize
    if dtype is KvDtype.Q8:
        row_bytes += config.kv_size // KV_GROUP * _SCALE_DTYPE.itemsize
    return 2 * config.num_layers * ctx * row_bytes


def check_kv_dtype(config: TextConfig, dtype: KvDtype) -> None:
    """Raise SettingError where a head cannot be cut into groups that share a scale."""
    if dtype is KvDtype.Q8 and config.head_dim % KV_GROUP:
        raise SettingError(
            f"--kv q8 needs a head_dim that divides by {KV_GROUP}, and this checkpoint has {config.head_dim}; "
            "use --kv f16"
        )


class KvCache:
    """`ctx` slots for every layer, [layers, 2, kv_heads, ctx, head_dim], and for q8 their scales."""

    def __init__(self, backend: Backend, config: TextConfig, ctx: int, dtype: KvDtype) -> None:
        self.ctx = ctx
        shape = (config.num_layers, 2, config.num_kv_heads, ctx)
        joined = backend.zeros((*shape, config.head_dim), _DTYPES[dtype])
        scales = None
        if dtype is KvDtype.Q8:
            scales = backend.zeros((*shape, config.head_dim // KV_GROUP), _SCALE_DTYPE)
        self.layers = [
            KvLayer(
                joined[layer, 0],
                joined[layer, 1],
                None if scales is None else scales[layer, 0],
                None if scales is None else scales[layer, 1],
            )
            for layer in range(config.num_layers)
        ]
