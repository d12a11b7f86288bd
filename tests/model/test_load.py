"""Where weights come from: the checkpoint, a strip cache, or that one's file layer by layer. The answer is the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kestrel_cuda.load
from kestrel_cuda.backends.cpu import CpuBackend
from kestrel_cuda.checkpoint.names import EMBEDDING
from kestrel_cuda.config import EngineConfig, KvDtype, Policy, Quant
from kestrel_cuda.engine import Engine
from kestrel_cuda.errors import CheckpointError, DeviceError
from kestrel_cuda.report import LoadReport, PlanReport
from tests.checkpoints import copy
from tests.conftest import DATA
from tests.engines import QUANTS, Engines, assert_bytes_moved, generate, random_ids

TINY = DATA / "oracle/checkpoints/tiny-dense-tied"
UNTIED = DATA / "oracle/checkpoints/tiny-dense-untied-sharded"
PROMPT = random_ids(12)


@pytest.fixture
def engines() -> Iterator[Engines]:
    opened = Engines()
    yield opened
    opened.close()


def digest(engines: Engines, backend_name: str, **config: object) -> tuple[str, list[str]]:
    engine, load = engines.load(TINY, backend_name, **config)
    run = generate(engine, PROMPT, 8)
    assert_bytes_moved(engine, run)
    return run.digest, [*load.notes, *load.warnings]


@pytest.mark.parametrize("quant", QUANTS)
def test_a_strip_cache_gives_the_same_answer(engines: Engines, backend_name: str, tmp_path: Path, quant: Quant) -> None:
    expected, _ = digest(engines, backend_name, quant=quant)
    saved, said = digest(engines, backend_name, quant=quant, strip_cache=tmp_path)
    assert any("were saved in the strip cache" in text for text in said)
    for options in ({}, {"lazy": True}, {"keep": 1}, {"keep": 2, "host_keep": 1}, {"keep": 1, "host_keep": 99}):
        found, said = digest(engines, backend_name, quant=quant, strip_cache=tmp_path, **options)
        assert any("come from the strip cache" in text for text in said), options
        assert found == expected == saved, options


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("prefetch", [0, 2])
def test_host_residency_under_every_rule(
    engines: Engines, backend_name: str, tmp_path: Path, policy: Policy, prefetch: int
) -> None:
    expected, _ = digest(engines, backend_name)
    for keep, host_keep in ((1, 1), (2, 1), (3, 2)):
        streamed, _ = digest(
            engines,
            backend_name,
            keep=keep,
            policy=policy,
            prefetch=prefetch,
            strip_cache=tmp_path,
            host_keep=host_keep,
        )
        assert streamed == expected


@pytest.mark.parametrize("host_keep", [0, 1])
def test_a_damaged_cache_is_rebuilt_and_said(
    engines: Engines, backend_name: str, tmp_path: Path, host_keep: int
) -> None:
    expected, _ = digest(engines, backend_name, keep=1, strip_cache=tmp_path)
    (weights,) = tmp_path.glob("*/weights.safetensors")
    damaged = bytearray(weights.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    weights.write_bytes(damaged)
    rebuilt, said = digest(engines, backend_name, keep=1, strip_cache=tmp_path, host_keep=host_keep)
    assert any("is damaged" in text and text.endswith("it is rebuilt") for text in said)
    assert any("were saved in the strip cache" in text for text in said)
    assert not any("come from the strip cache" in text for text in said)
    again, said = digest(engines, backend_name, keep=1, strip_cache=tmp_path, host_keep=host_keep)
    assert any("come from the strip cache" in text for text in said)
    assert rebuilt == again == expected


def test_host_keep_without_a_window_is_said(engines: Engines, backend_name: str, tmp_path: Path) -> None:
    _, said = digest(engines, backend_name, keep=0, strip_cache=tmp_path, host_keep=2)
    assert "--host-keep 2 has nothing to hold: no layer is uploaded again" in said


@pytest.mark.parametrize(("host_keep", "held"), [(1, 1), (3, 3), (9, 3)])
def test_what_host_residency_holds_is_said(
    engines: Engines, backend_name: str, tmp_path: Path, host_keep: int, held: int
) -> None:
    num_layers = 4
    _, said = digest(engines, backend_name, keep=num_layers - 3, strip_cache=tmp_path, host_keep=host_keep)
    assert any(text.startswith(f"{held} of the 3 layers that are uploaded again stay in host memory") for text in said)
    assert any(f"--host-keep {host_keep} is more than the 3 layers" in text for text in said) == (host_keep > held)


def test_memory_that_the_driver_will_not_pin_is_said(
    engines: Engines, backend_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend_name == "cuda":
        from kestrel_cuda.backends.cuda_memory import DeviceMemory

        pin = DeviceMemory.pin
        monkeypatch.setattr(DeviceMemory, "pin", lambda self, array, mapped=False: mapped and pin(self, array))
    else:
        monkeypatch.setattr(CpuBackend, "host_unpinned_bytes", lambda self: 3 << 20)
    _, said = digest(engines, backend_name, keep=1)
    assert any("the driver refused to pin" in text for text in said)


@pytest.mark.parametrize("keep", [0, 1])
def test_an_embedding_table_that_the_driver_will_not_map(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    """It goes where weights are, with the same answer, if all is planned anew and fits; else one line says so."""
    engine, load = engines.load(TINY, "cpu", keep=keep, prefetch=0)
    expected = generate(engine, PROMPT, 8).digest
    table_bytes = engine.checkpoint.tensor(EMBEDDING).data.nbytes

    def refuse(self: object, array: object) -> None:
        raise DeviceError("the driver refused to map 3 bytes of host memory for the embeddings")

    monkeypatch.setattr(CpuBackend, "map_host", refuse)
    roomy = load.planned_device_bytes + table_bytes
    found, said = digest(engines, "cpu", keep=keep, prefetch=0, vram_bytes=roomy)
    assert found == expected
    assert "the driver refused to map 3 bytes of host memory for the embeddings: they are on the device" in said
    assert not any("stays in host memory" in text for text in said)
    with pytest.raises(DeviceError, match=r"3 bytes .*; free host memory, .*: on the device (keeping|--vram) "):
        engines.load(TINY, "cpu", keep=keep, prefetch=0, vram_bytes=load.planned_device_bytes)


def test_an_untied_embedding_that_is_not_finite(engines: Engines, backend_name: str, tmp_path: Path) -> None:
    model = copy(UNTIED, tmp_path / "model")
    for shard in model.glob("*.safetensors"):
        content = bytearray(shard.read_bytes())
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        for name, entry in header.items():
            if name.endswith("embed_tokens.weight"):
                start = 8 + length + entry["data_offsets"][0]
                content[start : start + 2] = np.array([0x7FC0], np.uint16).tobytes()
        shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight holds weights that are not finite.*\(row 0\)"):
        engines.load(model, backend_name)


class TestWhatIsSaidBeforeLoading:
    """The plan is told before a weight is read, with what the host copy takes."""

    @staticmethod
    def planned(model: Path, **config: Any) -> tuple[PlanReport, LoadReport]:
        told: list[PlanReport] = []
        engine = Engine.open(EngineConfig(model=model, backend="cpu", **config))

        def hear(plan: PlanReport) -> None:
            assert engine._store is None
            told.append(plan)

        load = engine.load(40, 8, on_plan=hear)
        if not config.get("host_keep"):
            assert engine._store is not None
            assert told[0].host_copy_bytes == engine._store.host_bytes
        engine.close()
        assert len(told) == 1
        return told[0], load

    @pytest.mark.parametrize("config", [{}, {"keep": 0}, {"keep": 2}, {"keep": 0, "lazy": True}], ids=str)
    def test_the_plan_is_what_is_loaded(self, config: dict[str, Any]) -> None:
        plan, load = self.planned(TINY, **config)
        assert vars(plan).items() <= vars(load).items()
        assert (plan.host_copy_bytes > 0) == bool(config.get("keep") or config.get("lazy"))

    def test_what_was_decided_is_said_with_the_plan(self) -> None:
        whole, _ = self.planned(TINY, keep=0)
        plan, load = self.planned(TINY, keep=99)
        assert any("is more than the model's" in warning for warning in plan.warnings)
        assert set(plan.warnings) <= set(load.warnings)
        smaller, load = self.planned(TINY, vram_bytes=whole.planned_device_bytes * 4 // 5)
        assert any("a window of" in note for note in smaller.notes)
        assert set(smaller.notes) <= set(load.notes)

    def test_layers_from_disk(self, tmp_path: Path) -> None:
        whole, _ = self.planned(TINY, keep=2)
        few, _ = self.planned(TINY, keep=2, strip_cache=tmp_path, host_keep=1)
        assert 0 < few.host_copy_bytes < whole.host_copy_bytes

    def test_more_than_the_host_has(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(kestrel_cuda.load, "available_bytes", lambda: 1000)
        plan, load = self.planned(TINY, keep=2)
        assert len(plan.warnings) == 1
        assert plan.warnings[0] in load.warnings
        assert "1000 B are available" in plan.warnings[0]
        assert "--strip-cache DIR --host-keep N" in plan.warnings[0]
        assert "a smaller --host-keep" in self.planned(TINY, keep=2, strip_cache=tmp_path, host_keep=9)[0].warnings[0]
        for options in ({"keep": 2, "strip_cache": tmp_path, "host_keep": 1}, {"keep": 0, "lazy": True}):
            (warning,) = self.planned(TINY, **options)[0].warnings
            assert warning.endswith("; free host memory"), "nothing else holds fewer"
        assert not self.planned(TINY, keep=0)[0].warnings
        monkeypatch.setattr(kestrel_cuda.load, "available_bytes", lambda: None)
        assert not self.planned(TINY, keep=2)[0].warnings


class TestACheckpointThatChanges:
    """What is mapped is read again for every token: an answer over two files is no answer."""

    @staticmethod
    def engine(tmp_path: Path, **config: Any) -> tuple[Engine, Path]:
        copy(TINY, tmp_path / "model")
        (file,) = (tmp_path / "model").glob("*.safetensors")
        return Engine.open(EngineConfig(model=tmp_path / "model", backend="cpu", **config)), file

    @pytest.mark.parametrize("is_cut_off", [False, True], ids=["another time", "cut off: a read would end the process"])
    def test_while_it_answers(self, tmp_path: Path, is_cut_off: bool) -> None:
        engine, file = self.engine(tmp_path)
        engine.load(40, len(PROMPT))
        tokens = iter(engine.generate(PROMPT, 4, ignore_eos=True))
        assert [next(tokens).step for _ in range(2)] == [0, 1]
        if is_cut_off:
            os.truncate(file, 0)
        else:
            os.utime(file, ns=(1, 1))
        with pytest.raises(CheckpointError, match=r"model\.safetensors changed while it was in use, .*; run again$"):
            next(tokens)
        engine.close()

    def test_before_it_is_loaded(self, tmp_path: Path) -> None:
        engine, file = self.engine(tmp_path)
        os.utime(file, ns=(1, 1))
        with pytest.raises(CheckpointError, match="changed while it was in use"):
            engine.load(40, len(PROMPT))
        engine.close()


def test_a_strip_cache_that_is_found_packs_nothing(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = engines.load(TINY, "cpu", strip_cache=tmp_path)
    expected = generate(first, PROMPT, 4)
    monkeypatch.setattr(CpuBackend, "packer", lambda _backend: pytest.fail("a packer was asked for"))
    again, _ = engines.load(TINY, "cpu", strip_cache=tmp_path)
    found = generate(again, PROMPT, 4)
    assert (found.ids, found.digest) == (expected.ids, expected.digest)


@pytest.mark.cuda
@pytest.mark.parametrize("kv", KvDtype)
@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0, Quant.G256, Quant.NONE])
def test_nothing_is_compiled_once_everything_is_loaded(engines: Engines, quant: Quant, kv: KvDtype) -> None:
    """A prompt in one pass, one with few rows left over, and tokens."""
    for chunk in (None, 31):
        engine, _ = engines.load(TINY, "cuda", quant=quant, kv=kv, prefill_chunk=chunk)
        kernels = engine.backend.kernels  # type: ignore[union-attr]
        loaded = set(kernels._modules)
        list(engine.generate(random_ids(33), 6, ignore_eos=True))
        assert set(kernels._modules) == loaded
