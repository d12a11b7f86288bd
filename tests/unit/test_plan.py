"""The plan: which window fits which memory, said before anything is allocated."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kestrel_cuda.config import KvDtype, ModelConfig, Quant
from kestrel_cuda.errors import DeviceError, SettingError
from kestrel_cuda.model.kv_cache import kv_cache_bytes
from kestrel_cuda.model.weights import plan_weights
from kestrel_cuda.plan import DoesNotFit, Flags
from kestrel_cuda.plan_sizes import FREE_MARGIN_BYTES, GRAPH_BYTES, seeds_budget_bytes
from kestrel_cuda.quant.packed import Element
from kestrel_cuda.sizes import enough_size, format_size
from tests.plans import DRIVER_BYTES, EMBEDDING_BYTES, GIB, MIB, TEXT, L, layer_bytes, plan, row


def test_a_large_card_keeps_everything() -> None:
    made = plan()
    assert (made.keep, made.embeddings_on, made.notes) == (0, "device", ())
    assert made.prefill_chunk == 512
    assert row(made, f"weights of {L} of {L}") == L * layer_bytes()
    assert row(made, "lm_head") > TEXT.vocab_size * TEXT.hidden_size
    assert row(made, "embeddings") == EMBEDDING_BYTES
    assert row(made, "driver") == DRIVER_BYTES + GRAPH_BYTES
    assert made.total_bytes == sum(num_bytes for _, num_bytes in made.rows)


@pytest.mark.parametrize(("quant", "bits"), [("q8_0", 8.5), ("q4_0", 4.5), ("g256", 8.0625), ("none", 16)])
def test_weight_rows_are_bits_times_weights(quant: str, bits: float) -> None:
    made = plan(quant=Quant(quant))
    per_layer = 2048 * (2048 + 1024 + 1024 + 2048) + 3 * 2048 * 6144
    assert row(made, "weights") == pytest.approx(L * per_layer * bits / 8, rel=1e-4)
    assert row(made, "lm_head") == pytest.approx(TEXT.vocab_size * 2048 * bits / 8, rel=1e-4)


@pytest.mark.parametrize(("quant", "bits"), [("q8_0", 8.5), ("q4_0", 4.5), ("g256", 8.0625), ("none", 16)])
def test_nothing_fills_up_a_released_shape(quant: str, bits: float) -> None:
    """So the bytes that a token reads are bits times weights exactly."""
    model = ModelConfig("", TEXT, True, None, None, None)
    weights = plan_weights(model, Quant(quant), lambda key: Element.BF16)
    num_weights = L * (2048 * (2048 + 1024 + 1024 + 2048) + 3 * 2048 * 6144) + TEXT.vocab_size * 2048
    assert sum(layout.num_bytes for layout in weights.layouts) == num_weights * bits / 8


@pytest.mark.parametrize(("kv", "item_bytes"), [(None, 2), (KvDtype.F16, 2), (KvDtype.F32, 4), (KvDtype.Q8, 34 / 32)])
def test_cache_rows(kv: KvDtype | None, item_bytes: float) -> None:
    made = plan(ctx=5000, kv=kv)
    assert row(made, "key-value cache, 5000 slots") == 2 * L * 5000 * 8 * 128 * item_bytes
    assert kv_cache_bytes(TEXT, 5000, KvDtype.F32) == 2 * L * 5000 * 8 * 128 * 4
    assert row(plan(quant=Quant.NONE, ctx=100), "key-value cache") == 2 * L * 100 * 8 * 128 * 4


def test_the_largest_window_that_fits_is_chosen_and_said() -> None:
    all_resident = plan(prefill_chunk=256)
    made = plan(vram_bytes=all_resident.total_bytes - EMBEDDING_BYTES - 1, prefill_chunk=256)
    assert made.keep == L // 2 - 1
    assert made.embeddings_on == "host"
    assert any(f"--keep {made.keep} of {L} layers" in note for note in made.notes)
    with pytest.raises(DeviceError):
        plan(vram_bytes=all_resident.total_bytes - EMBEDDING_BYTES - 1, keep=made.keep + 1, prefill_chunk=256)


@pytest.mark.parametrize("asked", [0, 14, 20, 28, 99])
def test_a_keep_that_does_not_fit_is_refused_with_the_one_that_does(asked: int) -> None:
    bound = 2 * GIB
    fitting = plan(vram_bytes=bound).keep
    assert 0 < fitting < 14
    with pytest.raises(DeviceError, match=rf"2\.00 GiB; --keep {fitting} fits") as caught:
        plan(vram_bytes=bound, keep=asked)
    assert "\n" not in str(caught.value)
    assert f"keeping {'all' if asked == 0 else min(asked, L)} of 28 layers" in str(caught.value)
    assert plan(vram_bytes=bound, keep=fitting).keep == fitting


def test_nothing_fits() -> None:
    with pytest.raises(DeviceError, match="cannot hold even a window of one layer") as caught:
        plan(vram_bytes=600 * MIB)
    assert "--vram 600.00 MiB" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("asked", [1, 4, 27, 28])
def test_an_explicit_keep_is_kept_though_more_would_fit(asked: int) -> None:
    made = plan(keep=asked)
    assert (made.keep, made.notes) == (asked, ())
    assert row(made, f"weights of {min(L, 2 * asked)} of {L}") == min(L, 2 * asked) * layer_bytes()
    assert plan(keep=0).keep == 0


@pytest.mark.parametrize("asked", [29, 99])
def test_a_keep_above_the_model_is_the_model(asked: int) -> None:
    made = plan(keep=asked)
    assert made.keep == L
    assert [note for note in made.warnings if f"--keep {asked}" in note and "28 are kept" in note]


def test_embeddings_go_to_the_host_where_they_do_not_fit() -> None:
    whole = plan(prefill_chunk=256)
    for spare, where in ((0, "device"), (-1, "host")):
        made = plan(vram_bytes=whole.total_bytes + spare, prefill_chunk=256)
        assert (made.keep, made.embeddings_on) == (0, where)
    assert row(made, "embeddings") == 0
    assert any("embedding table" in note and "host memory" in note for note in made.notes)


def test_free_memory_less_a_margin_is_the_default_bound() -> None:
    needed = plan(prefill_chunk=256).total_bytes
    enough = needed - DRIVER_BYTES + FREE_MARGIN_BYTES
    assert plan(free=enough, prefill_chunk=256).embeddings_on == "device"
    assert plan(free=enough - 1, prefill_chunk=256).embeddings_on == "host"


def test_the_seeds_rule() -> None:
    assert seeds_budget_bytes(10 * GIB) == 5 * GIB
    assert seeds_budget_bytes(100 * GIB) == 24 * GIB
    assert seeds_budget_bytes(48 * GIB) == 24 * GIB
    assert seeds_budget_bytes(512 * MIB) == seeds_budget_bytes(0) == 256 * MIB


def test_a_cache_budget_bounds_the_weights_alone() -> None:
    assert plan(cache_budget=GIB).keep == 6
    made = plan(cache_budget=GIB)
    assert row(made, "weights") + row(made, "lm_head") <= GIB == made.weight_budget_bytes
    assert made.embeddings_on == "device"
    assert plan(cache_budget=100 * GIB).keep == 0
    assert plan(free=140 * GIB, cache_budget="seeds").weight_budget_bytes == 24 * GIB
    assert plan(free=3 * GIB, cache_budget="seeds").weight_budget_bytes == 3 * GIB // 2
    with pytest.raises(DeviceError, match="--keep 6 fits"):
        plan(cache_budget=GIB, keep=0)


def test_a_cache_budget_is_compared_with_weights_alone() -> None:
    head = row(plan(), "lm_head")
    needed = enough_size(L * layer_bytes() + head)
    with pytest.raises(DoesNotFit) as caught:
        plan(cache_budget=GIB, keep=0)
    assert str(caught.value) == (
        f"keeping all of 28 layers resident needs {needed} of weights, more than --cache-budget 1.00 GiB; --keep 6 fits"
    )
    assert caught.value.bound == "--cache-budget 1.00 GiB"


def test_a_budget_that_holds_the_weights_is_not_blamed() -> None:
    with pytest.raises(DeviceError, match=r"more than --vram 2\.00 GiB; --keep"):
        plan(vram_bytes=2 * GIB, cache_budget=GIB * 15 // 8, keep=0)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_cache_budget_too_small_for_one_layer_is_named(prefetch: int) -> None:
    least = plan(keep=1, prefetch=prefetch)
    weights_bytes = row(least, "weights") + row(least, "lm_head")
    with pytest.raises(DeviceError) as caught:
        plan(cache_budget=100 * MIB, prefetch=prefetch, lowers_prefetch=False)
    enough = f"--cache-budget {-(-weights_bytes // MIB)}MiB"
    assert str(caught.value).startswith(
        f"--cache-budget 100.00 MiB cannot hold even a window of one layer; {enough} would ("
        f"weights of {2 + prefetch} of 28 layers at the peak {format_size(row(least, 'weights'))}, lm_head "
    )
    assert "so would" not in str(caught.value), "lm_head alone is over it, in four bits too"


def test_budgets_that_are_both_too_small_are_both_named() -> None:
    with pytest.raises(DeviceError) as caught:
        plan(vram_bytes=600 * MIB, cache_budget=100 * MIB)
    found = re.search(r"; --vram (\d+)MiB with --cache-budget (\d+)MiB would \(", str(caught.value))
    assert found
    vram, weights = (int(size) * MIB for size in found.groups())
    assert plan(vram_bytes=vram, cache_budget=weights).keep == 1
    for less_vram, less_weights in ((MIB, 0), (0, MIB)):
        with pytest.raises(DeviceError, match="cannot hold"):
            plan(vram_bytes=vram - less_vram, cache_budget=weights - less_weights)


def test_what_is_needed_is_enough() -> None:
    """Rounded up, so that it can be written after the flag."""
    with pytest.raises(DeviceError) as caught:
        plan(vram_bytes=2 * GIB, keep=0)
    needed = re.search(r"resident needs (\d+)MiB, more than", str(caught.value))
    assert needed
    assert plan(vram_bytes=int(needed[1]) * MIB, keep=0).keep == 0


def test_what_lays_no_window_is_advised_none() -> None:
    said = r"^keeping all of 28 layers resident needs (\d+MiB), more than --vram \S+ \S+; give --vram \1$"
    for vram_bytes in (MIB, 2 * GIB):
        with pytest.raises(DeviceError, match=said):
            plan(vram_bytes=vram_bytes, keep=0, flags=Flags(None))


def test_what_helps_nothing_is_not_advised() -> None:
    tiny = replace(TEXT, num_layers=2, hidden_size=64, intermediate_size=128, vocab_size=300)
    with pytest.raises(DeviceError) as caught:
        plan(tiny, vram_bytes=550 * MIB)
    assert str(caught.value).endswith(" KiB, its scratch 72.00 MiB)")
    assert "so would" not in str(caught.value)


def alone(**given: Any) -> list[str]:
    """What a refusal says would do by itself."""
    with pytest.raises(DeviceError) as caught:
        plan(**given)
    _, _, advice = str(caught.value).partition("; so would ")
    return advice.split(" or ") if advice else []


@pytest.mark.parametrize(
    ("given", "advised"),
    [
        ({"vram_bytes": 1020 * MIB, "prefetch": 2}, ["--quant q4_0"]),
        ({"vram_bytes": 1600 * MIB, "ctx": 9000, "num_prompt": 100, "prefetch": 2}, ["--ctx"]),
        ({"vram_bytes": 1200 * MIB, "ctx": 4000, "num_prompt": 100}, ["--ctx"]),
        ({"vram_bytes": 700 * MIB}, []),
        ({"cache_budget": 400 * MIB, "prefetch": 2}, ["--quant q4_0"]),
        ({"cache_budget": 460 * MIB, "prefetch": 2}, ["--prefetch", "--quant q4_0"]),
    ],
    ids=str,
)
def test_a_refusal_names_the_smallest_changes_that_would_do(given: dict[str, Any], advised: list[str]) -> None:
    found = alone(**given, lowers_prefetch=False)
    assert [re.sub(r" \d+$", "", one) for one in found] == advised
    for one in found:
        flag, _, value = one.partition(" ")
        name = flag.removeprefix("--")
        changed = given | {name: Quant(value) if name == "quant" else int(value)}
        assert plan(**changed, lowers_prefetch=False).keep >= 1
        if name != "quant":
            with pytest.raises(DeviceError):
                plan(**given | {name: int(value) + 1}, lowers_prefetch=False)


@pytest.mark.parametrize(("keep", "vram_mib"), [(0, 2700), (4, 2200), (27, 2700)])
def test_what_would_do_is_said_of_the_window_that_was_asked_for(keep: int, vram_mib: int) -> None:
    given = {"keep": keep, "ctx": 20_000, "num_prompt": 100, "vram_bytes": vram_mib * MIB}
    with pytest.raises(DeviceError) as caught:
        plan(**given)
    found = re.search(
        rf", --keep {keep or 'off'} takes --vram \d+MiB or --ctx (\d+)( or --quant q4_0)?$", str(caught.value)
    )
    assert found
    assert plan(**given | {"ctx": int(found[1])}).keep == keep
    with pytest.raises(DeviceError):
        plan(**given | {"ctx": int(found[1]) + 1})
    if found[2]:
        assert plan(**given, quant=Quant.Q4_0).keep == keep
    else:
        with pytest.raises(DeviceError):
            plan(**given, quant=Quant.Q4_0)


@pytest.mark.parametrize("keep", [0, 4])
def test_a_refusal_names_what_the_window_that_was_asked_for_takes(keep: int) -> None:
    with pytest.raises(DeviceError) as caught:
        plan(vram_bytes=600 * MIB, keep=keep)
    found = re.search(rf", --keep {keep or 'off'} takes --vram (\d+)MiB", str(caught.value))
    assert found
    assert plan(vram_bytes=int(found[1]) * MIB, keep=keep).keep == keep
    with pytest.raises(DeviceError):
        plan(vram_bytes=(int(found[1]) - 1) * MIB, keep=keep)


def test_a_refusal_advises_what_the_caller_has() -> None:
    flags = Flags("--keeps", ("--new-tokens", "--prompt-tokens"), lays=True)
    given = {"vram_bytes": 1800 * MIB, "ctx": 9000}
    new, prompt, quant = alone(**given, num_prompt=4000, flags=flags)
    assert quant == "--quant q4_0"
    assert plan(**given | {"ctx": 4000 + int(new.removeprefix("--new-tokens "))}, num_prompt=4000).keep == 1
    shorter = int(prompt.removeprefix("--prompt-tokens "))
    assert plan(**given | {"ctx": 5000 + shorter}, num_prompt=shorter).keep == 1
    with pytest.raises(DeviceError, match=r"; --keeps \d+ fits$"):
        plan(vram_bytes=2 * GIB, keep=0, flags=flags)
    assert plan(keep=29, flags=flags).warnings == ("--keeps 29 is more than the model's 28 layers: 28 are kept",)
    assert any("--keep 10 of 28 layers is used" in note for note in plan(vram_bytes=2 * GIB).notes)
    assert not any("is used" in note for note in plan(vram_bytes=2 * GIB, flags=flags).notes)


def test_a_context_beyond_the_models_positions() -> None:
    assert plan(ctx=TEXT.max_positions).ctx == TEXT.max_positions
    with pytest.raises(SettingError, match=r"262145.*262144"):
        plan(ctx=TEXT.max_positions + 1)


def test_on_the_cpu_the_machines_memory_is_the_bound() -> None:
    made = plan(free=1 * GIB, used=15 * GIB, on_gpu=False)
    assert made.keep == 0


def test_random_models_and_bounds_are_never_exceeded() -> None:
    random = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        heads = int(random.choice([1, 2, 4]))
        text = replace(
            TEXT,
            hidden_size=int(random.integers(1, 40)) * 32,
            num_layers=int(random.integers(1, 40)),
            num_heads=heads * int(random.integers(1, 5)),
            num_kv_heads=heads,
            head_dim=int(random.choice([16, 64, 128])),
            intermediate_size=int(random.integers(1, 3000)),
            vocab_size=int(random.integers(10, 200_000)),
        )
        wishes: dict[str, Any] = {
            "vram_bytes": int(2 ** random.uniform(28, 34)),
            "quant": random.choice(list(Quant)),
            "cache_budget": random.choice([None, "seeds", int(2 ** random.uniform(20, 33))]),
            "keep": random.choice([None, None, 0, int(random.integers(1, 50))]),
            "prefetch": int(random.integers(0, 4)),
        }
        wishes["quant"] = Quant(wishes["quant"])
        context = {"ctx": int(random.integers(2, 20_000)), "num_prompt": int(random.integers(1, 3000))}
        try:
            made = plan(text, free=20 * GIB, used=int(random.integers(0, 2 * GIB)), **context, **wishes)
        except DeviceError:
            refused += 1
            continue
        assert made.total_bytes <= wishes["vram_bytes"]
        assert row(made, "weights") + row(made, "lm_head") <= made.weight_budget_bytes
        assert all(num_bytes >= 0 for _, num_bytes in made.rows)
        assert 0 <= made.keep <= text.num_layers
        assert 1 <= made.prefill_chunk <= context["num_prompt"]
        if wishes["keep"]:
            assert made.keep == min(wishes["keep"], text.num_layers)
    assert 30 < refused < 270, "both outcomes are met"


@pytest.mark.parametrize("quant", list(Quant))
@pytest.mark.parametrize("num_prompt", [1, 5000])
def test_more_memory_never_gives_a_smaller_window(quant: Quant, num_prompt: int) -> None:
    found: list[int] = []
    for vram in range(900 * MIB, 6 * GIB, 53 * MIB):
        try:
            made = plan(vram_bytes=vram, quant=quant, num_prompt=num_prompt, ctx=num_prompt + 100)
        except DeviceError:
            assert not found, f"{vram} holds nothing, less memory did"
            continue
        found.append(made.keep or L + 1)
        assert found[-1] == max(found), vram
    assert found[-1] == L + 1
    assert len(set(found)) > 4


def test_room_for_the_prompts_logits_is_planned() -> None:
    without, with_logits = plan(num_prompt=1000), plan(num_prompt=1000, collects_logits=True)
    assert row(with_logits, "prompt rows kept") == 4 * 1000 * TEXT.hidden_size
    assert with_logits.total_bytes == without.total_bytes + 4 * 1000 * TEXT.hidden_size
