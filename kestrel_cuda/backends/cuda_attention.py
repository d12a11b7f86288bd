"""Attention on a GPU: which kernel serves which cache and how many queries. The bits of a query do not depend on it.

float16 and int8 caches go to the tensor cores (kernels/attention_few*.cu, _many*.cu), float32 ones to attention.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kestrel_cuda.backends.composed import ComposedSteps
from kestrel_cuda.backends.cuda_device import CudaDevice
from kestrel_cuda.backends.operands import Activation, HeadShape, KvLayer, SequenceState
from kestrel_cuda.errors import DeviceError
from kestrel_cuda.quant.grouped import ACTIVATION_GROUP

HEAD_DIMS = (16, 32, 64, 128)
MAX_QUERIES_PER_KV = 16

# Sizes shared with the kernels; tests/kernels/test_signatures.py reads them out of the sources.
SPLIT_SLOTS = 256
SUBTILE_SLOTS = 64
SPLIT_MAX_ROWS = 8
FEW_THREADS = 512
FLOAT_TILE_ROWS = 32
HALF_TILE_ROWS, HALF_TILE_THREADS, HALF_TILE_STAGES = 64, 128, 3

WARPGROUP_HEAD_DIMS = (64, 128)
WARPGROUP_TILE_ROWS, WARPGROUP_TILE_THREADS, WARPGROUP = 128, 384, 128
PIECE_CODES, TILES_AHEAD = 16, 2
QUANTIZED_INPUTS = 2048
"""Of a block that quantizes rows."""

CACHE_KINDS = {np.dtype(np.float16): 1, np.dtype(np.float32): 2}
_CACHE_NAMES = {np.dtype(np.float16): "f16", np.dtype(np.float32): "f32", np.dtype(np.int8): "q8"}


def log2_scale(head_dim: int) -> float:
    """What scores are multiplied with: 1 / sqrt(d), in units of log2."""
    return float(head_dim**-0.5) / math.log(2)


def float_tile_bytes(head_dim: int) -> int:
    """Shared memory of attention.cu's attend_tiled: queries, scores, statistics and one subtile of keys or values."""
    floats = FLOAT_TILE_ROWS * (head_dim + 4 + SPLIT_SLOTS + 4 + 4) + SUBTILE_SLOTS * (head_dim + 4)
    return 4 * floats


def half_tile_bytes(head_dim: int) -> int:
    """attention_many.cuh's `ManyRows`: a ring of subtiles, merged results, two statistics and the head of a row."""
    return 2 * HALF_TILE_STAGES * SUBTILE_SLOTS * head_dim + _merged_bytes(head_dim)


def warpgroup_tile_bytes(head_dim: int) -> int:
    """attention_many_warpgroup.cu's `Shared`: queries, rings of keys and values of a split, merged results,
    sums of two warpgroups, barriers."""
    halves = WARPGROUP_TILE_ROWS * head_dim + 2 * SPLIT_SLOTS * head_dim
    num_barriers = 2 * (2 + SPLIT_SLOTS // SUBTILE_SLOTS)
    floats = WARPGROUP_TILE_ROWS * head_dim + 2 * (WARPGROUP_TILE_THREADS - WARPGROUP)
    return 2 * halves + 4 * floats + 8 * num_barriers


def int8_tile_bytes(head_dim: int) -> int:
    """The same with attention_ring.cuh's `Int8Stages`: subtiles, codes, a word for a piece's scale, four addresses."""
    num_pieces = SUBTILE_SLOTS * head_dim // PIECE_CODES
    return TILES_AHEAD * (3 * SUBTILE_SLOTS * head_dim + 4 * num_pieces) + 4 * 8 + _merged_bytes(head_dim)


def _merged_bytes(head_dim: int) -> int:
    return 4 * HALF_TILE_ROWS * (head_dim + 3)


def _cache_arguments(kv: KvLayer) -> dict[str, Any]:
    """What attention over halves or codes takes of a cache."""
    if kv.k_scales_hsg is None:
        k_hsd, v_hsd = (a.view(np.uint16) if a.dtype == np.float16 else a for a in (kv.k_hsd, kv.v_hsd))
        return {"k_hsd": k_hsd, "v_hsd": v_hsd}
    return {"k_hsd": kv.k_hsd, "k_scales_hsg": kv.k_scales_hsg, "v_hsd": kv.v_hsd, "v_scales_hsg": kv.v_scales_hsg}


@dataclass(frozen=True)
class AttentionScratch:
    """Parts of attention by split, the joined heads before they are quantized, and a count of finished blocks."""

    max_mhs: Any
    sum_mhs: Any
    out_mhsd: Any
    joined_mk: Any
    arrived_h: Any


class AttentionSteps(CudaDevice, ComposedSteps):
    """The attention of `Backend` on a GPU."""

    _attention_scratch: AttentionScratch | None = None

    def rope_store(
        self, qkv_mn: Any, q_norm_d: Any, k_norm_d: Any, heads: HeadShape, state: SequenceState, kv: KvLayer,
        q_mhd: Any, num_rows: int,
    ) -> None:  # fmt: skip
        kind: dict[str, Any]
        if kv.k_scales_hsg is None:
            name, kind = "qk_norm_rope_store", {"kv_kind": CACHE_KINDS[kv.k_hsd.dtype]}
        else:
            name, kind = "qk_norm_rope_store_q8", {}
        self.kernels[name](
            (-(-(heads.num_heads + 2 * heads.num_kv_heads) // 8), num_rows), (256,), qkv=qkv_mn, q_norm_d=q_norm_d,
            k_norm_d=k_norm_d, cos_sd=state.cos_sd, sin_sd=state.sin_sd, position=state.position, q_mhd=q_mhd,
            ld=qkv_mn.shape[1], k_column=heads.k_column, v_column=heads.v_column,
            num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim,
            ctx=kv.k_hsd.shape[1], eps=heads.norm_eps, **kind, **_cache_arguments(kv),
        )  # fmt: skip

    def check_heads(self, head_dim: int, queries_per_kv: int) -> None:
        if head_dim not in HEAD_DIMS or queries_per_kv > MAX_QUERIES_PER_KV:
            raise DeviceError(
                f"this checkpoint has a head_dim of {head_dim} and {queries_per_kv} query heads a kv head; the GPU "
                f"kernels take {', '.join(map(str, HEAD_DIMS))} and up to {MAX_QUERIES_PER_KV}: use --backend cpu"
            )

    def reserve_attention(self, heads: HeadShape, max_rows: int, ctx: int) -> None:
        rows, splits = min(max_rows, SPLIT_MAX_ROWS), -(-ctx // SPLIT_SLOTS)
        stats = (rows, heads.num_heads, splits)
        self._attention_scratch = AttentionScratch(
            self.zeros(stats, np.float32),
            self.zeros(stats, np.float32),
            self.zeros((*stats, heads.head_dim), np.float32),
            self.zeros((max_rows, heads.num_heads * heads.head_dim), np.float32),
            self.zeros((heads.num_kv_heads,), np.int32),
        )

    @property
    def attention_scratch(self) -> AttentionScratch:
        assert self._attention_scratch is not None, "reserve_attention comes first"
        return self._attention_scratch

    def attend(
        self, q_mhd: Any, kv: KvLayer, heads: HeadShape, state: SequenceState, out: Activation, num_rows: int,
        num_slots: int,
    ) -> None:  # fmt: skip
        scratch = self.attention_scratch
        target = scratch.joined_mk if out.values_mk is None else out.values_mk
        d, group = heads.head_dim, heads.queries_per_kv
        suffix = f"{_CACHE_NAMES[kv.k_hsd.dtype]}_{d}"
        common = {"q_mhd": q_mhd, "position": state.position, "queries_per_kv": group, "ctx": kv.k_hsd.shape[1],
                  "scale": log2_scale(d)} | _cache_arguments(kv)  # fmt: skip
        halves = kv.k_hsd.dtype != np.float32
        if num_rows <= SPLIT_MAX_ROWS:
            num_splits = -(-num_slots // SPLIT_SLOTS)
            shared_bytes = 16 * group * d if halves else 4 * (group * (d + SPLIT_SLOTS) + 512)
            kernel = self.kernels[f"attend_split_{suffix}"]
            block = (FEW_THREADS if halves else 256,)
            kernel(
                (num_splits, heads.num_kv_heads, num_rows), block, shared_bytes=shared_bytes, max_mhs=scratch.max_mhs,
                sum_mhs=scratch.sum_mhs, out_mhsd=scratch.out_mhsd, **common,
            )  # fmt: skip
            self.kernels["attend_merge"](
                (-(-heads.num_heads * d // 256), num_rows), (256,), max_mhs=scratch.max_mhs, sum_mhs=scratch.sum_mhs,
                out_mhsd=scratch.out_mhsd, position=state.position,
                out_mhd=target, num_heads=heads.num_heads, head_dim=d, num_splits=num_splits,
            )  # fmt: skip
        else:
            kernel_name, grid, block, shared_bytes = self._attention_of_many(heads, kv, num_rows)
            self.kernels[f"{kernel_name}_{suffix}"](
                grid, block, shared_bytes=shared_bytes, out_mhd=target, m=num_rows, **common
            )
        if out.codes_mk is not None:
            self.quantize_rows(target, out, num_rows)

    def _attention_of_many(
        self, heads: HeadShape, kv: KvLayer, num_rows: int
    ) -> tuple[str, tuple[int, int], tuple[int], int]:
        """Which kernel serves many rows, with its grid, block and shared memory."""
        d, num_kv_heads = heads.head_dim, heads.num_kv_heads

        def num_tiles(rows: int) -> int:
            return -(-num_rows // (rows // heads.queries_per_kv))

        if kv.k_hsd.dtype == np.float32:
            return "attend_tiled", (num_tiles(FLOAT_TILE_ROWS), num_kv_heads), (256,), float_tile_bytes(d)
        if kv.k_scales_hsg is None and self.has_warpgroup_mma and d in WARPGROUP_HEAD_DIMS:
            grid = (num_kv_heads, num_tiles(WARPGROUP_TILE_ROWS))
            return "attend_warpgroups", grid, (WARPGROUP_TILE_THREADS,), warpgroup_tile_bytes(d)
        shared_bytes = half_tile_bytes(d) if kv.k_scales_hsg is None else int8_tile_bytes(d)
        return "attend_tiled", (num_kv_heads, num_tiles(HALF_TILE_ROWS)), (HALF_TILE_THREADS,), shared_bytes

    def rope_attend(
        self,
        qkv_mn: Any,
        q_norm_d: Any,
        k_norm_d: Any,
        heads: HeadShape,
        state: SequenceState,
        kv: KvLayer,
        q_mhd: Any,
        out: Activation,
        num_rows: int,
        num_slots: int,
    ) -> None:
        d, group = heads.head_dim, heads.queries_per_kv
        if num_rows > 1 or out.codes_mk is None or kv.k_hsd.dtype == np.float32 or group * d % ACTIVATION_GROUP:
            super().rope_attend(qkv_mn, q_norm_d, k_norm_d, heads, state, kv, q_mhd, out, num_rows, num_slots)
            return
        scratch = self.attention_scratch
        num_splits = -(-num_slots // SPLIT_SLOTS)
        self.kernels[f"attend_row_{_CACHE_NAMES[kv.k_hsd.dtype]}_{d}"](
            (num_splits, heads.num_kv_heads), (FEW_THREADS,), shared_bytes=16 * group * d, dependent=True, qkv_n=qkv_mn,
            q_norm_d=q_norm_d, k_norm_d=k_norm_d, cos_sd=state.cos_sd, sin_sd=state.sin_sd, position=state.position,
            max_hs=scratch.max_mhs,
            sum_hs=scratch.sum_mhs, out_hsd=scratch.out_mhsd, arrived_h=scratch.arrived_h,
            y_codes=out.codes_mk, y_scales=out.scales_mg,
            k_column=heads.k_column, v_column=heads.v_column, queries_per_kv=group, ctx=kv.k_hsd.shape[1],
            scale=log2_scale(d), eps=heads.norm_eps, **_cache_arguments(kv),
        )  # fmt: skip

    def quantize_rows(self, x_mk: Any, out: Activation, num_rows: int) -> None:
        assert out.codes_mk is not None
        k_padded = out.codes_mk.shape[1]
        self.kernels["quantize_rows"](
            (-(-k_padded // QUANTIZED_INPUTS), num_rows), (256,), x_mk=x_mk, codes_mk=out.codes_mk,
            scales_mg=out.scales_mg, k=out.num_inputs, k_padded=k_padded,
        )  # fmt: skip
