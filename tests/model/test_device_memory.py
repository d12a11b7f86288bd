"""Memory on a GPU: what a warm token takes, waits for and gives back, and counts that agree with the driver's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kestrel_cuda.config import Policy, Quant
from kestrel_cuda.engine import Engine
from scripts.make_tiny_model import make_tiny_checkpoint
from tests.driver_calls import counted_driver_calls, find_cupti
from tests.engines import QUANTS, generate, head_bytes, layer_bytes, random_ids

ROOT = Path(__file__).resolve().parents[2]
TINY_28L = ROOT / "tests/data/oracle/checkpoints/tiny-28L"
TINY_RANDOM = ROOT / "tests/data/tiny-random"
PROMPT = random_ids(24)
N, CTX = 6, 32

Load = Callable[..., Engine]

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("policy", [Policy.PAST_ONLY, Policy.PINNED])
@pytest.mark.parametrize("keep", [0, 1, 4])
@pytest.mark.parametrize("quant", QUANTS)
def test_a_warm_token_takes_and_gives_back_no_memory(
    load_on_gpu: Load, quant: Quant, keep: int, policy: Policy
) -> None:
    engine = load_on_gpu(TINY_28L, quant=quant, keep=keep, policy=policy, ctx=64)
    assert engine.backend is not None
    memory = engine.backend.device_memory  # type: ignore[attr-defined]
    calls, used = [], []
    for _ in engine.generate(PROMPT, 24, ignore_eos=True):
        calls.append((memory.num_allocations, memory.num_frees))
        info = engine.backend.memory()
        used.append(info.total_bytes - info.free_bytes)
    assert len(calls) == 24
    # Slabs are allocated up to the second pass; after five a layer is in no slab that it was not captured in.
    assert set(calls[3:]) == {calls[-1]}
    assert set(used[8:]) == {used[-1]}


@pytest.mark.parametrize("policy", [Policy.PAST_ONLY, Policy.PINNED])
@pytest.mark.parametrize("keep", [0, 1, 4])
@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0])
def test_a_warm_token_never_waits_for_the_whole_device(
    load_on_gpu: Load, quant: Quant, keep: int, policy: Policy
) -> None:
    """Counted by the driver itself, allocations with it; that it counts is shown first."""
    from cupy.cuda import runtime

    cupti = find_cupti()
    if cupti is None:
        pytest.skip("CUPTI is not installed")
    with counted_driver_calls(cupti) as control:
        runtime.free(runtime.malloc(1 << 20))
        runtime.deviceSynchronize()
    assert control.device_synchronizations >= 1
    assert sum(control.memory_calls.values()) >= 2

    engine = load_on_gpu(TINY_28L, quant=quant, keep=keep, policy=policy, prefetch=2, ctx=64)
    tokens = iter(engine.generate(PROMPT, 24, ignore_eos=True))
    for _ in range(9):
        next(tokens)
    with counted_driver_calls(cupti) as warm:
        assert sum(1 for _ in tokens) == 15
    assert warm.device_synchronizations == 0
    assert not warm.memory_calls
    assert sum(warm.calls.values()) >= 15, "the tokens were seen"


def test_counted_bytes_agree_with_the_driver(load_on_gpu: Load, tmp_path: Path) -> None:
    """A model large enough that the driver's granularity does not hide an error."""
    sizes = {"hidden_size": 1024, "num_heads": 8, "head_dim": 128, "intermediate_size": 4096}
    model = make_tiny_checkpoint(tmp_path / "m", num_layers=4, with_vision=False, **sizes)
    small = load_on_gpu(TINY_28L, quant=Quant.Q8_0, keep=0, ctx=64)
    assert small.backend is not None
    generate(small, PROMPT, 3)  # the context and the kernels are there from here on
    before = small.backend.memory()
    engine = load_on_gpu(model, quant=Quant.NONE, keep=0, ctx=4096)
    assert engine.backend is not None
    run = generate(engine, PROMPT, 3)
    after = engine.backend.memory()
    grown = before.free_bytes - after.free_bytes
    assert grown > 64 << 20
    assert abs(grown - after.allocated_bytes) < max(0.03 * after.allocated_bytes, 64 << 20)
    assert run.residency.peak_weight_bytes < after.allocated_bytes


def test_pinned_bytes_are_what_a_window_keeps_on_the_host(load_on_gpu: Load, tmp_path: Path) -> None:
    """Case D18: 65 equal layers, just over a power of two."""
    model = make_tiny_checkpoint(tmp_path / "m", num_layers=65, with_vision=False)
    engine = load_on_gpu(model, quant=Quant.Q8_0, keep=2, ctx=CTX)
    assert engine._store is not None
    packed = engine._store.bytes_per_pass
    assert packed == 65 * layer_bytes(engine) + head_bytes(engine)
    run = generate(engine, PROMPT, 3)
    assert packed <= run.residency.host_pinned_bytes <= 1.05 * packed
    assert run.residency.embed_host_bytes == 0


def test_a_resident_model_pins_nothing(load_on_gpu: Load) -> None:
    run = generate(load_on_gpu(TINY_RANDOM, quant=Quant.Q8_0, keep=0, ctx=CTX), PROMPT, 3)
    assert (run.residency.host_pinned_bytes, run.residency.embed_host_bytes) == (0, 0)
