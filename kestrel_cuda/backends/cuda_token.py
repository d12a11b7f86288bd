"""A whole token as one launch: a block a multiprocessor takes one row through every layer and lm_head.

The kernel (kernels/token.cuh) gives the bits of the steps it stands for. Cards with little shared memory, and weights
or caches it does not serve, go through the stretches of cuda_decode.py and cuda_attention.py instead. Its blocks wait
for one another, so all of them must be on the card at once: one a multiprocessor, launched together or not at all.
token_cuts.py says which block takes what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.cuda_attention import AttentionSteps, log2_scale
from kestrel_cuda.backends.cuda_copy_maps import describe
from kestrel_cuda.backends.cuda_device import TABLE_KINDS, CudaDevice
from kestrel_cuda.backends.operands import Decoder, DecoderLayer, DeviceWeight, SequenceState
from kestrel_cuda.backends.token_cuts import (
    COLUMNS,
    LEAST_ON_THEIR_WAY,
    MOST_SLOTS,
    PIECE_GROUPS,
    SPLIT_SLOTS,
    THREADS,
    Cut,
    copy_order,
    cut_token,
    is_served,
    least_work_bytes,
    most_on_their_way,
    ring_bytes,
    table_bytes,
    words_per_piece,
)
from kestrel_cuda.kernels.library import Kernel, driver_bindings_work
from kestrel_cuda.quant.grouped import ACTIVATION_GROUP

# Sizes shared with kernels/token.cuh, beside those of token_cuts.py.
COPY_THREADS = 128
COUNTER_WORDS = 2 * 32
COPY_CAPABILITY = 90
"""The compute capability whose instructions the kernel has: bulk copies, registers that change hands."""

HEAD_DIMS = (32, 64, 128)


def copy_map(array: Any, cut: Cut, rows_per_piece: int) -> list[int]:
    """The driver's description, as 16 words, of a matrix [rows, columns] of codes or scales by the boxes of a cut.

    Its axes, innermost first: columns, halves of an item or gate and up, rows of a piece, pieces or pairs of them.
    Raises DeviceError when the driver refuses.
    """
    columns, size = array.shape[1], array.dtype.itemsize
    row_bytes = columns * size
    piece_bytes = rows_per_piece * row_bytes
    if cut.items_are_pairs:
        num_items, shape, box = cut.num_pieces // 2, (columns, 2), (COLUMNS, 2)
        strides = (piece_bytes, row_bytes, 2 * piece_bytes)
    elif cut.gate_up:
        num_items, shape, box = cut.num_pieces, (columns // 2, 2), (2 * COLUMNS, 2)
        strides = (row_bytes // 2, row_bytes, piece_bytes)
    else:
        num_items, shape, box = cut.num_pieces, (columns, 1), (2 * COLUMNS, 1)
        strides = (row_bytes, row_bytes, piece_bytes)
    lengths, box_lengths = (*shape, rows_per_piece, num_items), (*box, rows_per_piece, cut.box_items)
    return describe(array.data.ptr, size, lengths, strides, box_lengths)


def copy_maps(weights: Sequence[DeviceWeight], cuts: Sequence[Cut]) -> NDArray[np.uint64]:
    """Codes and scales of every matrix by its cut, in the order of their use: [matrices, 2, 16]."""
    return np.array(
        [
            [
                copy_map(weight.codes_kn, cut, words_per_piece(weight.geometry.element)),
                copy_map(weight.scales_gn, cut, PIECE_GROUPS),
            ]
            for weight, cut in zip(weights, cuts, strict=True)
        ],
        np.uint64,
    )


class CudaWholeToken:
    """One launch over a decoder's weights, with the tables and the words that its blocks share."""

    def __init__(self, steps: TokenSteps, kernel: Kernel, decoder: Decoder, cuts: list[Cut], num_slots: int) -> None:
        heads, layers = decoder.heads, decoder.layers
        first = layers[0]
        room = dynamic_bytes(steps, kernel)
        fixed_bytes = table_bytes(cuts, len(layers), steps.num_multiprocessors, heads.head_dim)
        fixed_bytes += num_slots * ring_bytes(decoder)
        cuts = [cut.fit((room - fixed_bytes) // 16 * 16) for cut in cuts]
        hidden, products = first.qkv.geometry.num_inputs, first.down.geometry.num_inputs
        attended, num_splits = heads.num_heads * heads.head_dim, -(-first.kv.k_hsd.shape[1] // SPLIT_SLOTS)
        matrices = [w for layer in layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        maps = copy_maps([*matrices, decoder.lm_head], cuts[:4] * len(layers) + cuts[4:])
        order = copy_order(cuts, steps.num_multiprocessors)
        table = decoder.h_mk if decoder.embedding is None else decoder.embedding
        self._steps, self._kernel, self._shared_bytes = steps, kernel, room
        self._owned = {
            "copy_maps": steps.to_device(maps.view(np.uint8)),
            "copy_order": steps.to_device(order),
            "pointers": steps.to_device(np.array([_beside(layer) for layer in layers], np.uint64)),
            "cuts": steps.to_device(np.array([astuple(cut) for cut in cuts], np.int32)),
            "h_words": steps.zeros((hidden,), np.uint64),
            "qkv_words": steps.zeros((first.qkv.geometry.n_padded,), np.uint64),
            "attended_words": steps.zeros((attended // 4 + attended // ACTIVATION_GROUP,), np.uint64),
            "product_words": steps.zeros((products // 4 + products // ACTIVATION_GROUP,), np.uint64),
            "half_words": steps.zeros((max(1, cuts[2].num_halved) * 4 * COLUMNS,), np.uint64),
            "split_words": steps.zeros((heads.num_heads, num_splits, heads.head_dim + 2), np.uint64),
            "counters": steps.zeros((COUNTER_WORDS,), np.uint32),
        }
        self._given = {
            "final_norm_k": decoder.final_norm_k,
            "table": table,
            "table_kind": TABLE_KINDS[table.dtype],
            "is_embedded": int(decoder.embedding is None),
            "logits_v": decoder.logits_mv,
            "num_layers": len(layers),
            "num_slots": num_slots,
            "most_on_their_way": most_on_their_way(cuts, num_slots, steps.num_multiprocessors),
            "order_stride": order.shape[1],
            "hidden": hidden,
            "num_kv_heads": heads.num_kv_heads,
            "k_column": heads.k_column,
            "v_column": heads.v_column,
            "queries_per_kv": heads.queries_per_kv,
            "ctx": first.kv.k_hsd.shape[1],
            "num_splits": num_splits,
            "scale": log2_scale(heads.head_dim),
            "eps": heads.norm_eps,
        }

    def __call__(self, state: SequenceState) -> None:
        self._kernel(
            (self._steps.num_multiprocessors,), (THREADS + COPY_THREADS,), all_at_once=True,
            shared_bytes=self._shared_bytes, cos_sd=state.cos_sd, sin_sd=state.sin_sd, position=state.position,
            tokens=state.tokens, **self._owned, **self._given,
        )  # fmt: skip

    def close(self) -> None:
        for array in self._owned.values():
            self._steps.free(array)
        self._owned = {}


class TokenSteps(AttentionSteps):
    """The whole token of `Backend` on a GPU."""

    def token_file(self, head_dim: int) -> str | None:
        """The kernel file of a whole token with heads of that size; None where there is no such launch."""
        if self.compute_capability != COPY_CAPABILITY or not driver_bindings_work() or head_dim not in HEAD_DIMS:
            return None
        return "token" if head_dim == 128 else "token_small"

    def whole_token(self, decoder: Decoder) -> CudaWholeToken | None:
        if self.token_file(decoder.heads.head_dim) is None or not is_served(decoder):
            return None
        heads, first, num_blocks = decoder.heads, decoder.layers[0], self.num_multiprocessors
        kernel = self.kernels[f"decode_token_{first.qkv.geometry.element.value}_{heads.head_dim}"]
        cuts = cut_token((first.qkv, first.o, first.gate_up, first.down), decoder.lm_head, num_blocks)
        least = table_bytes(cuts, len(decoder.layers), num_blocks, heads.head_dim)
        least += least_work_bytes(cuts, heads.head_dim, heads.queries_per_kv)
        num_slots = min(MOST_SLOTS, (dynamic_bytes(self, kernel) - least) // ring_bytes(decoder))
        if most_on_their_way(cuts, num_slots, num_blocks) < LEAST_ON_THEIR_WAY:
            return None
        return CudaWholeToken(self, kernel, decoder, cuts, num_slots)


def dynamic_bytes(device: CudaDevice, kernel: Kernel) -> int:
    """All the dynamic shared memory that a block of the kernel can have on this card."""
    return int(device.most_shared_bytes) - kernel.static_shared_bytes


def _beside(layer: DecoderLayer) -> list[int]:
    """Addresses of what a layer has beside its matrices, in the order of kernels/token.cuh's `LayerPointer`."""
    kv = layer.kv
    arrays = (layer.input_norm_k, layer.post_norm_k, layer.q_norm_d, layer.k_norm_d, kv.k_hsd, kv.v_hsd)
    return [int(array.data.ptr) for array in arrays]
