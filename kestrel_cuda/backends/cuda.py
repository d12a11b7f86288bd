"""The steps of a layer as kernel launches on one GPU. Compared with backends/cpu.py, its definition.

Which kernel runs depends on the number of rows; the bits of a row's result do not (see kernels/gemv.cu and
kernels/attention_half.cuh for the orders of summation they share).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kestrel_cuda.backends.base import Preparation
from kestrel_cuda.backends.cuda_attention import QUANTIZED_INPUTS, WARPGROUP_HEAD_DIMS
from kestrel_cuda.backends.cuda_copy_maps import ROW_MULTIPLE_BYTES, CopyMaps
from kestrel_cuda.backends.cuda_decode import NORM_THREADS, DecodeSteps
from kestrel_cuda.backends.cuda_device import TABLE_KINDS
from kestrel_cuda.backends.cuda_token import TokenSteps
from kestrel_cuda.backends.cuda_vision import VisionKernels
from kestrel_cuda.backends.operands import Activation, DeviceWeight, SequenceState, TokenShape, new_activation
from kestrel_cuda.config import KvDtype
from kestrel_cuda.kernels.launch import driver_bindings_work
from kestrel_cuda.quant.grouped import ACTIVATION_GROUP
from kestrel_cuda.quant.packed import Element, PackedGeometry, round_up

# Sizes shared with the kernels; tests/kernels/test_signatures.py reads them out of the sources.
WIDE_M, WIDE_N, WIDE_THREADS = 128, 128, 256
SMALL_M, SMALL_N, SMALL_THREADS = 64, 64, 128
TILE_STAGES = 3
WARPGROUP_M, WARPGROUP_N, WARPGROUP_THREADS = 128, 128, 384
WARPGROUP_STAGES, WARPGROUP_SCALES, WARPGROUP_WORDS = 4, 160, 136
PIECE_INPUTS, PIECE_GROUPS = 128, 4
MAX_ROWS_KERNEL = 4
MAX_WARPS = 16
FLOAT_ROWS = 8

_ATTENTION_FILES = {
    KvDtype.F16: ("attention_few", "attention_many"),
    KvDtype.Q8: ("attention_few_q8", "attention_many_q8"),
}
_WEIGHT_KINDS = {Element.BF16: 0, Element.F16: 1, Element.F32: 2}


class CudaBackend(DecodeSteps, TokenSteps, VisionKernels):
    """One GPU. Raises DeviceError when it is missing, too old, or the driver cannot be used."""

    def __init__(self, device: int = 0, *, cubin_dir: Path | None = None) -> None:
        super().__init__(device, cubin_dir=cubin_dir)
        self._best = self.zeros((256,), np.float32)
        self._best_id = self.zeros((256,), np.int32)
        self._maps = CopyMaps()

    def prepare_steps(
        self, *, quantized: bool, kv: KvDtype, head_dim: int, element: Element | None, token: TokenShape | None
    ) -> Preparation:
        parts = {"norm", "pointwise", "rope", f"attention:f32_{head_dim}"}
        if kv is not KvDtype.F32:
            few, many = _ATTENTION_FILES[kv]
            parts.add(f"{few}:{kv}_{head_dim}")
            if kv is KvDtype.F16 and self.has_warpgroup_mma and head_dim in WARPGROUP_HEAD_DIMS:
                parts.add(f"attention_many_warpgroup:{head_dim}")
            else:
                parts.add(f"{many}:{kv}_{head_dim}")
        of_weights = f":{element}" if element else ""
        parts.add(f"gemv{of_weights}")
        if quantized:
            parts |= {"quantize", f"decode{of_weights}", f"gemm{of_weights}"}
            if self._has_warpgroup_linears:
                parts.add(f"gemm_warpgroup{of_weights}")
        if token is not None and kv is KvDtype.F16:
            parts |= set(self.token_files(token))
        return Preparation(*self.kernels.compile_beside(parts))

    def activation(self, max_rows: int, num_inputs: int, quantized: bool) -> Activation:
        return new_activation(self.zeros, max_rows, num_inputs, quantized)

    def embed(self, table: Any, state: SequenceState, h_mk: Any, num_rows: int) -> None:
        self.kernels["embed_rows"](
            (num_rows,), (256,), table=table, tokens=state.tokens, position=state.position, h_mk=h_mk,
            table_kind=TABLE_KINDS[table.dtype], k=h_mk.shape[1],
        )  # fmt: skip

    def norm(self, h_mk: Any, weight_k: Any, eps: float, out: Activation, num_rows: int) -> None:
        k = out.num_inputs
        if out.codes_mk is None:
            self.kernels["rms_norm"](
                (num_rows,), (NORM_THREADS,), h_mk=h_mk, weight_k=weight_k, y_mk=out.values_mk, k=k, eps=eps
            )
        else:
            self.kernels["rms_norm_quantize"](
                (num_rows,), (NORM_THREADS,), h_mk=h_mk, weight_k=weight_k, codes_mk=out.codes_mk,
                scales_mg=out.scales_mg, k=k, k_padded=out.codes_mk.shape[1], eps=eps,
            )  # fmt: skip

    def linear(
        self, x: Activation, weight: DeviceWeight, out_mn: Any, num_rows: int, *, column: int = 0, add: bool = False
    ) -> None:
        geometry = weight.geometry
        out = out_mn if column == 0 else out_mn.reshape(-1)[column:]
        common = {"out_mn": out, "m": num_rows, "n": geometry.num_outputs, "ldo": out_mn.shape[1],
                  "residual": int(add)}  # fmt: skip
        if weight.scales_gn is None:
            warps = min(MAX_WARPS, max(1, -(-geometry.num_inputs // PIECE_INPUTS)))
            self.kernels["linear_float"](
                (-(-geometry.n_padded // 32), -(-num_rows // FLOAT_ROWS)), (32 * max(warps, FLOAT_ROWS),),
                x_mk=x.values_mk, values_kn=weight.codes_kn, weight_kind=_WEIGHT_KINDS[geometry.element],
                k=geometry.num_inputs, n_padded=geometry.n_padded, **common,
            )  # fmt: skip
            return
        assert x.codes_mk is not None
        if num_rows == 1:
            self.linear_row(x, weight, out, add=add)
            return
        suffix = geometry.element.value
        common |= {"x_scales": x.scales_mg, "k_padded": geometry.k_padded,
                   "groups_per_scale": geometry.group_size // ACTIVATION_GROUP}  # fmt: skip
        codes = {"x_codes": x.codes_mk, "codes_kn": weight.codes_kn, "scales_gn": weight.scales_gn,
                 "n_padded": geometry.n_padded}  # fmt: skip
        if num_rows <= MAX_ROWS_KERNEL:
            rows = 2 if num_rows == 2 else 4
            warps = max(min(MAX_WARPS, -(-geometry.k_padded // PIECE_INPUTS)), rows)
            grid = (-(-geometry.n_padded // 32), -(-num_rows // rows))
            self.kernels[f"linear_rows{rows}_{suffix}"](grid, (32 * warps,), **codes, **common)
            return
        # A fourth of the multiprocessors may rest: a wide tile needs fewer instructions and reads half as much.
        num_wide = -(-geometry.n_padded // WIDE_N) * -(-num_rows // WIDE_M)
        if 4 * num_wide < 3 * self.num_multiprocessors:
            self._linear_tiles("linear_small_tiles", SMALL_M, SMALL_N, SMALL_THREADS, geometry, codes | common)
        elif self._has_warpgroup_linears and 2 * geometry.n_padded % ROW_MULTIPLE_BYTES == 0:
            self._linear_warpgroups(x, weight, common)
        else:
            self._linear_tiles("linear_tiles", WIDE_M, WIDE_N, WIDE_THREADS, geometry, codes | common)

    @property
    def _has_warpgroup_linears(self) -> bool:
        return self.has_warpgroup_mma and driver_bindings_work()

    def _linear_warpgroups(self, x: Activation, weight: DeviceWeight, common: dict[str, Any]) -> None:
        geometry = weight.geometry
        groups_per_scale = common["groups_per_scale"]
        assert groups_per_scale == 1 or (groups_per_scale >= PIECE_GROUPS and groups_per_scale.bit_count() == 1)
        scale_rows = PIECE_GROUPS if groups_per_scale == 1 else 1
        self.kernels[f"linear_warpgroups_{geometry.element.value}"](
            (-(-geometry.n_padded // WARPGROUP_N), -(-common["m"] // WARPGROUP_M)),
            (WARPGROUP_THREADS,),
            shared_bytes=warpgroup_bytes(geometry.element),
            x_map=self._maps.of(x.codes_mk, (WARPGROUP_M, PIECE_INPUTS), swizzled=True),
            codes_map=self._maps.of(weight.codes_kn, (_word_rows(geometry.element), WARPGROUP_WORDS)),
            scales_map=self._maps.of(weight.scales_gn, (scale_rows, WARPGROUP_N)),
            **common,
        )

    def _linear_tiles(
        self, kernel: str, rows: int, columns: int, threads: int, geometry: PackedGeometry, arguments: dict[str, Any]
    ) -> None:
        stage_bytes = _tile_stage_bytes(geometry.element, rows, columns)
        num_stages = TILE_STAGES if TILE_STAGES * stage_bytes <= self.most_shared_bytes else TILE_STAGES - 1
        self.kernels[f"{kernel}_{geometry.element.value}"](
            (-(-geometry.n_padded // columns), -(-arguments["m"] // rows)),
            (threads,),
            shared_bytes=num_stages * stage_bytes,
            num_stages=num_stages,
            **arguments,
        )

    def silu_mul(self, gate_up_mn: Any, up_column: int, out: Activation, num_rows: int) -> None:
        k, ld = out.num_inputs, gate_up_mn.shape[1]
        if out.codes_mk is None:
            self.kernels["silu_mul_rows"](
                (-(-k // 256), num_rows),
                (256,),
                gate_up=gate_up_mn,
                y_mk=out.values_mk,
                k=k,
                ld=ld,
                up_column=up_column,
            )
        else:
            k_padded = out.codes_mk.shape[1]
            self.kernels["silu_mul_quantize"](
                (-(-k_padded // QUANTIZED_INPUTS), num_rows), (256,), gate_up=gate_up_mn, codes_mk=out.codes_mk,
                scales_mg=out.scales_mg, k=k, k_padded=k_padded, ld=ld, up_column=up_column,
            )  # fmt: skip

    def add(self, target_mk: Any, rows_mk: Any) -> None:
        count = target_mk.size
        self.kernels["add_values"]((-(-count // 256),), (256,), target=target_mk, values=rows_mk, count=count)

    def choose(self, logits_v: Any, num_ids: int, state: SequenceState, num_rows: int) -> None:
        blocks = min(256, -(-num_ids // 256))
        self.kernels["argmax_partial"](
            (blocks,), (256,), dependent=True,
            logits_v=logits_v, best_b=self._best, best_id_b=self._best_id, v=num_ids,
        )  # fmt: skip
        self.kernels["argmax_final"](
            (1,), (256,), dependent=True,
            best_b=self._best, best_id_b=self._best_id, tokens=state.tokens, position=state.position,
            chosen=state.chosen, num_chosen=state.chosen.size, num_blocks=blocks, num_rows=num_rows,
        )  # fmt: skip

    def advance(self, state: SequenceState, num_rows: int) -> None:
        self.kernels["advance_position"]((1,), (1,), position=state.position, num_rows=num_rows)


def _word_rows(element: Element) -> int:
    """Word rows of a piece."""
    return PIECE_GROUPS * (8 if element is Element.INT8 else 4)


def warpgroup_bytes(element: Element) -> int:
    """gemm_warpgroup.cu's `Shared`: stages of codes and scales, aligned as the mma wants them, two barriers each."""
    codes = WARPGROUP_M * PIECE_INPUTS + _word_rows(element) * WARPGROUP_WORDS * 4
    stage_bytes = round_up(codes + PIECE_GROUPS * (WARPGROUP_N * 2 + WARPGROUP_SCALES * 4), 1024)
    return WARPGROUP_STAGES * stage_bytes + 1024


def _tile_stage_bytes(element: Element, rows: int, columns: int) -> int:
    """gemm.cu's `Stage`: codes of rows and of columns, their scales, and what keeps the banks apart."""
    row_words = 36 if element is Element.INT8 else 40
    words = rows * row_words + _word_rows(element) * (columns + 8)
    return 4 * (words + PIECE_GROUPS * (rows + 8 + columns // 2))
