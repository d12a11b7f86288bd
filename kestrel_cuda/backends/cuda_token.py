"""A whole token as one launch: a block a multiprocessor takes one row through every layer and lm_head.

The kernel (kernels/token.cuh) gives the bits of the steps it stands for. Cards with little shared memory, and weights
or caches it does not serve, go through the stretches of cuda_decode.py and cuda_attention.py instead. Its blocks wait
for one another, so all of them must be on the card at once: one a multiprocessor, launched together or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.base import Decoder, DecoderLayer, DeviceWeight, SequenceState
from kestrel_cuda.backends.cuda_attention import SPLIT_SLOTS, AttentionSteps, log2_scale
from kestrel_cuda.backends.cuda_device import TABLE_KINDS, CudaDevice
from kestrel_cuda.errors import DeviceError
from kestrel_cuda.kernels.library import Kernel, driver_bindings_work
from kestrel_cuda.quant.grouped import ACTIVATION_GROUP
from kestrel_cuda.quant.packed import Element

# Sizes shared with kernels/token.cuh; tests/kernels/test_signatures.py reads them out of the sources.
THREADS, WARPS = 512, 16
COPY_THREADS = 128
COLUMNS = 16
PIECE_INPUTS = 128
PIECE_GROUPS = PIECE_INPUTS // ACTIVATION_GROUP
MOST_NORM_INPUTS = 8 * THREADS
COUNTER_WORDS = 2 * 32
NUM_LAYER_POINTERS = 6
BOX_ITEMS = 4
ITEM_BIT, KIND_BIT = 16, 24
MOST_SLOTS = 24
LEAST_ON_THEIR_WAY, MOST_ON_THEIR_WAY = 2, 5
"""Boxes on their way to a block while it sums: more keep the memory no busier, and others' words wait behind them."""
MOST_SETS_AT_ONCE = 4
MMA_ROWS, SUBTILES = 16, 4
COPY_CAPABILITY = 90
"""The compute capability whose instructions the kernel has: bulk copies, registers that change hands."""

HEAD_DIMS = (32, 64, 128)


@dataclass(frozen=True)
class Cut:
    """How a linear is cut over blocks and warps: kernels/token_ring.cuh's `Cut`, field by field."""

    n: int
    num_groups: int
    num_sets: int
    num_items: int
    num_pieces: int
    set_columns: int
    items_are_pairs: int
    gate_up: int
    num_halved: int
    sets_at_once: int = 1

    @property
    def input_bytes(self) -> int:
        """Activation codes and their scales."""
        return self.num_groups * (ACTIVATION_GROUP + 4)

    @property
    def sums_bytes(self) -> int:
        """Piece sums of a set."""
        return self.num_pieces * (COLUMNS if self.items_are_pairs else 4 * COLUMNS if self.gate_up else 2 * COLUMNS) * 4

    @property
    def least_bytes(self) -> int:
        """Inputs, and piece sums of a set in each of two buffers and of half a set."""
        return self.input_bytes + (3 if self.num_halved else 2) * self.sums_bytes

    @property
    def box_items(self) -> int:
        """Items of a column, or of its pair of gate and up, in a box."""
        return BOX_ITEMS // 2 if self.gate_up else BOX_ITEMS

    def boxes(self, block: int, num_blocks: int) -> list[int]:
        """What a block copies of this matrix, in the order of its use: a word a box as kernels/token_ring.cuh reads it,
        but for its kind."""
        num_whole = self.num_sets - self.num_halved
        if block >= num_whole:
            return []
        words = []
        if block < 2 * self.num_halved:
            half = self.num_pieces // 2
            first, end = (half, self.num_pieces) if block % 2 else (0, half)
            words += self._boxes_of(num_whole + block // 2, first, end)
        for number in range(block, num_whole, num_blocks):
            words += self._boxes_of(number, 0, self.num_pieces >> self.items_are_pairs)
        return words

    def _boxes_of(self, number: int, first_item: int, end_item: int) -> list[int]:
        column = number * self.set_columns // COLUMNS
        return [column | item << ITEM_BIT for item in range(first_item, end_item, self.box_items)]

    def most_ahead(self, num_blocks: int) -> int:
        """How many boxes lie at most between one that a warp took and the next it waits for, that one counted in."""
        own = {self.num_items} if self.num_sets - self.num_halved > num_blocks or self.num_halved else set()
        if self.num_halved:
            lower = (self.num_pieces // 2) << self.gate_up
            own |= {lower, self.num_items - lower}
        # From its last item of a set to its first of the next; a set with more than an item a warp has them four apart.
        passed = [
            -(-items // BOX_ITEMS) - (items - 1 - w) // WARPS * (WARPS // BOX_ITEMS)
            for items in own
            for w in range(min(items, WARPS))
        ]
        # A warp without an item of a half passes all of that.
        passed += [
            -(-items // BOX_ITEMS) + w // BOX_ITEMS + 1
            for items in own
            for w in range(items, min(self.num_items, WARPS))
        ]
        return max([WARPS // BOX_ITEMS, *passed])

    def fit(self, work_bytes: int) -> Cut:
        """With as many sets between two barriers as `work_bytes` of shared memory have room for."""
        more = (work_bytes - self.least_bytes) // (2 * self.sums_bytes)
        return replace(self, sets_at_once=min(MOST_SETS_AT_ONCE, 1 + more))


def cut_linears(weights: Sequence[DeviceWeight], num_blocks: int) -> list[Cut]:
    """Sets of 32 columns, or of 16 with two pieces side by side where that spreads more evenly over the blocks.

    `weights` have the same columns, and all are cut alike: a block keeps the residual of the columns it adds to.
    """
    n_padded = weights[0].geometry.n_padded
    num_wide, num_narrow = -(-n_padded // (2 * COLUMNS)), -(-n_padded // COLUMNS)
    pairs = all(weight.geometry.k_padded % (2 * PIECE_INPUTS) == 0 for weight in weights)
    if pairs and -(-num_narrow // num_blocks) < 2 * -(-num_wide // num_blocks):
        return [_cut(weight, num_narrow, COLUMNS, items_are_pairs=True) for weight in weights]
    return [_cut(weight, num_wide, 2 * COLUMNS) for weight in weights]


def cut_token(layer: Sequence[DeviceWeight], lm_head: DeviceWeight, num_blocks: int) -> list[Cut]:
    """How the linears of a layer (the joint projection, o, gate and up, down) and lm_head are cut over the blocks."""
    qkv, o, gate_up, down = layer
    own_qkv, own_head = (cut_linears([weight], num_blocks)[0] for weight in (qkv, lm_head))
    cut_o, cut_down = cut_linears([o, down], num_blocks)
    return [own_qkv, cut_o, cut_gate_up(gate_up, num_blocks), cut_down, own_head]


def cut_gate_up(weight: DeviceWeight, num_blocks: int) -> Cut:
    """Sets of 32 gate columns and their 32 up columns: one activation group of what follows.

    Where the sets of the last round are no more than half the blocks, two blocks take one of them.
    """
    num_sets = weight.geometry.num_outputs // 2 // ACTIVATION_GROUP
    left_over = num_sets % num_blocks
    num_halved = left_over if num_sets > num_blocks and 2 * left_over <= num_blocks else 0
    return _cut(weight, num_sets, ACTIVATION_GROUP, gate_up=True, num_halved=num_halved)


def _cut(
    weight: DeviceWeight, num_sets: int, set_columns: int, *, items_are_pairs: bool = False, gate_up: bool = False,
    num_halved: int = 0,
) -> Cut:  # fmt: skip
    geometry = weight.geometry
    num_pieces = geometry.k_padded // PIECE_INPUTS
    return Cut(
        n=geometry.num_outputs,
        num_groups=geometry.k_padded // ACTIVATION_GROUP,
        num_sets=num_sets,
        num_items=num_pieces // 2 if items_are_pairs else num_pieces * 2 if gate_up else num_pieces,
        num_pieces=num_pieces,
        set_columns=set_columns,
        items_are_pairs=int(items_are_pairs),
        gate_up=int(gate_up),
        num_halved=num_halved,
    )


def copy_order(cuts: Sequence[Cut], num_blocks: int) -> NDArray[np.uint32]:
    """What each block copies in turn, [blocks, words]: how many boxes a layer and in lm_head, then those boxes."""
    lists = []
    for block in range(num_blocks):
        layer = [box | kind << KIND_BIT for kind, cut in enumerate(cuts[:4]) for box in cut.boxes(block, num_blocks)]
        head = cuts[4].boxes(block, num_blocks)
        lists.append([len(layer), len(head), *layer, *head])
    longest = max(map(len, lists))
    return np.array([words + [0] * (longest - len(words)) for words in lists], np.uint32)


def slot_bytes(element: Element) -> int:
    """One box of a ring: four items of 32 columns of a piece, and their scales."""
    return BOX_ITEMS * 2 * COLUMNS * (4 * words_per_piece(element) + 2 * PIECE_GROUPS)


def words_per_piece(element: Element) -> int:
    """Words of a column's codes for one piece."""
    return PIECE_INPUTS // 4 if element is Element.INT8 else PIECE_INPUTS // 8


def few_queries_bytes(head_dim: int) -> int:
    """attention_few.cuh's `FewQueries`: the rows of an mma, and a new key."""
    return (MMA_ROWS + 1) * head_dim * 2


def few_weights_bytes(head_dim: int, queries_per_kv: int) -> int:
    """attention_few.cuh's `FewWeights`, and the weighted values of four subtiles."""
    floats = (WARPS + 4 + 1 + SUBTILES) * MMA_ROWS * 4
    return MMA_ROWS * SPLIT_SLOTS * 2 + floats + SUBTILES * queries_per_kv * head_dim * 4


def table_bytes(cuts: list[Cut], num_layers: int, num_blocks: int, head_dim: int) -> int:
    """Dynamic shared memory of its own: of residuals, cuts, addresses of layers, and attention's rows."""
    own = -(-cuts[1].num_sets // num_blocks) * 2 * COLUMNS * 4
    tables = own + num_layers * NUM_LAYER_POINTERS * 8 + sum(len(astuple(cut)) * 4 for cut in cuts)
    return -(-tables // 16) * 16 + few_queries_bytes(head_dim)


def least_work_bytes(cuts: list[Cut], head_dim: int, queries_per_kv: int) -> int:
    """Dynamic shared memory of what one stage at a time needs: attention, or a linear's inputs and sums."""
    return max(few_weights_bytes(head_dim, queries_per_kv), *(cut.least_bytes for cut in cuts))


def copy_map(array: Any, cut: Cut, rows_per_piece: int) -> list[int]:
    """The driver's description, as 16 words, of a matrix [rows, columns] of codes or scales by the boxes of a cut.

    Its axes, innermost first: columns, halves of an item or gate and up, rows of a piece, pieces or pairs of them.
    Raises DeviceError when the driver refuses.
    """
    from cuda.bindings import driver

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
    kinds = driver.CUtensorMapDataType
    status, described = driver.cuTensorMapEncodeTiled(
        kinds.CU_TENSOR_MAP_DATA_TYPE_UINT32 if size == 4 else kinds.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        4,
        array.data.ptr,
        [driver.cuuint64_t(length) for length in (*shape, rows_per_piece, num_items)],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(length) for length in (*box, rows_per_piece, cut.box_items)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the driver cannot describe a matrix of {array.shape} to the copy engine: {status.name}")
    return [int(word) for word in described.opaque]


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
        if self.token_file(decoder.heads.head_dim) is None or not _is_served(decoder):
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


def most_on_their_way(cuts: Sequence[Cut], num_slots: int, num_blocks: int) -> int:
    """Boxes of a ring that may be on their way at a time, so that no warp is a turn of a barrier ahead of its slot."""
    return min(MOST_ON_THEIR_WAY, num_slots - max(cut.most_ahead(num_blocks) for cut in cuts))


def ring_bytes(decoder: Decoder) -> int:
    """Shared memory of a ring's slot and its two barriers."""
    return slot_bytes(decoder.lm_head.geometry.element) + 2 * 8


def dynamic_bytes(device: CudaDevice, kernel: Kernel) -> int:
    """All the dynamic shared memory that a block of the kernel can have on this card."""
    return int(device.most_shared_bytes) - kernel.static_shared_bytes


def _is_served(decoder: Decoder) -> bool:
    """Whether the kernel's cuts and copies fit these weights: one kind of groups of 32, whole pieces of inputs."""
    heads, layers = decoder.heads, decoder.layers
    geometries = [{getattr(layer, name).geometry for layer in layers} for name in ("qkv", "o", "gate_up", "down")]
    flat = [geometry for same in geometries for geometry in same] + [decoder.lm_head.geometry]
    hidden, intermediate = layers[0].qkv.geometry.num_inputs, layers[0].down.geometry.num_inputs
    return (
        all(len(same) == 1 for same in geometries)
        and len({geometry.element for geometry in flat}) == 1
        and all(geometry.group_size == ACTIVATION_GROUP and geometry.k_padded % PIECE_INPUTS == 0 for geometry in flat)
        and all(geometry.n_padded % 8 == 0 and geometry.n_padded < COLUMNS << ITEM_BIT for geometry in flat)
        and all(geometry.k_padded < PIECE_INPUTS << KIND_BIT - ITEM_BIT for geometry in flat)
        and hidden <= MOST_NORM_INPUTS
        and layers[0].gate_up.geometry.num_outputs == 2 * intermediate
        and intermediate % ACTIVATION_GROUP == 0
        and heads.queries_per_kv * heads.head_dim % ACTIVATION_GROUP == 0
        and all(layer.kv.k_hsd.dtype == np.float16 for layer in layers)
    )


def _beside(layer: DecoderLayer) -> list[int]:
    """Addresses of what a layer has beside its matrices, in the order of kernels/token.cuh's `LayerPointer`."""
    kv = layer.kv
    arrays = (layer.input_norm_k, layer.post_norm_k, layer.q_norm_d, layer.k_norm_d, kv.k_hsd, kv.v_hsd)
    return [int(array.data.ptr) for array in arrays]
