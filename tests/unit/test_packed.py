"""The stored form of a weight: where every code and scale lies, packed and read back, and how a slab is laid out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from kestrel_cuda.quant.grouped import GroupedWeight, GroupScheme
from kestrel_cuda.quant.packed import (
    COLUMN_MULTIPLE,
    SLAB_ALIGNMENT_BYTES,
    Element,
    PackedGeometry,
    entry_views,
    geometry_for,
    pack_grouped,
    round_up,
    slab_layout,
    unpack_codes,
)
from kestrel_cuda.weight_keys import LM_HEAD, Projection, WeightKey

Q8, Q4, G256 = GroupScheme(8, 32), GroupScheme(4, 32), GroupScheme(8, 256)
KEY = WeightKey(0, Projection.O)
SCHEMES = [pytest.param(scheme, id=name) for name, scheme in (("int8", Q8), ("int4", Q4), ("g256", G256))]


def random_weight(seed: int, n: int, k: int, scheme: GroupScheme) -> GroupedWeight:
    """Codes over the whole range and scales of either sign."""
    random = np.random.Generator(np.random.Philox([seed, n, k, scheme.bits]))
    low, high = (-127, 127) if scheme.bits == 8 else (-8, 7)
    num_groups = -(-k // scheme.group_size)
    codes = random.integers(low, high, (n, num_groups * scheme.group_size), np.int8, endpoint=True)
    scales = random.standard_normal((n, num_groups)).astype(np.float16).astype(np.float32)
    return GroupedWeight(codes, scales, scheme, k, 0)


def empty(geometry: PackedGeometry) -> tuple[NDArray[np.uint32], NDArray[np.float16]]:
    return np.zeros(geometry.codes_shape, np.uint32), np.zeros(geometry.scales_shape, np.float16)


class TestWords:
    def test_four_inputs_of_a_column_share_a_word_lowest_first(self) -> None:
        codes = np.arange(-16, 16, dtype=np.int8)[None]
        codes_kn, scales_gn = empty(PackedGeometry(Element.INT8, 32, 1, 32))
        pack_grouped(GroupedWeight(codes, np.array([[0.5]], np.float32), Q8, 32, 0), codes_kn, scales_gn, 0)
        assert codes_kn.shape == (8, 4)
        # -16, -15, -14, -13 as bytes are f0, f1, f2, f3.
        assert codes_kn[0, 0] == 0xF3F2F1F0
        assert codes_kn[4, 0] == 0x03020100
        assert scales_gn[0, 0] == 0.5
        assert not codes_kn[:, 1:].any()
        assert not scales_gn[:, 1:].any()

    def test_eight_inputs_share_an_int4_word_the_first_four_in_the_low_nibbles(self) -> None:
        codes = np.array([[1, 2, 3, 4, 5, 6, 7, -8] + [-1] * 8 + [0] * 16], np.int8)
        codes_kn, scales_gn = empty(PackedGeometry(Element.INT4, 32, 1, 32))
        pack_grouped(GroupedWeight(codes, np.array([[-2.0]], np.float32), Q4, 32, 0), codes_kn, scales_gn, 0)
        assert codes_kn.shape == (4, 4)
        assert codes_kn[0, 0] == 0x84736251
        assert codes_kn[1, 0] == 0xFFFFFFFF
        assert codes_kn[2, 0] == 0
        assert scales_gn[0, 0] == -2


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("n", [1, 3, 4, 33, 100])
@pytest.mark.parametrize("k", [1, 32, 70, 256, 300])
def test_packed_codes_read_back_the_same(scheme: GroupScheme, n: int, k: int) -> None:
    geometry = geometry_for(scheme, Element.F32, k, n)
    weight = random_weight(1, n, k, scheme)
    codes_kn, scales_gn = empty(geometry)
    pack_grouped(weight, codes_kn, scales_gn, 0)
    codes = unpack_codes(codes_kn, geometry.element)
    assert codes.shape == (geometry.k_padded, geometry.n_padded)
    assert codes.dtype == np.int8
    assert (codes[:, :n] == weight.codes_nk.T).all()
    assert (scales_gn[:, :n] == weight.scales_ng.T).all()
    assert not codes[:, n:].any()
    assert not scales_gn[:, n:].any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_members_side_by_side_equal_one_matrix(scheme: GroupScheme) -> None:
    sizes, k = (64, 4, 31), 256
    weight = random_weight(2, sum(sizes), k, scheme)
    geometry = geometry_for(scheme, Element.F32, k, sum(sizes))
    whole, parts = empty(geometry), empty(geometry)
    pack_grouped(weight, *whole, 0)
    column = 0
    for size in sizes:
        rows = slice(column, column + size)
        member = GroupedWeight(weight.codes_nk[rows], weight.scales_ng[rows], scheme, k, 0)
        before = parts[0].copy()
        pack_grouped(member, *parts, column)
        before[:, rows] = parts[0][:, rows]
        assert (before == parts[0]).all(), "a member wrote outside its columns"
        column += size
    assert (whole[0] == parts[0]).all()
    assert (whole[1] == parts[1]).all()
    assert not parts[0][:, sum(sizes) :].any()


class TestGeometry:
    @pytest.mark.parametrize(
        ("scheme", "k", "n", "codes_shape", "scales_shape"),
        [
            (Q8, 70, 5, (24, 8), (3, 8)),
            (Q4, 70, 5, (12, 8), (3, 8)),
            (G256, 512, 8, (128, 8), (2, 8)),
            (None, 70, 5, (70, 8), (0, 8)),
        ],
    )
    def test_shapes(
        self, scheme: GroupScheme | None, k: int, n: int, codes_shape: tuple[int, int], scales_shape: tuple[int, int]
    ) -> None:
        geometry = geometry_for(scheme, Element.BF16, k, n)
        assert geometry.codes_shape == codes_shape
        assert geometry.scales_shape == scales_shape

    def test_a_weight_takes_9_bits_a_code_in_eight_and_5_in_four(self) -> None:
        eight, four = (geometry_for(scheme, Element.F32, 2048, 6144) for scheme in (Q8, Q4))
        assert eight.codes_bytes + eight.scales_bytes == 2048 * 6144 * 34 // 32
        assert four.codes_bytes + four.scales_bytes == 2048 * 6144 * 18 // 32

    @pytest.mark.parametrize(("element", "item_bytes"), [(Element.BF16, 2), (Element.F16, 2), (Element.F32, 4)])
    def test_floats_keep_their_size_and_have_no_scales(self, element: Element, item_bytes: int) -> None:
        geometry = geometry_for(None, element, 7, 9)
        assert geometry.codes_bytes == 7 * 12 * item_bytes
        assert geometry.scales_bytes == 0
        assert not element.is_grouped


class TestSlab:
    MEMBERS = (
        (WeightKey(3, Projection.QKV), PackedGeometry(Element.INT8, 70, 9, 32)),
        (WeightKey(3, Projection.O), PackedGeometry(Element.INT4, 33, 5, 32)),
        (WeightKey(3, Projection.GATE_UP), PackedGeometry(Element.INT8, 256, 1, 256)),
        (WeightKey(3, Projection.DOWN), PackedGeometry(Element.BF16, 3, 3)),
    )

    def test_every_array_begins_at_a_multiple_of_256_and_none_overlap(self) -> None:
        layout = slab_layout(3, self.MEMBERS)
        spans = []
        for entry in layout.entries:
            spans.append((entry.codes_offset, entry.codes_offset + entry.geometry.codes_bytes))
            spans.append((entry.scales_offset, entry.scales_offset + entry.geometry.scales_bytes))
        assert all(start % SLAB_ALIGNMENT_BYTES == 0 for start, _ in spans)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
        assert spans[-1][1] <= layout.num_bytes
        assert layout.num_bytes % SLAB_ALIGNMENT_BYTES == 0
        used = sum(round_up(stop - start, SLAB_ALIGNMENT_BYTES) for start, stop in spans)
        assert layout.num_bytes == used, "no more than the alignment is wasted"

    def test_views_are_the_slabs_own_bytes(self) -> None:
        layout = slab_layout(3, self.MEMBERS)
        slab = np.zeros(layout.num_bytes, np.uint8)
        for number, entry in enumerate(layout.entries, 1):
            codes, scales = entry_views(slab, entry)
            assert codes.shape == entry.geometry.codes_shape
            assert codes.dtype == entry.geometry.codes_dtype
            assert scales.shape == entry.geometry.scales_shape
            codes[...] = number
            scales[...] = 10 + number
        for number, entry in enumerate(layout.entries, 1):
            codes, scales = entry_views(slab, entry)
            assert (codes == number).all()
            assert (scales == 10 + number).all()

    def test_entries_are_found_by_key_and_members_counted(self) -> None:
        layout = slab_layout(3, self.MEMBERS)
        assert layout.entry(WeightKey(3, Projection.O)).geometry.element is Element.INT4
        assert layout.num_weights == 3 + 1 + 2 + 1
        assert slab_layout(LM_HEAD.layer, [(LM_HEAD, self.MEMBERS[0][1])]).num_weights == 1

    def test_layers_of_the_same_matrices_share_a_geometry(self) -> None:
        other = [(WeightKey(8, key.projection), geometry) for key, geometry in self.MEMBERS]
        assert slab_layout(3, self.MEMBERS).geometry == slab_layout(8, other).geometry
        wider = [*other[:-1], (other[-1][0], PackedGeometry(Element.BF16, 3, 4))]
        assert slab_layout(8, wider).num_bytes == slab_layout(8, other).num_bytes
        assert slab_layout(8, wider).geometry != slab_layout(8, other).geometry

    def test_columns_are_padded_to_four(self) -> None:
        assert COLUMN_MULTIPLE == 4
        assert [PackedGeometry(Element.F32, 1, n).n_padded for n in (1, 4, 5)] == [4, 4, 8]
