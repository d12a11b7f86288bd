"""Weight keys: the packed form that the cache is looked up by."""

from __future__ import annotations

import pytest

from kestrel_cuda.weight_keys import LM_HEAD, Projection, WeightKey

PLAIN = [Projection.Q, Projection.K, Projection.V, Projection.O, Projection.GATE, Projection.UP, Projection.DOWN]


def test_packed_is_layer_and_projection_plus_one() -> None:
    assert WeightKey(0, Projection.Q).packed == 1
    assert WeightKey(0, Projection.DOWN).packed == 7
    assert WeightKey(3, Projection.O).packed == 3 << 32 | 4
    assert [int(projection) for projection in PLAIN] == list(range(7))


def test_every_key_of_a_large_model_comes_back_and_none_is_zero() -> None:
    keys = [WeightKey(layer, projection) for layer in range(200) for projection in Projection] + [LM_HEAD]
    packed = [key.packed for key in keys]
    assert [WeightKey.unpack(number) for number in packed[:-1]] == keys[:-1]
    assert WeightKey.unpack(LM_HEAD.packed) == LM_HEAD
    assert len(set(packed)) == len(keys)
    assert 0 not in packed
    assert max(packed) < 2**63


@pytest.mark.parametrize("packed", [0, 9, 5 << 32, (1 << 32) | 1000])
def test_numbers_that_name_no_weight_are_refused(packed: int) -> None:
    with pytest.raises(ValueError, match="Projection"):
        WeightKey.unpack(packed)


def test_members_of_fused_weights() -> None:
    assert Projection.QKV.members == (Projection.Q, Projection.K, Projection.V)
    assert Projection.GATE_UP.members == (Projection.GATE, Projection.UP)
    assert all(projection.members == (projection,) for projection in [*PLAIN, Projection.LM_HEAD])


def test_a_layer_counts_seven_weights_fused_or_not() -> None:
    fused = [Projection.QKV, Projection.O, Projection.GATE_UP, Projection.DOWN]
    assert sum(WeightKey(0, projection).num_weights for projection in fused) == 7
    assert sum(WeightKey(0, projection).num_weights for projection in PLAIN) == 7
    assert LM_HEAD.num_weights == 1


def test_lm_head_lies_above_every_layer() -> None:
    assert LM_HEAD.packed > WeightKey(100_000, Projection.LM_HEAD).packed
