"""How a weight is named everywhere: its layer and its projection, packed into 64 bits. Knows no checkpoint names."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Projection(IntEnum):
    """The linears of a decoder layer, the two fused ones, and lm_head."""

    Q = 0
    K = 1
    V = 2
    O = 3  # noqa: E741 - the field's name for the output projection
    GATE = 4
    UP = 5
    DOWN = 6
    QKV = 64
    GATE_UP = 65
    LM_HEAD = 66

    @property
    def members(self) -> tuple[Projection, ...]:
        """The projections a fused one holds side by side; a plain one holds itself."""
        return _MEMBERS.get(self, (self,))


_MEMBERS = {
    Projection.QKV: (Projection.Q, Projection.K, Projection.V),
    Projection.GATE_UP: (Projection.GATE, Projection.UP),
}

LM_HEAD_LAYER = 0x7FFFFFFF
"""The layer number of lm_head: above every real layer, so no window rule reaches it."""


class WeightKey(NamedTuple):
    """One weight of the language model."""

    layer: int
    projection: Projection

    @property
    def packed(self) -> int:
        """`(layer << 32) | (projection + 1)`; never 0, which means "do not cache"."""
        return (self.layer << 32) | (int(self.projection) + 1)

    @classmethod
    def unpack(cls, packed: int) -> WeightKey:
        """The key that `packed` came from. Raises ValueError for 0 and for unknown projections."""
        return cls(packed >> 32, Projection((packed & 0xFFFFFFFF) - 1))

    @property
    def num_weights(self) -> int:
        """How many of the checkpoint's matrices it stands for."""
        return len(self.projection.members)


LM_HEAD = WeightKey(LM_HEAD_LAYER, Projection.LM_HEAD)
