"""One sequence on the device: its ids, and the rotation of each of its positions. Knows no weights and no pixels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import CHOSEN_SLOTS, SequenceState
from kestrel_cuda.config import TextConfig
from kestrel_cuda.model.prompt_positions import continued
from kestrel_cuda.model.rope import rotation_table, text_positions


class DeviceSequence:
    """The state of `ctx` cache slots. Its arrays stay where they are, so launches that use them may be captured."""

    def __init__(self, backend: Backend, text: TextConfig, ctx: int) -> None:
        self._backend, self._text, self._ctx = backend, text, ctx
        cos_sd, sin_sd = rotation_table(text, text_positions(ctx))
        self._holds_text = True
        self._holder: object = None
        self.turn = 0
        """Of how many nobody may go on any more: an answer that was asked for in an earlier one cannot begin."""
        self.state = SequenceState(
            tokens=backend.zeros((ctx + 1,), np.int32),
            position=backend.zeros((1,), np.int32),
            chosen=backend.shared_zeros((CHOSEN_SLOTS,), np.int32),
            cos_sd=backend.to_device(cos_sd),
            sin_sd=backend.to_device(sin_sd),
        )

    def start(self, holder: object, ids: Sequence[int], positions_3s: NDArray[np.int64] | None = None) -> None:
        """Lay down a prompt for `holder`; without `positions_3s` [3, ids] its positions are those of text."""
        self._holder = holder
        backend, state = self._backend, self.state
        if positions_3s is not None or not self._holds_text:
            self._holds_text = positions_3s is None
            of_slots = text_positions(self._ctx) if positions_3s is None else continued(positions_3s, self._ctx)
            cos_sd, sin_sd = rotation_table(self._text, of_slots)
            backend.write(state.cos_sd, cos_sd)
            backend.write(state.sin_sd, sin_sd)
        backend.write(state.tokens[: len(ids)], np.array(ids, np.int32))
        backend.write(state.position, np.zeros(1, np.int32))

    def is_held_by(self, holder: object) -> bool:
        """Whether the prompt laid down last was this one's, and nobody has let go of it since."""
        return self._holder is holder

    def let_go(self) -> None:
        """Nobody goes on from here, or begins: the arrays, or what is captured with them, are about to go."""
        self._holder = None
        self.turn += 1
