"""Layers fetched ahead: the room they take in a plan, and fewer where it is not there."""

from __future__ import annotations

import pytest

from kestrel_cuda.config import Policy
from kestrel_cuda.errors import DeviceError
from kestrel_cuda.plan import (
    Flags,
)
from tests.plans import GIB, MIB, L, layer_bytes, plan, row


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5, 100])
def test_layers_fetched_ahead_need_room(prefetch: int) -> None:
    for keep in (1, 4, 13, 27):
        peak = min(L, 2 * keep + prefetch)
        assert row(plan(keep=keep, prefetch=prefetch), f"weights of {peak} of {L}") == peak * layer_bytes()
    assert plan(prefetch=prefetch).rows == plan().rows, "without a window nothing is fetched"
    bound = 2 * GIB
    made = plan(vram_bytes=bound, prefetch=2)
    assert made.keep == plan(vram_bytes=bound).keep - 1
    asked = plan(vram_bytes=bound, prefetch=2, keep=made.keep + 1)
    assert (asked.keep, asked.prefetch) == (made.keep + 1, 1 if asked.total_bytes > bound - layer_bytes() else 0)
    with pytest.raises(DeviceError, match=f"--keep {made.keep + 1} fits with --prefetch 0$"):
        plan(vram_bytes=bound, prefetch=2, keep=made.keep + 2)
    with pytest.raises(DeviceError, match=f"--keep {made.keep} fits"):
        plan(vram_bytes=bound, prefetch=2, keep=made.keep + 1, lowers_prefetch=False)


@pytest.mark.parametrize(("room_layers", "used"), [(3, 2), (2, 1), (1, 0)])
def test_fewer_layers_are_fetched_ahead_where_the_wanted_number_does_not_fit(room_layers: int, used: int) -> None:
    least = plan(vram_bytes=None, keep=1, prefetch=0, policy=Policy.PINNED, prefill_chunk=16)
    # keep 1 has two layers at its peak: the fixed one and the one in use.
    needed = least.total_bytes - row(least, "embeddings") + (room_layers - 1) * layer_bytes()
    made = plan(vram_bytes=needed, keep=1, prefetch=2, policy=Policy.PINNED, prefill_chunk=16)
    assert made.prefetch == used
    assert made.total_bytes <= needed
    lowered = [w for w in made.warnings if w.startswith("--prefetch 2 does not fit")]
    assert len(lowered) == (used < 2)
    assert all(f"--prefetch {used} is used" in warning for warning in lowered)
    if used == 0:
        with pytest.raises(
            DeviceError, match=r"cannot hold even a window of one layer; --vram .*; so would --ctx 1023 or --pre"
        ):
            plan(vram_bytes=needed - 1, keep=1, prefetch=2, policy=Policy.PINNED, prefill_chunk=16)
        with pytest.raises(DeviceError, match=r"; so would --prefetch 0 or --quant q4_0$"):
            plan(vram_bytes=needed, prefetch=2, policy=Policy.PINNED, prefill_chunk=16, lowers_prefetch=False)


@pytest.mark.parametrize(
    ("keep", "prefetch", "said"),
    [
        (4, 24, ()),
        (4, 25, ("--prefetch 25 is more than the 24 layers that are uploaded again: no more are fetched ahead",)),
        (27, 2, ()),  # the default, whatever the window
        (27, 3, ("--prefetch 3 is more than the 1 layer that is uploaded again: no more are fetched ahead",)),
        (28, 999, ("--prefetch 999 has nothing to fetch: no layer is uploaded again",)),
        (0, 999, ()),
    ],
)
def test_more_ahead_than_a_window_uploads_is_said(keep: int, prefetch: int, said: tuple[str, ...]) -> None:
    assert plan(keep=keep, prefetch=prefetch).warnings == said
    assert plan(keep=keep, prefetch=prefetch, flags=Flags(lays=True)).warnings == ()


def test_an_absurd_prefetch_is_refused_as_fast_as_any() -> None:
    with pytest.raises(DeviceError, match="cannot hold even a window of one layer"):
        plan(vram_bytes=MIB, prefetch=10**9)
    assert plan(vram_bytes=2 * GIB, keep=1, prefetch=10**9).prefetch in range(L)
