"""Encoding pictures as part of a run: before the weights or after them, what it leaves on the device, its bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kestrel_cuda.backends.vision import PixelCodes
from kestrel_cuda.config import EngineConfig, Grid, Quant, VisionConfig
from kestrel_cuda.encode import encode_cost
from kestrel_cuda.engine import Engine
from kestrel_cuda.errors import DeviceError, InputError
from kestrel_cuda.model.prompt_positions import Visual
from kestrel_cuda.model.vision import feature_bytes
from kestrel_cuda.model.vision_weights import tower_weight_bytes
from kestrel_cuda.model.visual_rows import EncodedVisuals
from tests.checkpoints import RELEASED_TOWER
from tests.engines import assert_bytes_moved, generate
from tests.goldens import checkpoint, golden, pixels_and_grids
from tests.pixel_codes import VALUES, codes_of

NAME = "tiny-dense-tied/img-two"
CTX = 160

Open = Callable[..., Engine]


@pytest.fixture
def opened(backend_name: str) -> Iterator[Open]:
    """`opened(quant=..., vram_bytes=...)`: an engine that has loaded nothing, closed after the test."""
    engines: list[Engine] = []

    def get(**config: object) -> Engine:
        settings: dict[str, object] = {"vram_bytes": 8 << 30} | config
        engine = Engine.open(EngineConfig(model=checkpoint(NAME), backend=backend_name, **settings))  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield get
    for engine in engines:
        engine.close()


def encode(engine: Engine) -> EncodedVisuals:
    pixels_mk, grids = pixels_and_grids(golden(NAME)[0], "image")
    return engine.encode_visuals([Visual("image", grid) for grid in grids], codes_of(pixels_mk, grids))


def blank(vision: VisionConfig, grid: Grid) -> list[PixelCodes]:
    codes_mk = np.zeros((math.prod(grid), vision.patch_inputs), np.uint8)
    return [PixelCodes(codes_mk, VALUES, vision.patch_inputs)]


def allocated(engine: Engine) -> int:
    assert engine.backend is not None
    return engine.backend.memory().allocated_bytes


@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.NONE])
def test_before_the_weights_or_after_them(opened: Open, quant: Quant) -> None:
    """To the bit; and what stays on the device is part of the plan."""
    ids = golden(NAME)[0]["input_ids"].tolist()
    late = opened(quant=quant)
    late.load(CTX)
    expected = generate(late, ids, 8, encoded=encode(late))

    early = opened(quant=quant)
    pictures = encode(early)
    report = early.load(CTX)
    found = generate(early, ids, 8, encoded=pictures)
    assert found.digest == expected.digest
    assert_bytes_moved(late, expected)
    assert_bytes_moved(early, found)
    assert early.plan is not None
    assert late.plan is not None
    assert dict(early.plan.rows)["features of pictures"] == pictures.num_bytes
    assert early.plan.total_bytes == late.plan.total_bytes + pictures.num_bytes
    assert report.planned_device_bytes >= early.plan.total_bytes


def test_features_that_are_no_more_are_refused(opened: Open) -> None:
    ids = golden(NAME)[0]["input_ids"].tolist()
    engine, other = opened(), opened()
    for each in (engine, other):
        each.load(CTX)
    freed, waiting = encode(engine), encode(engine)
    freed.free()
    answer = engine.generate(ids, 4, encoded=waiting)
    waiting.free()
    with pytest.raises(InputError, match="encode the pictures again"):
        next(iter(answer))
    before = encode(engine)
    engine.load(CTX)
    for useless in (freed, before, encode(other)):
        with pytest.raises(InputError, match="encode the pictures again"):
            engine.generate(ids, 4, encoded=useless)


def test_the_tower_leaves_and_the_features_stay(opened: Open) -> None:
    engine = opened()
    start = allocated_at_start(engine)
    pictures = encode(engine)
    vision = engine.checkpoint.config.vision
    assert vision is not None
    assert allocated(engine) - start == pictures.num_bytes
    assert pictures.num_bytes == feature_bytes(vision, [visual.grid for visual in pictures.visuals])
    pictures.free()
    assert allocated(engine) == start


def allocated_at_start(engine: Engine) -> int:
    """What an open backend holds before anything is encoded."""
    encode(engine).free()
    return allocated(engine)


def test_a_tower_that_is_kept_is_counted_and_used_again(opened: Open) -> None:
    engine = opened(keep_tower=True)
    first = encode(engine)
    vision = engine.checkpoint.config.vision
    assert engine.backend is not None
    assert vision is not None
    assert engine._encoder is not None
    held = dict(engine._encoder.held())
    assert held["vision tower"] == tower_weight_bytes(vision, engine.backend.patch_dtype(vision))
    before = allocated(engine)
    second = encode(engine)
    assert allocated(engine) == before + second.num_bytes
    for one, other in zip(first.features.arrays(), second.features.arrays(), strict=True):
        assert np.array_equal(engine.backend.to_host(one), engine.backend.to_host(other))
    engine.load(CTX)
    assert engine.plan is not None
    rows = dict(engine.plan.rows)
    assert rows["vision tower"] == held["vision tower"]
    assert rows["features of pictures"] == 2 * first.num_bytes


def test_pictures_without_room_are_refused_before_anything_is_read(opened: Open) -> None:
    """And the size that is named fits."""
    engine = opened()
    encode(engine).free()
    assert engine.backend is not None
    memory, vision = engine.backend.memory(), engine.checkpoint.config.vision
    assert vision is not None
    weight_bytes = tower_weight_bytes(vision, engine.backend.patch_dtype(vision))
    bound = memory.context_bytes + memory.allocated_bytes + weight_bytes + (2 << 20)

    tight = opened(vram_bytes=bound)
    grid: Grid = (1, 96, 96)
    said = r"encoding pictures of 2304 tokens needs .* more than .*; --image-tokens \d+ would fit"
    with pytest.raises(DeviceError, match=said) as caught:
        tight.encode_visuals([Visual("image", grid)], blank(vision, grid))
    fitting = int(str(caught.value).split("--image-tokens ")[1].split()[0])
    side = 2 * math.isqrt(fitting)
    assert 0 < side < 96
    small: Grid = (1, side, side)
    tight.encode_visuals([Visual("image", small)], blank(vision, small))

    with pytest.raises(DeviceError, match="the tower alone does not fit"):
        opened(vram_bytes=1).encode_visuals([Visual("image", small)], blank(vision, small))


def test_loading_again_starts_anew(opened: Open) -> None:
    engine = opened()
    engine.load(CTX)
    encode(engine)
    engine.load(CTX)
    assert engine.plan is not None
    assert "features of pictures" not in dict(engine.plan.rows)


def test_the_cost_is_counted_as_the_steps_do_it() -> None:
    """The released 8B tower over 1088 x 1920 pixels, by hand; twice the frames are twice the work."""
    vision = RELEASED_TOWER
    cost = encode_cost(vision, (1, 68, 120))
    block = 3 * 1152**2 + 1152**2 + 2 * 1152 * 4304
    mergers = 4 * 2040 * (4608 * 4608 + 4608 * 4096)
    products = 8160 * (1536 * 1152 + 27 * block) + mergers + 27 * 2 * 8160**2 * 1152
    assert cost.flops == 2 * products
    # The released checkpoints' count of vision parameters (qwen3vl-facts, 2) is 576.4 million.
    assert cost.tower_bytes == pytest.approx(2 * 576.4e6, rel=0.01)
    video = encode_cost(vision, (2, 68, 120))
    assert video.flops == 2 * cost.flops
    assert video.feature_bytes == 2 * cost.feature_bytes
    assert video.buffer_bytes == cost.buffer_bytes
