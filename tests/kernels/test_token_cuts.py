"""How a whole token's linears are cut over an H100 or H200, for shapes of real checkpoints and for small ones, and in
which order their boxes are copied."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kestrel_cuda.backends.operands import TokenShape
from kestrel_cuda.backends.token_cuts import (
    BOX_ITEMS,
    COLUMNS,
    ENOUGH_ON_THEIR_WAY,
    ITEM_BIT,
    KIND_BIT,
    LEAST_ON_THEIR_WAY,
    MOST_ON_THEIR_WAY,
    MOST_SETS_AT_ONCE,
    MOST_SLOTS,
    WARPS,
    Cut,
    boxes_of,
    copy_order,
    cut_gate_up,
    cut_token,
    forms_of,
    least_work_bytes,
    most_on_their_way,
    rings_of,
    slot_bytes,
    table_bytes,
)
from kestrel_cuda.quant.packed import Element, PackedGeometry

SHAPES = {
    "2b": (2048, 2048, 4096, 6144),
    "4b": (2560, 4096, 6144, 9728),
    "8b": (4096, 4096, 6144, 12288),
    "o of one piece": (128, 128, 256, 256),
    "down of an odd number": (640, 256, 512, 640),
}
"""(hidden size, attended, joint projection, products of the MLP)"""

VOCABULARY, HEAD_DIM, QUERIES_PER_KV, LAYERS = 151936, 128, 4, 36
MULTIPROCESSORS, BLOCK_SHARED_BYTES, STATIC_BYTES = 132, 227 << 10, 1 << 10

pytestmark = [
    pytest.mark.parametrize("name", SHAPES),
    pytest.mark.parametrize("element", [Element.INT8, Element.INT4]),
]


@pytest.fixture
def shape(element: Element, name: str) -> TokenShape:
    hidden, attended, joint, products = SHAPES[name]
    shapes = ((hidden, joint), (attended, hidden), (hidden, 2 * products), (products, hidden), (hidden, VOCABULARY))
    *layer, lm_head = (PackedGeometry(element, k, n, 32) for k, n in shapes)
    return TokenShape(tuple(layer), lm_head, LAYERS, HEAD_DIM, QUERIES_PER_KV)


@pytest.fixture
def cuts(shape: TokenShape) -> list[Cut]:
    """Of the joint projection, o, gate and up, down, and lm_head."""
    return cut_token(shape.layer, shape.lm_head, MULTIPROCESSORS)


def test_every_column_and_piece_is_in_one_item(cuts: list[Cut]) -> None:
    for cut in cuts:
        columns = cut.num_sets * cut.set_columns * (2 if cut.gate_up else 1)
        assert 0 <= columns - cut.n < 32
        assert cut.num_items * (2 if cut.items_are_pairs else 1) == cut.num_pieces * (2 if cut.gate_up else 1)
        assert cut.num_groups == 4 * cut.num_pieces


def num_slots(cuts: list[Cut], element: Element) -> int:
    fixed = table_bytes(cuts, LAYERS, MULTIPROCESSORS, HEAD_DIM)
    fixed += least_work_bytes(cuts, HEAD_DIM, QUERIES_PER_KV)
    return (BLOCK_SHARED_BYTES - STATIC_BYTES - fixed) // slot_bytes(element)


def walks(cut: Cut, block: int) -> list[tuple[int, int, int]]:
    """What a block sums up of a matrix, in turn: number of a set, first item, end."""
    num_whole = cut.num_sets - cut.num_halved
    found = [(number, 0, cut.num_items) for number in range(block, num_whole, MULTIPROCESSORS)]
    if block < num_whole and block < 2 * cut.num_halved:
        half_items = (cut.num_pieces // 2) << cut.gate_up
        first, end = (half_items, cut.num_items) if block % 2 else (0, half_items)
        found.insert(0, (num_whole + block // 2, first, end))
    return found


def test_enough_boxes_are_on_their_way(cuts: list[Cut], element: Element) -> None:
    slots = num_slots(cuts, element)
    assert most_on_their_way(cuts, slots, MULTIPROCESSORS) == MOST_ON_THEIR_WAY
    for fewer in range(slots):
        on_their_way = most_on_their_way(cuts, fewer, MULTIPROCESSORS)
        assert on_their_way <= fewer - max(cut.most_ahead(MULTIPROCESSORS) for cut in cuts)


@pytest.mark.parametrize("form", ["boxed", "one_split", "held"])
def test_rings_fit_in_what_a_block_has(
    shape: TokenShape, cuts: list[Cut], element: Element, name: str, form: str
) -> None:
    """Of real checkpoints there is room for keys and values in 2B, and in what has four bits of 4B and 8B. The ring of
    weights alone always fits."""
    fixed = table_bytes(cuts, LAYERS, MULTIPROCESSORS, HEAD_DIM) + least_work_bytes(cuts, HEAD_DIM, QUERIES_PER_KV)
    dynamic_bytes = BLOCK_SHARED_BYTES - STATIC_BYTES
    kv, rings = boxes_of(form, HEAD_DIM), rings_of(form, shape, MULTIPROCESSORS, dynamic_bytes)
    assert (rings is None) == (form != "held" and name in ("4b", "8b") and element is Element.INT8)
    if rings is not None:
        assert (rings.cuts, rings.kv) == (cuts, kv)
        assert kv.least_slots <= rings.num_kv_slots <= kv.most_slots
        assert fixed + rings.num_slots * slot_bytes(element) + rings.num_kv_slots * kv.slot_bytes <= dynamic_bytes
        least = ENOUGH_ON_THEIR_WAY if rings.num_kv_slots else LEAST_ON_THEIR_WAY
        assert most_on_their_way(cuts, rings.num_slots, MULTIPROCESSORS) >= least
    if form == "held":
        assert rings is not None
        assert rings.num_slots == min(MOST_SLOTS, num_slots(cuts, element))
    assert rings_of(form, shape, MULTIPROCESSORS, fixed + 3 * slot_bytes(element)) is None


def test_which_forms_take_a_token(shape: TokenShape, element: Element, name: str) -> None:
    def forms(**changes: int) -> list[str]:
        return forms_of(replace(shape, **changes), MULTIPROCESSORS, BLOCK_SHARED_BYTES - STATIC_BYTES)

    has_room = name not in ("4b", "8b") or element is Element.INT4
    assert forms() == (["boxed", "one_split"] if has_room else ["held"])
    # Attention to more queries a kv head needs more room; of more than eight no slices are made.
    assert "one_split" not in forms(queries_per_kv=9)
    assert forms(head_dim=64) == ["held"]
    assert forms_of(shape, MULTIPROCESSORS, 64 << 10) == []


def test_no_warp_passes_over_more_boxes_than_is_reckoned_with(cuts: list[Cut]) -> None:
    """Of a stage, a warp takes items w, w + 16, ... of each set; boxes are counted from the stage's first."""
    halves_of_few_items = cut_gate_up(PackedGeometry(Element.INT8, 1024, 2 * 4608, 32), MULTIPROCESSORS)
    assert halves_of_few_items.num_halved
    assert halves_of_few_items.num_pieces < WARPS
    for cut in (*cuts, halves_of_few_items):
        for block in range(MULTIPROCESSORS):
            for warp in range(WARPS):
                start, taken, passed = 0, -1, 0
                for _, first, end in walks(cut, block):
                    for item in range(warp, end - first, WARPS):
                        box = start + item // BOX_ITEMS
                        passed, taken = max(passed, box - taken), box
                    start += -(-(end - first) // BOX_ITEMS)
                assert passed <= cut.most_ahead(MULTIPROCESSORS), (cut, block, warp)


def test_boxes_come_in_the_order_in_which_their_items_are_taken(cuts: list[Cut]) -> None:
    """As token_sums.cuh takes them: of a set, or of a block's half of one, item i is in box i / 4. Every item of every
    set is taken once."""
    taken = {kind: np.zeros((cut.num_sets, cut.num_items), np.int64) for kind, cut in enumerate(cuts)}
    order = copy_order(cuts, MULTIPROCESSORS)
    for block, (num_of_layer, num_of_head, *words) in enumerate(order.tolist()):
        boxes = iter(words[: num_of_layer + num_of_head])
        for kind, cut in enumerate(cuts):
            for number, first, end in walks(cut, block):
                for at in range(first, end, BOX_ITEMS):
                    word = next(boxes)
                    assert word >> KIND_BIT == (kind if kind < 4 else 0)
                    assert (word & 0xFFFF) * COLUMNS == number * cut.set_columns
                    assert (word >> ITEM_BIT & 0xFF) << cut.gate_up == at
                    taken[kind][number, at : min(at + BOX_ITEMS, end)] += 1
        assert next(boxes, None) is None
    assert all((of_kind == 1).all() for of_kind in taken.values())


def test_the_outputs_that_add_to_the_residual_are_cut_alike(cuts: list[Cut]) -> None:
    """A block keeps the residual of its columns from one to the other."""
    _, o, _, down, _ = cuts
    assert (o.num_sets, o.set_columns) == (down.num_sets, down.set_columns)


def test_no_block_has_much_more_to_sum_up_than_another(cuts: list[Cut]) -> None:
    """A block that has half a set has it beside as many whole ones as the others."""
    for cut in cuts:
        most = -(-(cut.num_sets - cut.num_halved) // MULTIPROCESSORS) + (0.5 if cut.num_halved else 0)
        assert most <= 1.1 * cut.num_sets / MULTIPROCESSORS or most == 1


def test_sets_are_halved_where_there_are_two_blocks_for_each(cuts: list[Cut], name: str) -> None:
    gate_up = cuts[2]
    assert gate_up.num_halved == {"2b": 60, "4b": 40}.get(name, 0)
    assert 2 * gate_up.num_halved <= MULTIPROCESSORS
    assert (gate_up.num_sets - gate_up.num_halved) % MULTIPROCESSORS == 0 or not gate_up.num_halved
    assert not any(cut.num_halved for cut in cuts if not cut.gate_up)
    for num_blocks in (1, 7, gate_up.num_sets, gate_up.num_sets + 1):
        few = cut_gate_up(PackedGeometry(Element.INT8, 2048, gate_up.n, 32), num_blocks)
        left_over = few.num_sets % num_blocks
        assert few.num_halved in (0, left_over)
        assert few.num_halved == 0 or num_blocks < few.num_sets


def test_as_many_sets_at_once_as_there_is_room_for(cuts: list[Cut]) -> None:
    for cut in cuts:
        for more in range(6):
            room = cut.least_bytes + more * 2 * cut.sums_bytes
            assert cut.fit(room).sets_at_once == min(MOST_SETS_AT_ONCE, 1 + more)
            assert cut.fit(room + 2 * cut.sums_bytes - 1) == cut.fit(room)
