"""The pool of freed slabs: exact geometry, a bound, and counts."""

from __future__ import annotations

import pytest

from kestrel_cuda.backends.base import Slab
from kestrel_cuda.quant.packed import Element, PackedGeometry, SlabLayout, slab_layout
from kestrel_cuda.residency.pool import MAX_BUFFERS, BufferPool
from kestrel_cuda.weight_keys import Projection, WeightKey
from tests.fake_backend import FakeBackend, layer_layout


def slab(layout: SlabLayout) -> Slab:
    return FakeBackend().allocate_slab(layout)


def one_matrix(element: Element, num_inputs: int, num_outputs: int, group_size: int, layer: int = 0) -> SlabLayout:
    geometry = PackedGeometry(element, num_inputs, num_outputs, group_size)
    return slab_layout(layer, [(WeightKey(layer, Projection.O), geometry)])


def test_a_slab_serves_any_layer_of_the_same_geometry() -> None:
    pool = BufferPool()
    held = slab(layer_layout(3))
    assert pool.give_back(held)
    assert pool.take(layer_layout(17)) is held
    assert (pool.num_hits, pool.num_misses) == (1, 0)
    assert pool.take(layer_layout(17)) is None
    assert (pool.num_hits, pool.num_misses) == (1, 1)


@pytest.mark.parametrize(
    "other",
    [
        one_matrix(Element.INT8, 64, 128, 32),  # as many bytes, the axes exchanged
        one_matrix(Element.INT8, 128, 60, 32),
        one_matrix(Element.INT8, 128, 63, 32),  # padded to the same columns
        one_matrix(Element.INT4, 256, 64, 32),  # as many bytes of codes
        one_matrix(Element.INT8, 128, 64, 128),
        one_matrix(Element.BF16, 128, 64, 0),
    ],
)
def test_near_fits_are_no_fits(other: SlabLayout) -> None:
    pool = BufferPool()
    pool.give_back(slab(one_matrix(Element.INT8, 128, 64, 32)))
    assert pool.take(other) is None
    assert len(pool) == 1


def test_a_layer_of_other_matrices_in_the_same_bytes_is_no_fit() -> None:
    pool = BufferPool()
    wide, narrow = PackedGeometry(Element.INT8, 32, 64, 32), PackedGeometry(Element.INT8, 32, 32, 32)
    keys = [WeightKey(0, Projection.O), WeightKey(0, Projection.DOWN)]
    pool.give_back(slab(slab_layout(0, list(zip(keys, [wide, narrow], strict=True)))))
    assert pool.take(slab_layout(0, list(zip(keys, [narrow, wide], strict=True)))) is None


def test_the_pool_is_bounded_and_says_when_it_is_full() -> None:
    pool = BufferPool()
    given = [pool.give_back(slab(layer_layout(layer))) for layer in range(MAX_BUFFERS + 2)]
    assert MAX_BUFFERS == 128
    assert given == [True] * 128 + [False] * 2
    assert len(pool) == 128
    assert pool.num_bytes == 128 * layer_layout(0).num_bytes


def test_drain_hands_over_everything_once() -> None:
    pool = BufferPool()
    held = [slab(layer_layout(layer, size)) for layer, size in enumerate((32, 64, 32))]
    for one in held:
        pool.give_back(one)
    drained = pool.drain()
    assert {id(one) for one in drained} == {id(one) for one in held}
    assert len(drained) == 3
    assert (len(pool), pool.num_bytes, pool.drain()) == (0, 0, [])
