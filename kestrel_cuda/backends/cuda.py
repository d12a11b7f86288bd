"""The steps of a layer as kernel launches on one GPU. Compared with backends/cpu.py, its definition.

Which kernel runs depends on the number of rows; the bits of a row's result do not (see kernels/gemv.cu and
kernels/attention_half.cuh for the orders of summation they share).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kestrel_cuda.backends.base import Preparation
from kestrel_cuda.backends.cuda_attention import QUANTIZED_INPUTS
from kestrel_cuda.backends.cuda_decode import NORM_THREADS, DecodeSteps
from kestrel_cuda.backends.cuda_device import TABLE_KINDS
from kestrel_cuda.backends.cuda_token import TokenSteps
from kestrel_cuda.backends.cuda_vision import VisionKernels
from kestrel_cuda.backends.operands import Activation, DeviceWeight, SequenceState, new_activation
from kestrel_cuda.config import KvDtype
from kestrel_cuda.quant.grouped import ACTIVATION_GROUP
from kestrel_cuda.quant.packed import Element, PackedGeometry, round_up

# Sizes shared with the kernels; tests/kernels/test_signatures.py reads them out of the sources.
WIDE_M, WIDE_N, WIDE_THREADS = 128, 128, 256
SMALL_M, SMALL_N, SMALL_THREADS = 64, 64, 128
TILE_STAGES = 3
WARPGROUP_M, WARPGROUP_N, WARPGROUP_THREADS = 128, 128, 384
WARPGROUP_STAGES, WARPGROUP_SCALES = 4, 160
PIECE_INPUTS = 128
MAX_ROWS_KERNEL = 4
MAX_WARPS = 16
FLOAT_ROWS = 8

_ATTENTION_FILES = {
    KvDtype.F16: ("attention_few", "attention_many"),
    KvDtype.F32: (),
    KvDtype.Q8: ("attention_few_q8", "attention_many_q8"),
}
_WEIGHT_KINDS = {Element.BF16: 0, Element.F16: 1, Element.F32: 2}


class CudaBackend(DecodeSteps, TokenSteps, VisionKernels):
    """One GPU. Raises DeviceError when it is missing, too old, or the driver cannot be used."""

    def __init__(self, device: int = 0, *, cubin_dir: Path | None = None) -> None:
        super().__init__(device, cubin_dir=cubin_dir)
        self._best = self.zeros((256,), np.float32)
        self._best_id = self.zeros((256,), np.int32)

    def prepare_steps(self, *, quantized: bool, kv: KvDtype, head_dim: int, whole_token: bool) -> Preparation:
        files = {"gemv", "norm", "pointwise", "rope", "attention", *_ATTENTION_FILES[kv]}
        if quantized:
            files |= {"quantize", "decode", "gemm"} | ({"gemm_warpgroup"} if self.has_warpgroup_mma else set())
        if quantized and whole_token and kv is KvDtype.F16 and (file := self.token_file(head_dim)):
            files.add(file)
        return Preparation(*self.kernels.compile_beside(files))

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
        common = {"out_mn": out, "m": num_rows, "n": geometry.num_outputs, "n_padded": geometry.n_padded,
                  "ldo": out_mn.shape[1], "residual": int(add)}  # fmt: skip
        if weight.scales_gn is None:
            warps = min(MAX_WARPS, max(1, -(-geometry.num_inputs // PIECE_INPUTS)))
            self.kernels["linear_float"](
                (-(-geometry.n_padded // 32), -(-num_rows // FLOAT_ROWS)), (32 * max(warps, FLOAT_ROWS),),
                x_mk=x.values_mk, values_kn=weight.codes_kn, weight_kind=_WEIGHT_KINDS[geometry.element],
                k=geometry.num_inputs, **common,
            )  # fmt: skip
            return
        assert x.codes_mk is not None
        if num_rows == 1:
            self.linear_row(x, weight, out, add=add)
            return
        suffix = geometry.element.value
        common |= {"x_codes": x.codes_mk, "x_scales": x.scales_mg, "codes_kn": weight.codes_kn,
                   "scales_gn": weight.scales_gn, "k_padded": geometry.k_padded,
                   "groups_per_scale": geometry.group_size // ACTIVATION_GROUP}  # fmt: skip
        if num_rows > MAX_ROWS_KERNEL:
            self._linear_tiles(geometry, common)
            return
        rows = 2 if num_rows == 2 else 4
        warps = max(min(MAX_WARPS, -(-geometry.k_padded // PIECE_INPUTS)), rows)
        grid = (-(-geometry.n_padded // 32), -(-num_rows // rows))
        self.kernels[f"linear_rows{rows}_{suffix}"](grid, (32 * warps,), **common)

    def _linear_tiles(self, geometry: PackedGeometry, common: dict[str, Any]) -> None:
        kernel, rows, columns, threads = "linear_tiles", WIDE_M, WIDE_N, WIDE_THREADS
        # A fourth of the multiprocessors may rest: a wide tile needs fewer instructions and reads half as much.
        if 4 * -(-geometry.n_padded // WIDE_N) * -(-common["m"] // WIDE_M) < 3 * self.num_multiprocessors:
            kernel, rows, columns, threads = "linear_small_tiles", SMALL_M, SMALL_N, SMALL_THREADS
        elif self.has_warpgroup_mma:
            self.kernels[f"linear_warpgroups_{geometry.element.value}"](
                (-(-geometry.n_padded // WARPGROUP_N), -(-common["m"] // WARPGROUP_M)),
                (WARPGROUP_THREADS,),
                shared_bytes=warpgroup_bytes(geometry.element),
                **common,
            )
            return
        stage_bytes = _tile_stage_bytes(geometry.element, rows, columns)
        num_stages = TILE_STAGES if TILE_STAGES * stage_bytes <= self.most_shared_bytes else TILE_STAGES - 1
        self.kernels[f"{kernel}_{geometry.element.value}"](
            (-(-geometry.n_padded // columns), -(-common["m"] // rows)),
            (threads,),
            shared_bytes=num_stages * stage_bytes,
            num_stages=num_stages,
            **common,
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


def warpgroup_bytes(element: Element) -> int:
    """gemm_warpgroup.cu's `Shared`: stages of codes and scales, aligned as the mma wants them, two barriers each."""
    groups, words_per_group = PIECE_INPUTS // ACTIVATION_GROUP, 8 if element is Element.INT8 else 4
    codes = WARPGROUP_M * PIECE_INPUTS + groups * words_per_group * (WARPGROUP_N + 8) * 4
    stage_bytes = round_up(codes + groups * (WARPGROUP_SCALES * 4 + WARPGROUP_N * 2), 1024)
    return WARPGROUP_STAGES * stage_bytes + 1024


def _tile_stage_bytes(element: Element, rows: int, columns: int) -> int:
    """gemm.cu's `Stage`: codes of rows and of columns, their scales, and what keeps the banks apart."""
    groups = PIECE_INPUTS // ACTIVATION_GROUP
    row_words, words_per_group = (36, 8) if element is Element.INT8 else (40, 4)
    words = rows * row_words + groups * words_per_group * (columns + 8)
    return 4 * (words + groups * (rows + 8 + columns // 2))
