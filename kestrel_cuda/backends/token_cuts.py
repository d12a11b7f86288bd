"""How a whole token's matrices are cut over a GPU's blocks and warps, in which order a block copies them, and what
shared memory all that takes. Knows no device and launches nothing.

kernels/token_ring.cuh, token_boxes.cuh and token_sums.cuh walk over the same cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.operands import Decoder, TokenShape
from kestrel_cuda.quant.grouped import ACTIVATION_GROUP
from kestrel_cuda.quant.packed import Element, PackedGeometry, round_up

# Sizes shared with kernels/token*.cuh; tests/kernels/test_signatures.py reads them out of the sources.
THREADS, WARPS = 512, 16
COLUMNS = 16
PIECE_INPUTS = 128
PIECE_GROUPS = PIECE_INPUTS // ACTIVATION_GROUP
MOST_NORM_INPUTS = 8 * THREADS
NUM_LAYER_POINTERS = 6
BOX_ITEMS = 4
ITEM_BIT, KIND_BIT = 16, 24
MOST_SLOTS = 24
LEAST_KV_SLOTS, MOST_KV_SLOTS = 4, 8
"""Boxes in a block's ring of keys and values: the keys of a split, and all of it."""
LEAST_ON_THEIR_WAY, ENOUGH_ON_THEIR_WAY, MOST_ON_THEIR_WAY = 2, 3, 5
"""Boxes on their way to a block while it sums: more keep the memory no busier, and others' words wait behind them."""
MOST_SETS_AT_ONCE = 4
MMA_ROWS, SUBTILES = 16, 4
SPLIT_SLOTS = 256
SUBTILE_SLOTS = SPLIT_SLOTS // SUBTILES
PANEL_CHANNELS, SLICE_CHANNELS = 64, 32
BOXED_HEAD_DIM = 128
SLICE_QUERIES = 8
"""Most queries of a kv head whose split blocks share."""


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


def cut_linears(weights: Sequence[PackedGeometry], num_blocks: int) -> list[Cut]:
    """Sets of 32 columns, or of 16 with two pieces side by side where that spreads more evenly over the blocks.

    `weights` have the same columns, and all are cut alike: a block keeps the residual of the columns it adds to.
    """
    n_padded = weights[0].n_padded
    num_wide, num_narrow = -(-n_padded // (2 * COLUMNS)), -(-n_padded // COLUMNS)
    pairs = all(weight.k_padded % (2 * PIECE_INPUTS) == 0 for weight in weights)
    if pairs and -(-num_narrow // num_blocks) < 2 * -(-num_wide // num_blocks):
        return [_cut(weight, num_narrow, COLUMNS, items_are_pairs=True) for weight in weights]
    return [_cut(weight, num_wide, 2 * COLUMNS) for weight in weights]


def cut_token(layer: Sequence[PackedGeometry], lm_head: PackedGeometry, num_blocks: int) -> list[Cut]:
    """How the linears of a layer (the joint projection, o, gate and up, down) and lm_head are cut over the blocks."""
    qkv, o, gate_up, down = layer
    own_qkv, own_head = (cut_linears([weight], num_blocks)[0] for weight in (qkv, lm_head))
    cut_o, cut_down = cut_linears([o, down], num_blocks)
    return [own_qkv, cut_o, cut_gate_up(gate_up, num_blocks), cut_down, own_head]


def cut_gate_up(weight: PackedGeometry, num_blocks: int) -> Cut:
    """Sets of 32 gate columns and their 32 up columns: one activation group of what follows.

    Where the sets of the last round are no more than half the blocks, two blocks take one of them.
    """
    num_sets = weight.num_outputs // 2 // ACTIVATION_GROUP
    left_over = num_sets % num_blocks
    num_halved = left_over if num_sets > num_blocks and 2 * left_over <= num_blocks else 0
    return _cut(weight, num_sets, ACTIVATION_GROUP, gate_up=True, num_halved=num_halved)


def _cut(
    weight: PackedGeometry, num_sets: int, set_columns: int, *, items_are_pairs: bool = False, gate_up: bool = False,
    num_halved: int = 0,
) -> Cut:  # fmt: skip
    num_pieces = weight.k_padded // PIECE_INPUTS
    return Cut(
        n=weight.num_outputs,
        num_groups=weight.k_padded // ACTIVATION_GROUP,
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


def most_on_their_way(cuts: Sequence[Cut], num_slots: int, num_blocks: int) -> int:
    """Boxes of a ring that may be on their way at a time, so that no warp is a turn of a barrier ahead of its slot."""
    return min(MOST_ON_THEIR_WAY, num_slots - max(cut.most_ahead(num_blocks) for cut in cuts))


@dataclass(frozen=True)
class KvBoxes:
    """What a ring of keys and values holds: boxes of a subtile's slots, at least and at most so many."""

    slot_bytes: int
    least_slots: int
    most_slots: int


def boxes_of(form: str, head_dim: int) -> KvBoxes:
    """What a form of the kernel copies ahead: keys and then values; keys, each with a slice of its values; nothing."""
    panels = round_up(head_dim, PANEL_CHANNELS)
    return {
        "boxed": KvBoxes(SUBTILE_SLOTS * panels * 2, LEAST_KV_SLOTS, MOST_KV_SLOTS),
        "one_split": KvBoxes(SUBTILE_SLOTS * (panels + SLICE_CHANNELS) * 2, SUBTILES, SUBTILES),
        "held": KvBoxes(0, 0, 0),
    }[form]


def ring_slots(
    room_bytes: int, cuts: Sequence[Cut], element: Element, num_blocks: int, kv: KvBoxes
) -> tuple[int, int] | None:
    """Slots of the ring of weights, and of that of keys and values, in so much shared memory.

    What a ring holds is what it can run ahead. Keys and values take what weights leave that have enough. None where
    the room does not do.
    """
    own, num_kv = slot_bytes(element), 0
    if kv.least_slots:
        enough = ENOUGH_ON_THEIR_WAY + max(cut.most_ahead(num_blocks) for cut in cuts)
        num_kv = min(kv.most_slots, (room_bytes - enough * own) // kv.slot_bytes)
    num_slots = min(MOST_SLOTS, (room_bytes - num_kv * kv.slot_bytes) // own)
    is_enough = num_kv >= kv.least_slots and most_on_their_way(cuts, num_slots, num_blocks) >= LEAST_ON_THEIR_WAY
    return (num_slots, num_kv) if is_enough else None


@dataclass(frozen=True)
class Rings:
    """How a form of the kernel uses a block's shared memory."""

    cuts: list[Cut]
    num_slots: int
    num_kv_slots: int
    kv: KvBoxes


def rings_of(form: str, shape: TokenShape, num_blocks: int, dynamic_bytes: int) -> Rings | None:
    """What a form has room for in so much dynamic shared memory; None where it cannot run."""
    cuts, kv = cut_token(shape.layer, shape.lm_head, num_blocks), boxes_of(form, shape.head_dim)
    room_bytes = dynamic_bytes - table_bytes(cuts, shape.num_layers, num_blocks, shape.head_dim)
    room_bytes -= least_work_bytes(cuts, shape.head_dim, shape.queries_per_kv)
    slots = ring_slots(room_bytes, cuts, shape.lm_head.element, num_blocks, kv)
    return Rings(cuts, *slots, kv) if slots else None


def forms_of(shape: TokenShape, num_blocks: int, dynamic_bytes: int) -> list[str]:
    """The forms that such a token is taken by: for more than one split first, for one what comes last.

    Heads other than of 128 channels have one form for every context.
    """
    if shape.head_dim == BOXED_HEAD_DIM and rings_of("boxed", shape, num_blocks, dynamic_bytes):
        shares = shape.queries_per_kv <= SLICE_QUERIES and rings_of("one_split", shape, num_blocks, dynamic_bytes)
        return ["boxed", "one_split"] if shares else ["boxed"]
    return ["held"] if rings_of("held", shape, num_blocks, dynamic_bytes) else []


def is_served(decoder: Decoder) -> bool:
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
