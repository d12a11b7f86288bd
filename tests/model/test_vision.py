"""The vision tower against the reference implementation: every picture and video golden; and what they cannot show.

Bounds are those of the oracle's README.md.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kestrel_cuda.backends import cpu_vision
from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.vision import BFLOAT16, Affine, PixelCodes
from kestrel_cuda.checkpoint.names import BlockPart
from kestrel_cuda.checkpoint.reader import open_checkpoint
from kestrel_cuda.config import Grid, VisionConfig
from kestrel_cuda.errors import CheckpointError, InternalError
from kestrel_cuda.model import vision
from kestrel_cuda.model.vision import (
    VisionFeatures,
    encode_all,
    feature_bytes,
    rows_at_once,
    tower_work_bytes,
)
from kestrel_cuda.model.vision_weights import TowerWeights, read_tower, tower_weight_bytes
from scripts.make_tiny_model import make_t0
from tests.checkpoints import copy, read_tensors, write_tensors
from tests.compare import assert_close
from tests.goldens import ORACLE, checkpoint, golden, golden_names, pixels_and_grids
from tests.pixel_codes import VALUES, codes_of, random_pixels

GOLDENS = golden_names("img", "vid")
FEATURES = 1e-4
TowerObserver = Callable[[str, NDArray[np.float32]], None]
Rows = NDArray[np.float32]
Tower = tuple[VisionConfig, TowerWeights]


def read(folder: Path, backend: Backend, dtype: Any = np.float32) -> Tower:
    opened = open_checkpoint(folder)
    assert opened.config.vision is not None
    return opened.config.vision, read_tower(opened, opened.config.vision, backend, dtype)


@pytest.fixture(scope="module")
def t0_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tower has the released position table's size."""
    return make_t0(tmp_path_factory.mktemp("t0") / "model")


@pytest.fixture
def t0(t0_folder: Path, backend: Backend) -> Tower:
    return read(t0_folder, backend)


def encode(
    backend: Backend, tower: Tower, pixels: list[PixelCodes], grids: list[Grid], observe: TowerObserver | None = None
) -> VisionFeatures:
    """Features on the host, the tower's memory given back."""
    before = backend.memory().allocated_bytes
    features = encode_all(backend, *tower, pixels, grids, observe)
    found = VisionFeatures(
        backend.to_host(features.tokens_mn), tuple(backend.to_host(level) for level in features.deepstack_mn)
    )
    for array in features.arrays():
        backend.free(array)
    assert backend.memory().allocated_bytes == before
    return found


def free(backend: Backend, weights: TowerWeights) -> None:
    for array in weights.arrays():
        backend.free(array)


def changed_affine(backend: Backend, affine: Affine, **parts: Rows) -> Affine:
    """With other weights or biases, which stay until the backend closes."""
    return replace(affine, **{name: backend.to_device(np.ascontiguousarray(part)) for name, part in parts.items()})


def assert_same(first: VisionFeatures, second: VisionFeatures) -> None:
    assert np.array_equal(first.tokens_mn, second.tokens_mn)
    assert len(first.deepstack_mn) == len(second.deepstack_mn)
    for level, other in zip(first.deepstack_mn, second.deepstack_mn, strict=True):
        assert np.array_equal(level, other)


def test_all_picture_goldens_are_here() -> None:
    assert len(GOLDENS) == 14


@pytest.mark.parametrize("name", GOLDENS)
def test_features_are_the_goldens(backend: Backend, name: str) -> None:
    arrays, _ = golden(name)
    config, weights = read(checkpoint(name), backend)
    kind = "video" if "video_grid_thw" in arrays else "image"
    seen: dict[str, list[Rows]] = {}
    pixels_mk, grids = pixels_and_grids(arrays, kind)
    features = encode(
        backend,
        (config, weights),
        codes_of(pixels_mk, grids),
        grids,
        lambda what, rows_mk: seen.setdefault(what, []).append(rows_mk),
    )
    free(backend, weights)

    for what, key in {
        "block in": "block_in",
        "block 0": "after_block_00",
        f"block {config.depth - 1}": "last_hidden",
    }.items():
        assert_close(np.concatenate(seen[what]), arrays[f"{kind}_{key}"], max_abs=FEATURES, what=f"{name} {what}")
    assert_close(features.tokens_mn, arrays[f"{kind}_embeds"], max_abs=FEATURES, what=f"{name} embeds")
    assert f"{kind}_deepstack_{len(features.deepstack_mn)}" not in arrays
    for level, rows_mn in enumerate(features.deepstack_mn):
        assert_close(rows_mn, arrays[f"{kind}_deepstack_{level}"], max_abs=FEATURES, what=f"{name} level {level}")
    assert features.tokens_mn.dtype == np.float32


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in GOLDENS if "untied" not in name])
def test_features_in_bfloat16_are_near_the_goldens(cuda_backend: Backend, name: str) -> None:
    """Eight bits of a significand, over a few blocks."""
    arrays, _ = golden(name)
    config, weights = read(checkpoint(name), cuda_backend, BFLOAT16)
    assert cuda_backend.patch_dtype(config) == BFLOAT16
    kind = "video" if "video_grid_thw" in arrays else "image"
    pixels_mk, grids = pixels_and_grids(arrays, kind)
    features = encode(cuda_backend, (config, weights), codes_of(pixels_mk, grids), grids)
    free(cuda_backend, weights)
    assert_close(features.tokens_mn, arrays[f"{kind}_embeds"], max_nmse=4e-4, what=f"{name} embeds")
    for level, rows_mn in enumerate(features.deepstack_mn):
        assert_close(rows_mn, arrays[f"{kind}_deepstack_{level}"], max_nmse=4e-4, what=f"{name} level {level}")


@pytest.mark.cuda
def test_sizes_that_rows_of_16_bytes_do_not_fit_stay_float32(cuda_backend: Backend) -> None:
    vision = open_checkpoint(ORACLE / "checkpoints/tiny-dense-untied-sharded").config.vision
    assert vision is not None
    assert vision.intermediate_size == 100
    assert cuda_backend.patch_dtype(vision) == np.float32


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_memory_is_what_is_said_before(backend: Backend, t0_folder: Path, dtype: Any) -> None:
    """Weights, buffers and features; the peak of an encode is their sum."""
    if backend.name == "cpu" and dtype == BFLOAT16:
        pytest.skip("the CPU has float32 alone")
    start = backend.memory().allocated_bytes
    config, weights = read(t0_folder, backend, dtype)
    assert backend.memory().allocated_bytes - start == tower_weight_bytes(config, dtype)
    backend.reset_peak()
    before = backend.memory().allocated_bytes
    grids: list[Grid] = [(1, 10, 12), (3, 4, 6)]
    encode(backend, (config, weights), [random_pixels(config, grid) for grid in grids], grids)
    said = tower_work_bytes(config, grids, dtype) + feature_bytes(config, grids)
    assert 0.98 * said < backend.memory().peak_allocated_bytes - before <= said
    free(backend, weights)


def test_frames_go_through_together_as_far_as_a_pass_holds() -> None:
    assert rows_at_once([(1, 256, 256)]) == 65536
    assert rows_at_once([(100, 10, 20)]) == 40 * 200
    assert rows_at_once([(3, 10, 20), (1, 30, 30)]) == 900


def test_frames_in_several_goes_are_as_in_one(backend: Backend, t0: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit on the GPU, where a row's sums do not depend on how many rows there are."""
    grid: Grid = (5, 4, 6)
    pixels = [random_pixels(t0[0], grid)]
    together = encode(backend, t0, pixels, [grid])
    monkeypatch.setattr(vision, "PASS_ROWS", 50)
    apart = encode(backend, t0, pixels, [grid])
    free(backend, t0[1])
    if backend.name == "cpu":
        assert_close(apart.tokens_mn, together.tokens_mn, max_abs=FEATURES)
    else:
        assert_same(apart, together)


def test_case_d24_two_images_are_each_as_alone(backend: Backend, t0: Tower) -> None:
    """To the bit, in either order."""
    config, weights = t0
    small, large = (1, 4, 6), (1, 10, 8)
    pixels = {grid: random_pixels(config, grid) for grid in (small, large)}
    alone = {grid: encode(backend, t0, [pixels[grid]], [grid]) for grid in (small, large)}
    for first, second in ((small, large), (large, small)):
        both = encode(backend, t0, [pixels[first], pixels[second]], [first, second])
        num_first, num_all = config.num_tokens(first), len(both.tokens_mn)
        assert num_all == num_first + config.num_tokens(second)
        assert_same(both.rows(0, num_first), alone[first])
        assert_same(both.rows(num_first, num_all), alone[second])
    free(backend, weights)


def test_frame_pairs_of_a_video_do_not_see_one_another(backend: Backend, t0: Tower) -> None:
    pixels = random_pixels(t0[0], (3, 4, 6))
    video = encode(backend, t0, [pixels], [(3, 4, 6)])
    for frame in range(3):
        alone = encode(backend, t0, [pixels.rows(24 * frame, 24 * (frame + 1))], [(1, 4, 6)])
        found = video.rows(6 * frame, 6 * (frame + 1))
        for one, other in zip(found.arrays(), alone.arrays(), strict=True):
            # The CPU's products round differently in batches of another size.
            assert_close(one, other, max_abs=1e-5 if backend.name == "cpu" else 0.0)
    free(backend, t0[1])


def test_case_d31_patch_embedding_has_both_slices_and_a_bias(backend: Backend, t0: Tower) -> None:
    """A picture's frame is there twice; where the second slice of the kernel undoes the first, the bias is left."""
    config, weights = t0
    bias_n = np.linspace(-3, 3, config.hidden_size, dtype=np.float32)
    kernel = backend.to_host(weights.patch_embed.weight).reshape(config.hidden_size, 3, 2, 16, 16).copy()
    kernel[:, :, 1] = -kernel[:, :, 0]
    embed = changed_affine(backend, weights.patch_embed, weight=kernel.reshape(config.hidden_size, -1), bias=bias_n)
    changed = replace(weights, patch_embed=embed, positions_pn=backend.zeros(weights.positions_pn.shape, np.float32))
    values_cv = VALUES.copy()
    values_cv[:, 0] = 0
    frame = np.random.default_rng(0).integers(1, 256, (16, 3, 1, 256), np.uint8)
    seen: dict[str, Rows] = {}
    twice = PixelCodes(frame.reshape(16, -1), values_cv, config.patch_inputs)
    encode(backend, (config, changed), [twice], [(1, 4, 4)], seen.__setitem__)
    assert_close(seen["block in"], np.tile(bias_n, (16, 1)), max_abs=1e-4)
    once = PixelCodes(
        np.concatenate([frame, np.zeros_like(frame)], axis=2).reshape(16, -1), values_cv, config.patch_inputs
    )
    encode(backend, (config, changed), [once], [(1, 4, 4)], seen.__setitem__)
    assert np.abs(seen["block in"] - bias_n).max() > 0.1


@pytest.mark.parametrize("blocks", [(0, 1, 3), (2, 1, 0), (1,), ()])
def test_case_d32_deepstack_after_a_block_counted_from_0(backend: Backend, t0: Tower, blocks: tuple[int, ...]) -> None:
    """In the order of the blocks; the merger is the one that the block has in the list."""
    config, weights = t0
    changed = replace(weights, deepstack=tuple(weights.deepstack[i] for i in range(len(blocks))))
    pixels, grid = [random_pixels(config, (1, 4, 6))], (1, 4, 6)
    seen: dict[str, Rows] = {}
    of_blocks = replace(config, deepstack_blocks=blocks)
    found = encode(backend, (of_blocks, changed), pixels, [grid], seen.__setitem__).deepstack_mn
    assert len(found) == len(blocks)

    def parts(affine: Affine) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return backend.to_host(affine.weight).astype(np.float64), backend.to_host(affine.bias).astype(np.float64)

    for level_mn, block in zip(found, sorted(blocks), strict=True):
        merger = changed.deepstack[blocks.index(block)]
        x = seen[f"block {block}"].astype(np.float64).reshape(6, -1)
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        weight, bias = parts(merger.norm)
        x = x * weight + bias
        weight, bias = parts(merger.fc1)
        x = x @ weight.T + bias
        x = x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2
        weight, bias = parts(merger.fc2)
        assert_close(level_mn, x @ weight.T + bias, max_abs=FEATURES)
    free(backend, weights)


def test_attention_in_blocks_is_attention() -> None:
    """On a number of rows that no block divides, against float64."""
    num_rows, num_heads, d = 150, 3, 12
    generator = np.random.default_rng(0)
    qkv_mn = generator.standard_normal((num_rows, 3 * num_heads * d)).astype(np.float32)
    angles = generator.uniform(-3, 3, (num_rows, d // 2))
    found = cpu_vision.attend(qkv_mn, num_heads, np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32))
    q, k, v = qkv_mn.astype(np.float64).reshape(num_rows, 3, num_heads, d).transpose(1, 2, 0, 3)
    q, k = ((x[..., : d // 2] + 1j * x[..., d // 2 :]) * np.exp(1j * angles) for x in (q, k))
    scores = (q @ k.conj().swapaxes(-1, -2)).real / np.sqrt(d)
    p = np.exp(scores)
    exact = (p / p.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(num_rows, -1)
    assert_close(found, exact, max_abs=5e-6)


def test_memory_grows_with_the_number_of_patches_not_its_square() -> None:
    peaks = []
    for num_rows in (1024, 4096):
        qkv_mn = np.zeros((num_rows, 3 * 64), np.float32)
        table_md = np.zeros((num_rows, 8), np.float32)
        tracemalloc.start()
        cpu_vision.attend(qkv_mn, 4, table_md, table_md)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 5 * peaks[0]
    assert peaks[1] < 4096 * 4096 * 4, "less than one head's scores"


def test_activations_against_float64() -> None:
    x = np.linspace(-6, 6, 4001, dtype=np.float32)
    wide = x.astype(np.float64)
    exact = wide * (1 + np.vectorize(math.erf)(wide / np.sqrt(2))) / 2
    assert_close(cpu_vision.gelu_erf(x), exact, max_abs=1e-6)
    tanh = wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))) / 2
    assert_close(cpu_vision.gelu_tanh(x), tanh, max_abs=1e-6)
    assert np.abs(exact - tanh).max() > 1e-4, "the two can be told apart"


def test_weights_that_are_not_finite_are_named(cpu_backend: Backend, tmp_path: Path) -> None:
    folder = copy(ORACLE / "checkpoints/tiny-28L", tmp_path / "model")
    tensors = read_tensors(folder)
    name = "model.visual.deepstack_merger_list.1.norm.bias"
    tensors[name] = tensors[name]._replace(data=np.full(tensors[name].shape, np.nan, np.float32).tobytes())
    write_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match=name):
        read(folder, cpu_backend)


@pytest.mark.parametrize("grid", [(1, 4, 6), (1, 3, 8), (2, 4, 4), (0, 4, 6)])
def test_pixels_of_another_grid_are_our_own_mistake(cpu_backend: Backend, t0_folder: Path, grid: Any) -> None:
    tower = read(t0_folder, cpu_backend)
    num_rows = 24 if grid == (1, 3, 8) else 16
    pixels = random_pixels(tower[0], (1, 1, num_rows))
    with pytest.raises(InternalError, match="are not those of grid"):
        encode_all(cpu_backend, *tower, [pixels], [grid])


def test_each_part_of_a_block_is_read(backend: Backend, t0: Tower) -> None:
    """A part that were left out would leave the features as they are."""
    config, weights = t0
    pixels, grid = [random_pixels(config, (1, 4, 4))], (1, 4, 4)
    before = encode(backend, t0, pixels, [grid]).tokens_mn
    for block in range(config.depth):
        for name in BlockPart:
            for field in ("weight", "bias"):
                affine = weights.blocks[block][name]
                reversed_part = backend.to_host(getattr(affine, field))[::-1]
                shaken = changed_affine(backend, affine, **{field: reversed_part})
                blocks = list(weights.blocks)
                blocks[block] = blocks[block] | {name: shaken}
                changed = replace(weights, blocks=tuple(blocks))
                found = encode(backend, (config, changed), pixels, [grid]).tokens_mn
                assert not np.array_equal(found, before), f"block {block} {name} {field}"
