"""One row through a stretch of a layer in a single kernel each, launched so that the next one may start early.

The kernels (kernels/decode.cu) give the bits of the steps they stand for; anything they do not serve (several rows,
unfused or unquantized weights) goes through those steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kestrel_cuda.backends.composed import ComposedSteps
from kestrel_cuda.backends.cuda_device import CudaDevice
from kestrel_cuda.backends.operands import Activation, DeviceWeight
from kestrel_cuda.quant.grouped import ACTIVATION_GROUP

COLUMNS = 16
PIECE_INPUTS = 128
MOST_WARPS = 16
NORM_THREADS = 512
WIDE_SETS = 4
MOST_SHARED_BYTES = 96 << 10
"""Dynamic shared memory that every supported card gives a block beside the static part."""
BLOCKS_PER_MULTIPROCESSOR = 8
"""A linear of more blocks than this reads its norm once instead: every block of norm_linear makes its own."""


class DecodeSteps(CudaDevice, ComposedSteps):
    """The stretches of a layer on a GPU."""

    def norm_linear(
        self,
        h_mk: Any,
        weight_k: Any,
        eps: float,
        scratch: Activation,
        parts: Sequence[tuple[DeviceWeight, int]],
        out_mn: Any,
        num_rows: int,
    ) -> None:
        weight, column = parts[0]
        num_blocks = -(-weight.geometry.n_padded // COLUMNS)
        most_blocks = BLOCKS_PER_MULTIPROCESSOR * self.num_multiprocessors
        shared_bytes = _shared_bytes(weight, 1, makes_codes=True)
        unfused = len(parts) > 1 or column or weight.scales_gn is None
        if num_rows > 1 or unfused or num_blocks > most_blocks or shared_bytes > MOST_SHARED_BYTES:
            super().norm_linear(h_mk, weight_k, eps, scratch, parts, out_mn, num_rows)
            return
        self.kernels[f"norm_linear_{weight.geometry.element.value}"](
            (num_blocks,), (NORM_THREADS,), shared_bytes=shared_bytes, dependent=True,
            h_k=h_mk, weight_k=weight_k, out_n=out_mn, n=weight.geometry.num_outputs, k=scratch.num_inputs, eps=eps,
            **_matrix(weight),
        )  # fmt: skip

    def norm_gate_up(
        self,
        h_mk: Any,
        weight_k: Any,
        eps: float,
        scratch: Activation,
        parts: Sequence[tuple[DeviceWeight, int]],
        gate_up_mn: Any,
        up_column: int,
        out: Activation,
        num_rows: int,
    ) -> None:
        weight, column = parts[0]
        half = out.num_inputs
        shared_bytes = _shared_bytes(weight, 4, makes_codes=True)
        unfused = len(parts) > 1 or column or weight.scales_gn is None or up_column != half
        if num_rows > 1 or unfused or half % ACTIVATION_GROUP or shared_bytes > MOST_SHARED_BYTES:
            super().norm_gate_up(h_mk, weight_k, eps, scratch, parts, gate_up_mn, up_column, out, num_rows)
            return
        self.kernels[f"norm_gate_up_{weight.geometry.element.value}"](
            (half // ACTIVATION_GROUP,), (NORM_THREADS,), shared_bytes=shared_bytes,
            dependent=True, h_k=h_mk, weight_k=weight_k, y_codes=out.codes_mk, y_scales=out.scales_mg, half=half,
            k=scratch.num_inputs, eps=eps, **_matrix(weight),
        )  # fmt: skip

    def linear_row(self, x: Activation, weight: DeviceWeight, out_mn: Any, *, add: bool) -> None:
        """out[0] = x @ weight, or += when `add`, of one quantized row."""
        wide = weight.geometry.n_padded > COLUMNS * BLOCKS_PER_MULTIPROCESSOR * self.num_multiprocessors
        num_sets = WIDE_SETS if wide else 1
        self.kernels[f"{'linear_wide' if wide else 'linear_row'}_{weight.geometry.element.value}"](
            (-(-weight.geometry.n_padded // (COLUMNS * num_sets)),), _block(weight),
            shared_bytes=_shared_bytes(weight, num_sets, makes_codes=False), dependent=True, x_codes=x.codes_mk,
            x_scales=x.scales_mg, out_n=out_mn, n=weight.geometry.num_outputs, add=int(add), **_matrix(weight),
        )  # fmt: skip


def _num_pieces(weight: DeviceWeight) -> int:
    return -(-weight.geometry.k_padded // PIECE_INPUTS)


def _block(weight: DeviceWeight) -> tuple[int]:
    return (32 * max(WIDE_SETS * COLUMNS // 32, min(MOST_WARPS, _num_pieces(weight))),)


def _shared_bytes(weight: DeviceWeight, num_sets: int, *, makes_codes: bool) -> int:
    """decode.cu's `Shared`: piece sums, then activation codes and scales, the norm's weight and the row."""
    k_padded = weight.geometry.k_padded
    codes = k_padded + k_padded // ACTIVATION_GROUP * 4 + 2 * k_padded * 4
    return num_sets * _num_pieces(weight) * COLUMNS * 4 + (codes if makes_codes else 0)


def _matrix(weight: DeviceWeight) -> dict[str, Any]:
    geometry = weight.geometry
    return {
        "codes_kn": weight.codes_kn,
        "scales_gn": weight.scales_gn,
        "n_padded": geometry.n_padded,
        "num_groups": geometry.k_padded // ACTIVATION_GROUP,
        "groups_per_scale": geometry.group_size // ACTIVATION_GROUP,
    }
