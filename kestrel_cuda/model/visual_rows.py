"""Features of a prompt's pictures, and which rows of a piece of the prompt they belong to. Knows no tower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kestrel_cuda.backends.base import Array, Backend
from kestrel_cuda.model.prompt_positions import Visual, VisualSpan
from kestrel_cuda.model.vision import VisionFeatures


@dataclass(frozen=True)
class EncodedVisuals:
    """Pictures and videos in the order of the prompt, and their features, which follow one another."""

    visuals: tuple[Visual, ...]
    features: VisionFeatures


@dataclass(frozen=True)
class VisualRows:
    """Neighbouring rows of a forward that stand for a picture: what replaces their embeddings, and what is added to
    them after each of the first decoder layers."""

    rows: slice
    tokens_mk: Array
    deepstack_mk: tuple[Array, ...]


class PlacedVisuals:
    """Features on the device until `free`, for the spans of one prompt."""

    def __init__(self, backend: Backend, features: VisionFeatures, spans: Sequence[VisualSpan]) -> None:
        self._backend, self._spans = backend, spans
        self._tokens_mk = backend.to_device(features.tokens_mn)
        self._deepstack_mk = [backend.to_device(level_mn) for level_mn in features.deepstack_mn]

    def rows(self, first: int, num_rows: int) -> Iterator[VisualRows]:
        """The parts of pictures among tokens first .. first + num_rows of the prompt."""
        num_before = 0
        for span in self._spans:
            begin, end = max(span.start, first), min(span.stop, first + num_rows)
            if begin < end:
                shift = num_before - span.start
                features = slice(begin + shift, end + shift)
                yield VisualRows(
                    slice(begin - first, end - first),
                    self._tokens_mk[features],
                    tuple(level_mk[features] for level_mk in self._deepstack_mk),
                )
            num_before += span.stop - span.start

    def free(self) -> None:
        for array in (self._tokens_mk, *self._deepstack_mk):
            self._backend.free(array)
