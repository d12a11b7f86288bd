"""Which layers stay on the device at a layer boundary: pure arithmetic, no memory. One rule a class.

Layers run 0 .. L-1 for every token, over and over, so a plain least-recently-used cache smaller than the model misses
every time. A window keeps what the scan will meet next. Layers are ordered by (token, layer): a layer fetched ahead,
for this token or the next one, belongs to the future and is never dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kestrel_cuda.config import Policy


class ResidencyWindow(Protocol):
    """A rule over layer numbers. `keep` is the number of layers it leaves resident after a token, `prefetch` how many
    missing layers are fetched ahead of their use."""

    @property
    def num_layers(self) -> int: ...

    @property
    def keep(self) -> int: ...

    @property
    def prefetch(self) -> int: ...

    def layers_to_drop(self, current: int, resident: Iterable[int], ahead: Collection[int] = ()) -> list[int]:
        """Of the resident layers, those that leave when `current` is entered, in ascending order.

        `ahead` are the layers fetched for a use that is still to come.
        """

    @property
    def peak_layers(self) -> int:
        """The most layers resident or on their way at any moment inside a token."""

    @property
    def upload_cycle(self) -> list[int]:
        """Layers that come over the link for each token once warm, in order."""

    @property
    def uploads_per_token(self) -> int:
        """How many they are."""


def upcoming(current: int, num_layers: int) -> Iterator[int]:
    """The other layers in the order they are used next: the rest of this token, then the next token's."""
    yield from range(current + 1, num_layers)
    yield from range(current)


@dataclass(frozen=True)
class PastOnlyWindow:
    """Drop only layers below `current - keep + 1`: the current and all later ones are about to be used.

    The last `keep` layers of a token stay until the next token has passed them, so the peak inside a token is
    min(L, 2 * keep + prefetch) layers, while L - keep are uploaded.
    """

    num_layers: int
    keep: int
    prefetch: int = 0

    def layers_to_drop(self, current: int, resident: Iterable[int], ahead: Collection[int] = ()) -> list[int]:
        return sorted(layer for layer in resident if layer < current - self.keep + 1 and layer not in ahead)

    @property
    def peak_layers(self) -> int:
        return min(self.num_layers, 2 * self.keep + self.prefetch)

    @property
    def upload_cycle(self) -> list[int]:
        return list(range(self.num_layers - self.keep))

    @property
    def uploads_per_token(self) -> int:
        return len(self.upload_cycle)


@dataclass(frozen=True)
class PinnedWindow:
    """Keep a fixed set of `keep` layers, spread evenly, and pass the others through a ring.

    Uploads L - keep layers a token like the past-only rule, with a peak of keep + 1 + prefetch layers instead of
    2 * keep + prefetch.
    """

    num_layers: int
    keep: int
    prefetch: int = 0

    def is_fixed(self, layer: int) -> bool:
        """Whether a layer is of the fixed set: the i-th of `keep` evenly spread ones."""
        return (layer + 1) * self.keep // self.num_layers > layer * self.keep // self.num_layers

    def layers_to_drop(self, current: int, resident: Iterable[int], ahead: Collection[int] = ()) -> list[int]:
        return sorted(x for x in resident if x != current and x not in ahead and not self.is_fixed(x))

    @property
    def peak_layers(self) -> int:
        return min(self.num_layers, self.keep + 1 + self.prefetch)

    @property
    def upload_cycle(self) -> list[int]:
        return [layer for layer in range(self.num_layers) if not self.is_fixed(layer)]

    @property
    def uploads_per_token(self) -> int:
        return len(self.upload_cycle)


@dataclass(frozen=True)
class BothSidesWindow:
    """Drop everything outside `current - keep + 1 .. current + 1`: a mistake, kept to be shown.

    What is dropped above `current` is needed again within the same token, so every token uploads nearly every layer
    whatever `keep` is.
    """

    num_layers: int
    keep: int
    prefetch: int = 0

    def layers_to_drop(self, current: int, resident: Iterable[int], ahead: Collection[int] = ()) -> list[int]:
        near = range(current - self.keep + 1, current + 2)
        return sorted(layer for layer in resident if layer not in near and layer not in ahead)

    @property
    def peak_layers(self) -> int:
        # With all but one layer kept, layer 1 is still there when layer 0 comes back.
        least = 1 + (self.keep >= self.num_layers - 1)
        return min(self.num_layers, max(self.keep, least) + self.prefetch)

    @property
    def upload_cycle(self) -> list[int]:
        always = max(0, self.keep - (self.num_layers - 2))
        return [layer for layer in range(self.num_layers) if not 2 - always <= layer < 2]

    @property
    def uploads_per_token(self) -> int:
        return len(self.upload_cycle)


WINDOWS: dict[Policy, type[PastOnlyWindow | PinnedWindow | BothSidesWindow]] = {
    Policy.PAST_ONLY: PastOnlyWindow,
    Policy.PINNED: PinnedWindow,
    Policy.BOTH_SIDES: BothSidesWindow,
}


def make_window(policy: Policy, num_layers: int, keep: int, prefetch: int = 0) -> ResidencyWindow | None:
    """The rule for `keep` layers; None when `keep` is 0, which means everything resident."""
    return WINDOWS[policy](num_layers, keep, prefetch) if keep else None
