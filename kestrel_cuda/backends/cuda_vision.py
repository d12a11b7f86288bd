"""The steps of the vision tower as kernel launches. Compared with backends/cpu_vision.py, their definition.

bfloat16 rows on tensor cores where the tower's sizes let rows be read 16 bytes at a time, which those of every release
do; otherwise, and where exact features are asked for, float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from kestrel_cuda.backends.cuda_device import CudaDevice
from kestrel_cuda.backends.vision import BFLOAT16, Affine, After, PatchPlaces
from kestrel_cuda.config import VisionConfig
from kestrel_cuda.errors import DeviceError
from kestrel_cuda.quant.packed import round_up

# Sizes shared with kernels/vision*.cu; tests/kernels/test_signatures.py reads them out of the sources.
ROW_WARPS = 8
VALUE_THREADS = 256
TILE_M, TILE_N, TILE_THREADS = 128, 128, 128
WARPGROUP_M, WARPGROUP_K, WARPGROUP_THREADS = 128, 64, 384
FLOAT_TILE, FLOAT_THREADS = 64, 256
ATTENTION_KEYS, CHUNK = 64, 8
FLOAT_ATTENTION_THREADS, FLOAT_QUERIES, FLOAT_HEAD_DIM = 128, 4, 128

ATTENTION_WARPS = {16: 8, 32: 8, 64: 8, 72: 6, 80: 6, 128: 4}
"""Warps of a block of the tensor cores' attention, each with 16 queries, by head_dim."""

WARPGROUP_WIDTHS = (192, 128)
"""Columns of a tile of the warpgroups' linears. An output's sum is the same in either, to the bit."""

WARPGROUP_QUERIES, WARPGROUP_KEYS, WARPGROUP_ATTENTION_THREADS, WARPGROUP_ATTENTION_STAGES = 192, 128, 512, 3
WARPGROUP_HEAD_DIMS = (64, 72)
"""Heads of the releases, which the attention on Hopper's warpgroup mma serves."""


class VisionKernels(CudaDevice):
    """`VisionSteps` on one GPU."""

    def patch_dtype(self, vision: VisionConfig) -> DTypeLike:
        sizes = (vision.hidden_size, vision.intermediate_size, vision.out_hidden_size, vision.patch_inputs)
        served = vision.head_dim in ATTENTION_WARPS and all(size % CHUNK == 0 for size in sizes)
        return BFLOAT16 if served else np.dtype(np.float32)

    def put_pixels(self, x_mk: Any, codes_mk: Any, values_cv: Any) -> None:
        (m, k), num_channels = x_mk.shape, values_cv.shape[0]
        self.kernels[f"put_pixels_{_kind(x_mk)}"](
            (m, -(-k // VALUE_THREADS)), (VALUE_THREADS,), codes_mk=codes_mk, values_cv=values_cv, x_mk=x_mk, k=k,
            channel_inputs=k // num_channels, channel_codes=codes_mk.shape[1] // num_channels,
        )  # fmt: skip

    def affine(self, x_mk: Any, weights: Affine, out_mn: Any, after: After = After.NOTHING) -> None:
        (m, k), n = x_mk.shape, weights.weight.shape[0]
        common = {"x_mk": x_mk, "w_nk": weights.weight, "bias_n": weights.bias, "out_mn": out_mn,
                  "m": m, "n": n, "k": k, "after": int(after)}  # fmt: skip
        if x_mk.dtype == np.float32:
            grid = (-(-n // FLOAT_TILE), -(-m // FLOAT_TILE))
            self.kernels["affine_f32"](grid, (FLOAT_THREADS,), **common)
            return
        common["out_is_float"] = int(out_mn.dtype == np.float32)
        if self.has_warpgroup_mma:
            self._affine_of_warpgroups(m, n, common)
            return
        grid = (-(-n // TILE_N), -(-m // TILE_M))
        self.kernels["affine_bf16"](grid, (TILE_THREADS,), **common)

    def _affine_of_warpgroups(self, m: int, n: int, arguments: dict[str, Any]) -> None:
        num_tiles = {width: -(-m // WARPGROUP_M) * -(-n // width) for width in WARPGROUP_WIDTHS}
        # The fewer columns a multiprocessor takes one after another.
        width = min(num_tiles, key=lambda width: -(-num_tiles[width] // self.num_multiprocessors) * width)
        self.kernels[f"affine_warpgroup_bf16_{width}"](
            (min(num_tiles[width], self.num_multiprocessors),), (WARPGROUP_THREADS,),
            shared_bytes=warpgroup_affine_bytes(width), **arguments,
        )  # fmt: skip

    def layer_norm(self, h_mk: Any, weights: Affine, out_mk: Any) -> None:
        m, k = h_mk.shape
        self.kernels[f"layer_norm_{_kind(out_mk)}"](
            (-(-m // ROW_WARPS),), (32 * ROW_WARPS,), x_mk=h_mk, weight_k=weights.weight, bias_k=weights.bias,
            y_mk=out_mk, m=m, k=k,
        )  # fmt: skip

    def add_patch_positions(self, h_mn: Any, table_pn: Any, places: PatchPlaces) -> None:
        m, n = h_mn.shape
        self.kernels["add_patch_positions"](
            (m, -(-n // VALUE_THREADS)), (VALUE_THREADS,), h_mn=h_mn, table_pn=table_pn, places_m2=places.places_m2,
            row_taps_p2=places.row_taps_p2, row_shares_p=places.row_shares_p, column_taps_p2=places.column_taps_p2,
            column_shares_p=places.column_shares_p, frame_rows=places.places_m2.shape[0],
            side=math.isqrt(table_pn.shape[0]), n=n,
        )  # fmt: skip

    def attend_patches(self, qkv_mn: Any, num_heads: int, places: PatchPlaces, out_mn: Any) -> None:
        m, frame_rows = qkv_mn.shape[0], places.places_m2.shape[0]
        head_dim = out_mn.shape[1] // num_heads
        self.kernels[f"rotate_patches_{_kind(qkv_mn)}"](
            (m, -(-num_heads * head_dim // VALUE_THREADS)), (VALUE_THREADS,), qkv_mn=qkv_mn,
            places_m2=places.places_m2, cos_pd=places.cos_pd, sin_pd=places.sin_pd, frame_rows=frame_rows,
            num_heads=num_heads, head_dim=head_dim,
        )  # fmt: skip
        scale_log2 = head_dim**-0.5 * math.log2(math.e)
        common = {"qkv_mn": qkv_mn, "out_mn": out_mn, "frame_rows": frame_rows, "num_heads": num_heads,
                  "scale_log2": scale_log2}  # fmt: skip
        num_frames = m // frame_rows
        if qkv_mn.dtype == np.float32:
            if head_dim > FLOAT_HEAD_DIM:
                raise DeviceError(
                    f"the vision tower has heads of {head_dim} channels; at most {FLOAT_HEAD_DIM} are taken on a GPU: "
                    "use --backend cpu"
                )
            queries = FLOAT_ATTENTION_THREADS // 32 * FLOAT_QUERIES
            grid = (-(-frame_rows // queries), num_heads, num_frames)
            self.kernels["attend_patches_f32"](grid, (FLOAT_ATTENTION_THREADS,), head_dim=head_dim, **common)
            return
        if self.has_warpgroup_mma and head_dim in WARPGROUP_HEAD_DIMS:
            grid = (-(-frame_rows // WARPGROUP_QUERIES), num_heads, num_frames)
            self.kernels[f"attend_patches_warpgroups_{head_dim}"](
                grid, (WARPGROUP_ATTENTION_THREADS,), shared_bytes=warpgroup_attention_bytes(head_dim), **common
            )
            return
        warps, shared_bytes = ATTENTION_WARPS[head_dim], attention_bytes(head_dim)
        grid = (-(-frame_rows // (16 * warps)), num_heads, num_frames)
        self.kernels[f"attend_patches_{head_dim}"](grid, (32 * warps,), shared_bytes=shared_bytes, **common)


def warpgroup_affine_bytes(width: int) -> int:
    """kernels/vision_linear_warpgroup.cu's `Shared`: stages, outputs, and barriers in as much as is left to align."""
    num_stages = 3 if width > 128 else 4
    stage_bytes = (WARPGROUP_M + width) * WARPGROUP_K * 2
    return num_stages * stage_bytes + round_up(WARPGROUP_M * (width + 8) * 4 + 2 * 8 * (num_stages + 1), 1024)


def attention_bytes(head_dim: int) -> int:
    """Keys and values by stages: kernels/vision_attention.cu's `Tiles`."""
    num_stages, row_chunks = 3 if head_dim <= 80 else 2, -(-head_dim // 16) * 2 + 1
    return 2 * num_stages * ATTENTION_KEYS * row_chunks * CHUNK * 2


def warpgroup_attention_bytes(head_dim: int) -> int:
    """kernels/vision_attention_warpgroup.cu's `Shared`: keys and values by stages, queries, two barriers a stage."""
    tail = head_dim - 64
    tail_bytes = -(-tail // 16) * 32
    keys, queries, stages = WARPGROUP_KEYS, WARPGROUP_QUERIES, WARPGROUP_ATTENTION_STAGES
    stage_bytes = round_up(keys * (256 + tail_bytes + tail * 2) + 32, 1024)
    return round_up(stages * stage_bytes + queries * (128 + tail_bytes) + 16 + 16 * stages, 1024)


def _kind(array: Any) -> str:
    return "f32" if array.dtype == np.float32 else "bf16"
