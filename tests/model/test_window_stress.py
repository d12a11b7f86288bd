"""Windows under delay on the GPU: a late copy or a late step must never change a bit, and a missing wait must show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

from kestrel_cuda.config import Evict, Policy, Quant
from kestrel_cuda.engine import Engine
from tests.conftest import DATA
from tests.engines import Engines, generate, random_ids

pytestmark = pytest.mark.cuda

PROMPT, NEW = 2048, 200
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""
DELAY_CYCLES = 100_000
"""About 60 microseconds; an upload of the tiny checkpoint's layer takes under 5, its steps about 50."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engines = Engines()
    loaded, _ = engines.load(
        DATA / "oracle/checkpoints/tiny-28L", "cuda", ctx=PROMPT + NEW, quant=Quant.Q8_0, lazy=True, prefill_chunk=512
    )
    yield loaded
    engines.close()


@pytest.fixture(scope="module")
def expected(engine: Engine) -> str:
    engine.set_window(0, Policy.PAST_ONLY, 0, Evict.POOL)
    return generate(engine, random_ids(PROMPT), NEW).digest


@pytest.fixture(scope="module")
def spin() -> Callable[[Any], None]:
    import cupy

    kernel = cupy.RawKernel(SPIN, "spin")

    def delay(stream: Any) -> None:
        with stream:
            kernel((1,), (1,), (DELAY_CYCLES,))

    return delay


def delay_copies(patch: pytest.MonkeyPatch, engine: Engine, spin: Callable[[Any], None]) -> None:
    backend: Any = engine.backend
    upload = backend.upload

    def late(slab: Any, host: Any) -> None:
        backend.copy_stream.wait_event(slab.events.read)
        spin(backend.copy_stream)
        upload(slab, host)

    patch.setattr(backend, "upload", late)


def delay_steps(patch: pytest.MonkeyPatch, engine: Engine, spin: Callable[[Any], None]) -> None:
    backend: Any = engine.backend
    rope_attend = backend.rope_attend

    def late(*arguments: Any) -> None:
        spin(backend.stream)
        rope_attend(*arguments)

    patch.setattr(backend, "rope_attend", late)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("late", [None, delay_copies, delay_steps], ids=["on time", "late copies", "late steps"])
def test_no_order_of_events_changes_a_bit(
    engine: Engine,
    expected: str,
    spin: Callable[[Any], None],
    late: Callable[..., None] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if late:
        late(monkeypatch, engine, spin)
    for keep, prefetch, policy in product((1, 2, 3), (0, 1, 2), Policy):
        engine.set_window(keep, policy, prefetch, Evict.POOL)
        run = generate(engine, random_ids(PROMPT), NEW)
        assert run.digest == expected, (keep, prefetch, policy)
        uploads = 28 if policy is Policy.BOTH_SIDES else 28 - keep
        assert run.residency.uploads_per_token == uploads
        assert engine._weights is not None
        assert run.residency.h2d_bytes_per_token == uploads * engine._weights.layers[0].num_bytes
        assert run.residency.layers_resident_end == keep


@pytest.mark.parametrize("broken", ["wait_upload", "release"])
def test_a_missing_wait_shows(
    engine: Engine, expected: str, spin: Callable[[Any], None], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait for a late copy, or for a late reader, the answer must be another."""
    (delay_copies if broken == "wait_upload" else delay_steps)(monkeypatch, engine, spin)
    monkeypatch.setattr(engine.backend, broken, lambda slab: None)
    engine.set_window(1, Policy.PAST_ONLY, 2, Evict.POOL)
    assert generate(engine, random_ids(PROMPT), NEW).digest != expected
