"""The past-only window as arithmetic: what stays, what is uploaded, and the peak inside a token."""

from __future__ import annotations

import pytest

from kestrel_cuda.residency.window import PastOnlyWindow

L = 28
RESIDENT_WEIGHTS = {0: 197, 27: 190, 26: 183, 20: 141, 12: 85, 4: 29, 1: 8}
KEEPS = [keep for keep in RESIDENT_WEIGHTS if keep]


class Pass:
    """Layers met in order under a window, nothing resident at first."""

    def __init__(self, num_layers: int, keep: int) -> None:
        self.window = PastOnlyWindow(num_layers, keep) if keep else None
        self.num_layers = num_layers
        self.resident: set[int] = set()
        self.peak = 0

    def token(self) -> int:
        """Layers uploaded."""
        uploads = 0
        for layer in range(self.num_layers):
            if self.window is not None:
                self.resident -= set(self.window.layers_to_drop(layer, self.resident))
            uploads += layer not in self.resident
            self.resident.add(layer)
            self.peak = max(self.peak, len(self.resident))
        return uploads


@pytest.mark.parametrize("keep", RESIDENT_WEIGHTS)
def test_tokens_of_a_28_layer_model(keep: int) -> None:
    run = Pass(L, keep)
    assert run.token() == L
    for _ in range(3):
        assert 7 * len(run.resident) + 1 == RESIDENT_WEIGHTS[keep]
        assert run.token() == (L - keep if keep else 0)
    assert run.peak == (min(L, 2 * keep) if keep else L)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5, 12, 28, 36])
def test_every_keep_of_every_size(num_layers: int) -> None:
    for keep in range(1, num_layers + 1):
        run = Pass(num_layers, keep)
        uploads = [run.token() for _ in range(4)]
        assert uploads == [num_layers, *[num_layers - keep] * 3]
        assert run.resident == set(range(num_layers - keep, num_layers)), "the tail stays for the next token"
        assert run.peak == PastOnlyWindow(num_layers, keep).peak_layers


def test_only_the_past_is_dropped() -> None:
    window = PastOnlyWindow(L, 4)
    everything = range(L)
    assert window.layers_to_drop(0, everything) == []
    assert window.layers_to_drop(3, everything) == []
    assert window.layers_to_drop(10, everything) == list(range(7))
    assert window.layers_to_drop(10, [9, 2, 27, 5]) == [2, 5]
    for current in range(L):
        assert all(layer < current for layer in window.layers_to_drop(current, everything))


def test_the_current_layer_stays_even_with_a_window_of_one() -> None:
    assert PastOnlyWindow(L, 1).layers_to_drop(5, [4, 5, 6]) == [4]
