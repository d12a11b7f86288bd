"""Which layers stay on the device at a layer boundary: pure arithmetic, no memory. One rule a class.

Layers run 0 .. L-1 for every token, over and over, so a plain least-recently-used cache smaller than the model misses
every time. A window keeps what the scan will meet next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class ResidencyWindow(Protocol):
    """A rule over layer numbers. `keep` is the number of layers it leaves resident after a token."""

    @property
    def keep(self) -> int: ...

    def layers_to_drop(self, current: int, resident: Iterable[int]) -> list[int]:
        """Of the resident layers, those that leave when `current` is entered, in ascending order."""

    @property
    def peak_layers(self) -> int:
        """The most layers resident at any moment inside a token."""


@dataclass(frozen=True)
class PastOnlyWindow:
    """Drop only layers below `current - keep + 1`: the current and all later ones are about to be used.

    The last `keep` layers of a token stay until the next token has passed them, so the peak inside a token is
    min(L, 2 * keep) layers, while L - keep are uploaded.
    """

    num_layers: int
    keep: int

    def layers_to_drop(self, current: int, resident: Iterable[int]) -> list[int]:
        return sorted(layer for layer in resident if layer < current - self.keep + 1)

    @property
    def peak_layers(self) -> int:
        return min(self.num_layers, 2 * self.keep)


def peak_layers(num_layers: int, keep: int) -> int:
    """Peak of the past-only rule; every layer when `keep` is 0 (everything resident)."""
    return num_layers if keep == 0 else PastOnlyWindow(num_layers, keep).peak_layers
