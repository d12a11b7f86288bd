"""A whole token as one launch: a block a multiprocessor takes one row through every layer and lm_head.

The kernels (kernels/token.cuh) give the bits of the steps they stand for. Cards with little shared memory, and weights
or caches it does not serve, go through the stretches of cuda_decode.py and cuda_attention.py instead. Its blocks wait
for one another, so all of them must be on the card at once: one a multiprocessor, launched together or not at all.
token_cuts.py says which block takes what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.cuda_attention import AttentionSteps, log2_scale
from kestrel_cuda.backends.cuda_copy_maps import describe
from kestrel_cuda.backends.cuda_device import TABLE_KINDS, CudaDevice
from kestrel_cuda.backends.operands import Decoder, DecoderLayer, DeviceWeight, SequenceState, TokenShape
from kestrel_cuda.backends.token_cuts import (
    BOXED_HEAD_DIM,
    COLUMNS,
    PANEL_CHANNELS,
    PIECE_GROUPS,
    SLICE_CHANNELS,
    SPLIT_SLOTS,
    SUBTILE_SLOTS,
    THREADS,
    Cut,
    Rings,
    copy_order,
    forms_of,
    is_served,
    most_on_their_way,
    rings_of,
    slot_bytes,
    table_bytes,
    words_per_piece,
)
from kestrel_cuda.kernels.launch import Kernel, driver_bindings_work
from kestrel_cuda.quant.grouped import ACTIVATION_GROUP
from kestrel_cuda.quant.packed import round_up

# Sizes shared with kernels/token*.cuh, beside those of token_cuts.py.
COPY_THREADS = 128
COUNTER_WORDS = 2 * 32
GROUP_WORDS = 3 * 2
COPY_CAPABILITY = 90
"""The compute capability whose instructions the kernel has: bulk copies, registers that change hands."""

HEAD_DIMS = (32, 64, 128)
SHARED_ALIGNMENT = 1024
LEAST_STATIC_BYTES, MOST_STATIC_BYTES = 1 << 10, 4 << 10
"""What the kernels have of their own, which is known when they are compiled."""


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


def kv_maps(layers: Sequence[DecoderLayer]) -> NDArray[np.uint64]:
    """Every layer's keys and values by panels of a subtile's slots, and its values by slices: [layers, 3, 16]."""
    return np.array(
        [
            [
                kv_map(layer.kv.k_hsd, PANEL_CHANNELS),
                kv_map(layer.kv.v_hsd, PANEL_CHANNELS),
                kv_map(layer.kv.v_hsd, SLICE_CHANNELS),
            ]
            for layer in layers
        ],
        np.uint64,
    )


def kv_map(rows_hsd: Any, channels: int) -> list[int]:
    """The driver's description of a layer's keys or values. Raises DeviceError when the driver refuses."""
    num_heads, ctx, head_dim = rows_hsd.shape
    row_bytes = head_dim * 2
    lengths, strides = (head_dim, ctx, num_heads), (row_bytes, ctx * row_bytes)
    box = (channels, SUBTILE_SLOTS, 1)
    return describe(rows_hsd.data.ptr, 2, lengths, strides, box, swizzled_bytes=channels * 2)


@dataclass(frozen=True)
class Form:
    """One of the kernels that take a token, and how it uses shared memory."""

    kernel: Kernel
    rings: Rings


class CudaWholeToken:
    """One launch over a decoder's weights, with the tables and the words that its blocks share.

    A context of one split has a form of its own, where heads have 128 channels and there is room for keys and values.
    """

    def __init__(self, steps: TokenSteps, decoder: Decoder, of_one_split: Form, of_many: Form) -> None:
        heads, layers, cuts = decoder.heads, decoder.layers, of_many.rings.cuts
        first, num_blocks = layers[0], steps.num_multiprocessors
        hidden, products = first.qkv.geometry.num_inputs, first.down.geometry.num_inputs
        attended, num_splits = heads.num_heads * heads.head_dim, -(-first.kv.k_hsd.shape[1] // SPLIT_SLOTS)
        matrices = [w for layer in layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        maps = copy_maps([*matrices, decoder.lm_head], cuts[:4] * len(layers) + cuts[4:])
        # Of no use, and none, where nothing copies by them.
        kv = kv_maps(layers) if of_many.rings.num_kv_slots else np.zeros((len(layers), 3, 16), np.uint64)
        maps = np.concatenate([maps.reshape(-1, 16), kv.reshape(-1, 16)])
        order = copy_order(cuts, num_blocks)
        table = decoder.h_mk if decoder.embedding is None else decoder.embedding
        self._steps, self._cuts = steps, list[Any]()
        self._owned = {
            "copy_maps": steps.to_device(maps.view(np.uint8)),
            "copy_order": steps.to_device(order),
            "pointers": steps.to_device(np.array([_beside(layer) for layer in layers], np.uint64)),
            "h_words": steps.zeros((hidden,), np.uint64),
            "qkv_words": steps.zeros((first.qkv.geometry.n_padded,), np.uint64),
            "attended_words": steps.zeros((attended // ACTIVATION_GROUP * GROUP_WORDS,), np.uint64),
            "product_words": steps.zeros((products // ACTIVATION_GROUP * GROUP_WORDS,), np.uint64),
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
        self._of_one_split = self._launch_of(of_one_split, decoder)
        self._of_many = self._of_one_split if of_many is of_one_split else self._launch_of(of_many, decoder)

    def __call__(self, state: SequenceState, num_slots: int) -> None:
        launch = self._of_one_split if num_slots <= SPLIT_SLOTS else self._of_many
        launch(
            (self._steps.num_multiprocessors,), (THREADS + COPY_THREADS,), all_at_once=True, cos_sd=state.cos_sd,
            sin_sd=state.sin_sd, position=state.position, tokens=state.tokens, **self._owned, **self._given,
        )  # fmt: skip

    def close(self) -> None:
        for array in (*self._owned.values(), *self._cuts):
            self._steps.free(array)
        self._owned, self._cuts = {}, []

    def _launch_of(self, form: Form, decoder: Decoder) -> Callable[..., None]:
        """The form's kernel with its own share of the parameters."""
        steps, heads, element, rings = self._steps, decoder.heads, decoder.lm_head.geometry.element, form.rings
        room_bytes = dynamic_bytes(steps, form.kernel)
        fixed_bytes = table_bytes(rings.cuts, len(decoder.layers), steps.num_multiprocessors, heads.head_dim)
        fixed_bytes += rings.num_slots * slot_bytes(element) + rings.num_kv_slots * rings.kv.slot_bytes
        cuts = [cut.fit((room_bytes - fixed_bytes) // 16 * 16) for cut in rings.cuts]
        self._cuts.append(steps.to_device(np.array([astuple(cut) for cut in cuts], np.int32)))
        return partial(
            form.kernel,
            cuts=self._cuts[-1],
            num_slots=rings.num_slots,
            num_kv_slots=rings.num_kv_slots,
            most_on_their_way=most_on_their_way(cuts, rings.num_slots, steps.num_multiprocessors),
            shared_bytes=int(steps.most_shared_bytes) - form.kernel.static_shared_bytes,
        )


class TokenSteps(AttentionSteps):
    """The whole token of `Backend` on a GPU."""

    def token_files(self, shape: TokenShape) -> list[str]:
        """The kernel files that such tokens may need; none where there is no such launch."""
        element, head_dim = shape.lm_head.element, shape.head_dim
        if head_dim != BOXED_HEAD_DIM:
            return [f"token_small:{element}_{head_dim}_held" for _ in self._forms(shape)]
        return [f"token_{element}_{form}" for form in self._forms(shape)]

    def whole_token(self, decoder: Decoder) -> CudaWholeToken | None:
        if not is_served(decoder):
            return None
        shape, names = decoder.shape, self._forms(decoder.shape)
        of_many = next(
            (form for name in ("boxed", "held") if name in names and (form := self._form(name, shape))), None
        )
        if of_many is None:
            return None
        of_one_split = self._form("one_split", shape) if "one_split" in names and of_many.rings.num_kv_slots else None
        return CudaWholeToken(self, decoder, of_one_split or of_many, of_many)

    def _forms(self, shape: TokenShape) -> list[str]:
        """The forms that may have room, whatever shared memory their kernels turn out to have of their own."""
        if self.compute_capability != COPY_CAPABILITY or not driver_bindings_work() or shape.head_dim not in HEAD_DIMS:
            return []
        rooms = (int(self.most_shared_bytes) - static_bytes for static_bytes in (LEAST_STATIC_BYTES, MOST_STATIC_BYTES))
        return sorted({form for room in rooms for form in forms_of(shape, self.num_multiprocessors, room)})

    def _form(self, name: str, shape: TokenShape) -> Form | None:
        """A form in the shared memory of this card, if it has room for it."""
        kernel = self.kernels[f"decode_token_{shape.lm_head.element}_{shape.head_dim}_{name}"]
        rings = rings_of(name, shape, self.num_multiprocessors, dynamic_bytes(self, kernel))
        return Form(kernel, rings) if rings else None


def dynamic_bytes(device: CudaDevice, kernel: Kernel) -> int:
    """The dynamic shared memory that a block of the kernel can use on this card: it begins aligned."""
    assert LEAST_STATIC_BYTES <= round_up(kernel.static_shared_bytes, SHARED_ALIGNMENT) <= MOST_STATIC_BYTES
    return int(device.most_shared_bytes) - round_up(kernel.static_shared_bytes, SHARED_ALIGNMENT)


def _beside(layer: DecoderLayer) -> list[int]:
    """Addresses of what a layer has beside its matrices, in the order of kernels/token_state.cuh's `LayerPointer`."""
    kv = layer.kv
    arrays = (layer.input_norm_k, layer.post_norm_k, layer.q_norm_d, layer.k_norm_d, kv.k_hsd, kv.v_hsd)
    return [int(array.data.ptr) for array in arrays]
