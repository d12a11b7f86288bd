"""What EngineConfig takes from Python: names and paths as text too, nothing that would be ignored or fail later."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrel_cuda.config import EngineConfig, Evict, KvDtype, Policy, Quant
from kestrel_cuda.errors import SettingError


def test_text_stands_for_paths_and_names() -> None:
    given = EngineConfig(
        model="m", strip_cache="s", quant="q4_0", kv="f32", policy="past-only", evict="free"  # type: ignore[arg-type]
    )  # fmt: skip
    assert given == EngineConfig(
        model=Path("m"),
        strip_cache=Path("s"),
        quant=Quant.Q4_0,
        kv=KvDtype.F32,
        policy=Policy.PAST_ONLY,
        evict=Evict.FREE,
    )
    assert isinstance(given.model, Path)
    assert isinstance(given.quant, Quant)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quant", "bogus"),
        ("quant", None),
        ("kv", "q4"),
        ("policy", "bogus"),
        ("evict", "bogus"),
        ("backend", "tpu"),
        ("keep", 1.5),
        ("keep", "4"),
        ("keep", -1),
        ("device", "0"),
        ("prefetch", None),
        ("prefetch", True),
        ("ctx", 0),
        ("prefill_chunk", 0),
    ],
)
def test_what_it_does_not_take(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=f"{name} is .*; it takes "):
        EngineConfig(model=Path("m"), **{name: value})  # type: ignore[arg-type]
