"""Features of a prompt's pictures, and which rows of a piece of the prompt they belong to. Knows no tower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import Array
from kestrel_cuda.errors import CheckpointError, InputError
from kestrel_cuda.model.prompt_positions import Visual, VisualSpan
from kestrel_cuda.model.vision import VisionFeatures
from kestrel_cuda.paths import shown_path


class EncodedVisuals:
    """Pictures and videos in the order of the prompt, and their features, which follow one another.

    The features are on the backend until `free`, or until the engine that made them closes. `checkpoint_path` is whose
    tower made them.
    """

    def __init__(
        self, backend: Backend, visuals: Sequence[Visual], features: VisionFeatures, checkpoint_path: Path
    ) -> None:
        self._backend, self._checkpoint_path = backend, checkpoint_path
        self.visuals = tuple(visuals)
        self.features = features
        self.num_bytes = sum(array.nbytes for array in features.arrays())
        self._is_free = False

    def check_held(self, backend: Backend) -> None:
        """Raise InputError unless `backend` has the features still."""
        if self._is_free or backend is not self._backend:
            raise InputError(
                "the features of the prompt's pictures were given back, or are another engine's, or of an earlier "
                "load; encode the pictures again"
            )

    def check_finite(self) -> None:
        """Raise CheckpointError unless every feature is a number. It reads all back: for when something went wrong."""
        if not all(np.isfinite(self._backend.to_host(array)).all() for array in self.features.arrays()):
            raise CheckpointError(
                f"{shown_path(self._checkpoint_path)}: the vision tower makes features that are not finite of the "
                "prompt's pictures; its weights are damaged or too large: take the original checkpoint"
            )

    def free(self) -> None:
        """Give the features back; a second time there are none."""
        if self._is_free:
            return
        self._is_free = True
        for array in self.features.arrays():
            self._backend.free(array)
        self.num_bytes = 0


@dataclass(frozen=True)
class VisualRows:
    """Neighbouring rows of a forward that stand for a picture: what replaces their embeddings, and what is added to
    them after each of the first decoder layers."""

    rows: slice
    tokens_mk: Array
    deepstack_mk: tuple[Array, ...]


def visual_rows(
    features: VisionFeatures, spans: Sequence[VisualSpan], first: int, num_rows: int
) -> Iterator[VisualRows]:
    """The parts of pictures among tokens first .. first + num_rows of a prompt that has them at `spans`."""
    num_before = 0
    for span in spans:
        begin, end = max(span.start, first), min(span.stop, first + num_rows)
        if begin < end:
            shift = num_before - span.start
            part = features.rows(begin + shift, end + shift)
            yield VisualRows(slice(begin - first, end - first), part.tokens_mn, part.deepstack_mn)
        num_before += span.stop - span.start
