"""The packer of each backend leaves the bytes that quant/grouped.py and quant/packed.py define, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kestrel_cuda.backends.base import Backend, PackedTensor, SourceMatrix
from kestrel_cuda.quant.grouped import GroupScheme, quantize
from kestrel_cuda.quant.packed import (
    Element,
    PackedGeometry,
    SlabLayout,
    entry_views,
    geometry_for,
    pack_grouped,
    slab_layout,
)
from kestrel_cuda.weight_keys import Projection, WeightKey
from tests.backends.arrays import normal, rng, stored, stored_values

Q8, Q4, G256 = GroupScheme(8, 32), GroupScheme(4, 32), GroupScheme(8, 256)
KEY, ABOVE, BELOW = (WeightKey(0, p) for p in (Projection.QKV, Projection.O, Projection.DOWN))
SCHEMES = [pytest.param(scheme, id=name) for name, scheme in (("int8", Q8), ("int4", Q4), ("g256", G256))]
SOURCES = (Element.BF16, Element.F16, Element.F32)
NEIGHBOUR = PackedGeometry(Element.INT8, 32, 4, 32)


def layout_of(geometry: PackedGeometry) -> SlabLayout:
    """The matrix between two others, whose bytes must stay as they are."""
    return slab_layout(0, [(ABOVE, NEIGHBOUR), (KEY, geometry), (BELOW, NEIGHBOUR)])


def expected_slab(layout: SlabLayout, members: Sequence[NDArray[Any]]) -> tuple[NDArray[np.uint8], list[int]]:
    """The bytes by the definition, and the lost groups of each member."""
    slab = np.zeros(layout.num_bytes, np.uint8)
    entry = layout.entry(KEY)
    geometry = entry.geometry
    codes_kn, scales_gn = entry_views(slab, entry)
    column, lost = 0, []
    for data in members:
        columns = slice(column, column + len(data))
        if geometry.element.is_grouped:
            scheme = GroupScheme(8 if geometry.element is Element.INT8 else 4, geometry.group_size)
            weight = quantize(stored_values(data).astype(np.float32), scheme)
            pack_grouped(weight, codes_kn, scales_gn, column)  # type: ignore[arg-type]
            lost.append(weight.num_lost_groups)
        else:
            wide = geometry.element is Element.F32
            codes_kn[:, columns] = (stored_values(data).astype(np.float32) if wide else data.view(np.uint16)).T
            lost.append(0)
        column += len(data)
    return slab, lost


def pack(
    backend: Backend, layout: SlabLayout, members: Sequence[NDArray[Any]]
) -> tuple[NDArray[np.uint8], list[PackedTensor]]:
    for data in members:
        data.flags.writeable = False  # as views of a checkpoint's file are
    slab, packer = backend.allocate_slab(layout), backend.packer()
    named = [SourceMatrix(f"member {i}", data) for i, data in enumerate(members)]
    packer.pack(slab, layout.entry(KEY), named)
    found = packer.finish()
    host = np.empty(layout.num_bytes, np.uint8)
    backend.download(host, slab)
    packer.close()
    backend.free_slab(slab)
    return host, found


def assert_packs_by_the_definition(
    backend: Backend, geometry: PackedGeometry, members: Sequence[NDArray[Any]]
) -> list[PackedTensor]:
    layout = layout_of(geometry)
    expected, lost = expected_slab(layout, members)
    slab, found = pack(backend, layout, members)
    for entry in layout.entries:
        for what, got, want in zip(
            ("codes", "scales"), entry_views(slab, entry), entry_views(expected, entry), strict=True
        ):
            differ = np.argwhere(got.view(np.uint8) != want.view(np.uint8))
            assert not differ.size, f"{what} of {entry.key}: {len(differ)} bytes differ, first at {differ[0]}"
    assert (slab == expected).all(), "bytes between the arrays were written"
    assert found == [PackedTensor(f"member {i}", 0, 0, n) for i, n in enumerate(lost)]
    return found


def adversarial(n: int, k: int, element: Element, bits: int) -> NDArray[Any]:
    """Groups by turns of ties, zeros, subnormals, scales around the limits, huge values and few mantissa bits."""
    random = rng(n, k, bits)
    steps = 127.0 if bits == 8 else 8.0
    largest = {Element.BF16: 60000.0, Element.F16: 65504.0 / steps, Element.F32: 65504.0}[element]
    least = {Element.BF16: 2.0**-133, Element.F16: 2.0**-24, Element.F32: 2.0**-149}[element]
    w = normal(random, n, k)
    for row in range(n):
        for first in range(0, k, 32):
            part = w[row, first : first + 32]
            size = len(part)
            signs = random.choice([-1.0, 1.0], size)
            match (row + first // 32) % 10:
                case 0:  # halves of the scale's steps, with the largest first or last
                    part[:] = (random.integers(0, int(steps), size) + 0.5) * signs
                    part[random.integers(size)] = steps * random.choice([-1, 1])
                case 1:
                    part[:] = 0
                case 2:  # negative zeros and one value
                    part[:] = -0.0
                    part[random.integers(size)] = 0.75
                case 3:  # subnormals of the stored type
                    part[:] = least * random.integers(0, 64, size) * signs
                case 4:  # scales around the smallest normal float32
                    part[:] = 2.0**-126 * steps * random.uniform(0, 1, size) * signs
                    part[0] = 2.0**-126 * steps * random.choice([1 - 2.0**-20, 1 - 2.0**-24, 1, 1 + 2.0**-7])
                case 5:  # stored scales around the smallest float16
                    part[:] = 2.0**-24 * steps * random.uniform(0, 1, size) * signs
                    part[-1] = steps * random.choice([2.0**-24, 2.0**-25, 2.0**-25 * (1 + 2.0**-7), -(2.0**-26)])
                case 6:  # the largest scale allowed
                    part[:] = largest * steps * random.uniform(0, 1, size) * signs
                    part[0] = largest * steps
                case 7:  # all of one magnitude: the first decides int4's sign
                    part[:] = 3.0 * signs
                case 8:  # few mantissa bits, as bfloat16 weights have
                    part[:] = random.integers(-64, 65, size) / 64.0
                case _:  # widely spread
                    part *= np.float32(2) ** random.integers(-30, 3, size).astype(np.float32)
    return stored(w, element)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("scheme", SCHEMES)
class TestGrouped:
    @pytest.mark.parametrize("n", [1, 6, 33, 100])
    @pytest.mark.parametrize("k", [32, 70, 256, 1000])
    def test_adversarial_weights(self, backend: Backend, scheme: GroupScheme, source: Element, n: int, k: int) -> None:
        if scheme is G256:
            k = -(-k // 256) * 256
        data = adversarial(n, k, source, scheme.bits)
        assert_packs_by_the_definition(backend, geometry_for(scheme, source, k, n), [data])

    def test_random_weights(self, backend: Backend, scheme: GroupScheme, source: Element) -> None:
        data = stored(normal(rng(5), 300, 2048, scale=0.02), source)
        assert_packs_by_the_definition(backend, geometry_for(scheme, source, 2048, 300), [data])

    def test_members_side_by_side(self, backend: Backend, scheme: GroupScheme, source: Element) -> None:
        members = [stored(normal(rng(6, n), n, 512, scale=0.1 * n), source) for n in (64, 12, 4)]
        assert_packs_by_the_definition(backend, geometry_for(scheme, source, 512, 80), members)


def test_members_may_be_stored_in_different_types(backend: Backend) -> None:
    members = [stored(normal(rng(7, i), 8, 96), element) for i, element in enumerate(SOURCES)]
    assert_packs_by_the_definition(backend, geometry_for(Q8, Element.F32, 96, 24), members)
    assert_packs_by_the_definition(backend, geometry_for(None, Element.F32, 96, 24), members)


@pytest.mark.parametrize(
    ("source", "element"),
    [(Element.BF16, Element.BF16), (Element.F16, Element.F16), *((source, Element.F32) for source in SOURCES)],
)
@pytest.mark.parametrize(("sizes", "k"), [((1,), 1), ((5,), 33), ((100,), 70), ((64, 12, 4), 160)])
def test_floats_are_transposed_as_they_are(
    backend: Backend, source: Element, element: Element, sizes: tuple[int, ...], k: int
) -> None:
    members = [stored(normal(rng(8, n), n, k), source) for n in sizes]
    assert_packs_by_the_definition(backend, geometry_for(None, element, k, sum(sizes)), members)


@pytest.mark.parametrize(
    ("source", "element"),
    [(Element.BF16, Element.BF16), (Element.F16, Element.F16), *((source, Element.F32) for source in SOURCES)],
)
def test_floats_that_are_not_finite_are_counted(backend: Backend, source: Element, element: Element) -> None:
    members = [stored(normal(rng(12, i), 40, 70), source) for i in range(3)]
    nan, infinity = (0x7FC0, 0x7F80) if source is Element.BF16 else (np.nan, np.inf)
    members[1][[0, 20, 39], [0, 5, 69]] = nan
    members[1][7, 7] = infinity
    members[2][39, 69] = infinity
    _, found = pack(backend, layout_of(geometry_for(None, element, 70, 120)), members)
    assert found == [PackedTensor(f"member {i}", n, 0, 0) for i, n in enumerate((0, 4, 1))]


@pytest.mark.parametrize("scheme", SCHEMES)
class TestFindings:
    def members(self, **bad: float) -> list[NDArray[Any]]:
        """Three members, the second with bad weights in its last group."""
        members = [normal(rng(9, i), 8, 512) for i in range(3)]
        for row, value in enumerate(bad.values()):
            members[1][row, -1] = value
        return members

    def pack(self, backend: Backend, scheme: GroupScheme, members: list[NDArray[Any]]) -> list[PackedTensor]:
        _, found = pack(backend, layout_of(geometry_for(scheme, Element.F32, 512, 24)), members)
        assert [tensor.name for tensor in found] == ["member 0", "member 1", "member 2"]
        for tensor in (found[0], found[2]):
            assert (tensor.num_nonfinite, tensor.num_oversized_scales, tensor.num_lost_groups) == (0, 0, 0)
        return found

    @pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
    def test_a_weight_that_is_not_finite(self, backend: Backend, scheme: GroupScheme, bad: float) -> None:
        assert self.pack(backend, scheme, self.members(a=bad))[1].num_nonfinite == 1

    @pytest.mark.parametrize("sign", [1, -1])
    def test_a_scale_over_65504(self, backend: Backend, scheme: GroupScheme, sign: int) -> None:
        steps = 127 if scheme.bits == 8 else 8
        found = self.pack(backend, scheme, self.members(a=65505.0 * steps * sign))[1]
        assert found.num_oversized_scales == 1
        assert found.num_nonfinite == 0
        assert self.pack(backend, scheme, self.members(a=65504.0 * steps * sign))[1].num_oversized_scales == 0

    def test_groups_lost_to_float16(self, backend: Backend, scheme: GroupScheme) -> None:
        members = self.members()
        members[1][3:6] *= np.float32(1e-12)
        found = self.pack(backend, scheme, members)[1]
        assert found.num_lost_groups == 3 * 512 // scheme.group_size

    def test_findings_are_reported_once(self, backend: Backend, scheme: GroupScheme) -> None:
        layout = layout_of(geometry_for(scheme, Element.F32, 512, 8))
        slab, packer = backend.allocate_slab(layout), backend.packer()
        lost, whole = (SourceMatrix(name, normal(rng(10), 8, 512, scale=s)) for name, s in (("a", 1e-12), ("b", 1)))
        packer.pack(slab, layout.entry(KEY), [lost])
        assert [(found.name, found.num_lost_groups > 0) for found in packer.finish()] == [("a", True)]
        packer.pack(slab, layout.entry(KEY), [whole])
        assert packer.finish() == [PackedTensor("b", 0, 0, 0)]
        assert packer.finish() == []
        packer.close()
        backend.free_slab(slab)


@pytest.mark.cuda
class TestBlocksOfRows:
    """Matrices larger than the device packer's scratch."""

    @pytest.fixture(autouse=True)
    def _small_scratch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kestrel_cuda.backends import cuda_packer

        monkeypatch.setattr(cuda_packer, "SCRATCH_BYTES", 64 << 10)

    @pytest.mark.parametrize("source", SOURCES)
    @pytest.mark.parametrize("scheme", [*SCHEMES, pytest.param(None, id="floats")])
    def test_blocks_equal_the_whole(self, cuda_backend: Backend, scheme: GroupScheme | None, source: Element) -> None:
        k = 256 if scheme is G256 else 300
        members = [adversarial(n, k, source, scheme.bits if scheme else 8) for n in (100, 260)]
        assert_packs_by_the_definition(cuda_backend, geometry_for(scheme, source, k, 360), members)

    def test_a_row_that_does_not_fit_is_named(self, cuda_backend: Backend) -> None:
        with pytest.raises(OverflowError, match=r"member 0: 1024 inputs"):
            pack(cuda_backend, layout_of(geometry_for(Q8, Element.F32, 1024, 4)), [normal(rng(11), 4, 1024)])
