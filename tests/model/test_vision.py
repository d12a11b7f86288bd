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
from kestrel_cuda.checkpoint.names import BlockPart
from kestrel_cuda.checkpoint.reader import open_checkpoint
from kestrel_cuda.config import Grid, VisionConfig
from kestrel_cuda.errors import CheckpointError, InternalError
from kestrel_cuda.model.vision import HostTower, VisionFeatures, encode_all
from kestrel_cuda.model.vision_weights import Affine, TowerWeights, read_tower
from scripts.make_tiny_model import make_t0
from tests.checkpoints import copy, read_tensors, write_tensors
from tests.compare import assert_close
from tests.goldens import ORACLE, checkpoint, golden, golden_names, pixels_and_grids

GOLDENS = golden_names("img", "vid")
FEATURES = 1e-4
Rows = NDArray[np.float32]
Tower = tuple[VisionConfig, TowerWeights]


def read(folder: Path) -> Tower:
    opened = open_checkpoint(folder)
    assert opened.config.vision is not None
    return opened.config.vision, read_tower(opened, opened.config.vision)


@pytest.fixture(scope="module")
def tower() -> Callable[[str], Tower]:
    """Configuration and weights of a reference checkpoint, read once."""
    held: dict[Path, Tower] = {}

    def get(name: str) -> Tower:
        folder = checkpoint(name)
        if folder not in held:
            held[folder] = read(folder)
        return held[folder]

    return get


@pytest.fixture(scope="module")
def t0(tmp_path_factory: pytest.TempPathFactory) -> Tower:
    """A tower with the released position table's size."""
    return read(make_t0(tmp_path_factory.mktemp("t0") / "model"))


def random_pixels(config: VisionConfig, grid: Grid, seed: int = 0) -> Rows:
    generator = np.random.default_rng(seed)
    return generator.uniform(-1, 1, (math.prod(grid), config.patch_inputs)).astype(np.float32)


def assert_same(first: VisionFeatures, second: VisionFeatures) -> None:
    assert np.array_equal(first.tokens_mn, second.tokens_mn)
    assert len(first.deepstack_mn) == len(second.deepstack_mn)
    for level, other in zip(first.deepstack_mn, second.deepstack_mn, strict=True):
        assert np.array_equal(level, other)


def part(features: VisionFeatures, rows: slice) -> VisionFeatures:
    return VisionFeatures(features.tokens_mn[rows], tuple(level[rows] for level in features.deepstack_mn))


def test_all_picture_goldens_are_here() -> None:
    assert len(GOLDENS) == 14


@pytest.mark.parametrize("name", GOLDENS)
def test_features_are_the_goldens(tower: Callable[[str], Tower], name: str) -> None:
    arrays, _ = golden(name)
    config, weights = tower(name)
    kind = "video" if "video_grid_thw" in arrays else "image"
    seen: dict[str, list[Rows]] = {}
    host = HostTower(config, weights, lambda what, rows_mk: seen.setdefault(what, []).append(rows_mk))
    features = encode_all(host, *pixels_and_grids(arrays, kind))

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


def test_case_d24_two_images_are_each_as_alone(t0: Tower) -> None:
    """To the bit, in either order."""
    config, weights = t0
    host = HostTower(config, weights)
    small, large = (1, 4, 6), (1, 10, 8)
    pixels = {grid: random_pixels(config, grid) for grid in (small, large)}
    alone = {grid: host.encode(pixels[grid], grid) for grid in (small, large)}
    for first, second in ((small, large), (large, small)):
        both = encode_all(host, np.concatenate([pixels[first], pixels[second]]), [first, second])
        num_first = config.num_tokens(first)
        assert len(both.tokens_mn) == num_first + config.num_tokens(second)
        assert_same(part(both, slice(num_first)), alone[first])
        assert_same(part(both, slice(num_first, None)), alone[second])


def test_frame_pairs_of_a_video_do_not_see_one_another(t0: Tower) -> None:
    config, weights = t0
    host = HostTower(config, weights)
    pixels_mk = random_pixels(config, (3, 4, 6))
    video = host.encode(pixels_mk, (3, 4, 6))
    for frame in range(3):
        alone = host.encode(pixels_mk[24 * frame : 24 * (frame + 1)], (1, 4, 6))
        assert_same(part(video, slice(6 * frame, 6 * (frame + 1))), alone)


def test_case_d31_patch_embedding_has_both_slices_and_a_bias(t0: Tower) -> None:
    """A picture's frame is there twice; where the second slice of the kernel undoes the first, the bias is left."""
    config, weights = t0
    bias_n = np.linspace(-3, 3, config.hidden_size, dtype=np.float32)
    kernel = weights.patch_embed.weight.reshape(config.hidden_size, 3, 2, 16, 16).copy()
    kernel[:, :, 1] = -kernel[:, :, 0]
    embed = Affine(kernel.reshape(config.hidden_size, -1), bias_n)
    changed = replace(weights, patch_embed=embed, positions_mn=np.zeros_like(weights.positions_mn))
    frame = np.random.default_rng(0).uniform(-1, 1, (16, 3, 1, 16, 16)).astype(np.float32)
    seen: dict[str, Rows] = {}
    HostTower(config, changed, seen.__setitem__).encode(frame.repeat(2, axis=2).reshape(16, -1), (1, 4, 4))
    assert_close(seen["block in"], np.tile(bias_n, (16, 1)), max_abs=1e-4)
    frame = np.concatenate([frame, np.zeros_like(frame)], axis=2)
    HostTower(config, changed, seen.__setitem__).encode(frame.reshape(16, -1), (1, 4, 4))
    assert np.abs(seen["block in"] - bias_n).max() > 0.1


@pytest.mark.parametrize("blocks", [(0, 1, 3), (2, 1, 0), (1,), ()])
def test_case_d32_deepstack_after_a_block_counted_from_0(t0: Tower, blocks: tuple[int, ...]) -> None:
    """In the order of the blocks; the merger is the one that the block has in the list."""
    config, weights = t0
    changed = replace(weights, deepstack=tuple(weights.deepstack[i] for i in range(len(blocks))))
    pixels_mk, grid = random_pixels(config, (1, 4, 6)), (1, 4, 6)
    seen: dict[str, Rows] = {}
    host = HostTower(replace(config, deepstack_blocks=blocks), changed, seen.__setitem__)
    found = host.encode(pixels_mk, grid).deepstack_mn
    assert len(found) == len(blocks)
    for level_mn, block in zip(found, sorted(blocks), strict=True):
        merger = changed.deepstack[blocks.index(block)]
        x = seen[f"block {block}"].astype(np.float64).reshape(6, -1)
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        x = (x * merger.norm.weight + merger.norm.bias) @ merger.fc1.weight.T.astype(np.float64) + merger.fc1.bias
        x = x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2
        assert_close(level_mn, x @ merger.fc2.weight.T.astype(np.float64) + merger.fc2.bias, max_abs=FEATURES)


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


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    folder = copy(ORACLE / "checkpoints/tiny-28L", tmp_path / "model")
    tensors = read_tensors(folder)
    name = "model.visual.deepstack_merger_list.1.norm.bias"
    tensors[name] = tensors[name]._replace(data=np.full(tensors[name].shape, np.nan, np.float32).tobytes())
    write_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match=name):
        read(folder)


@pytest.mark.parametrize("grid", [(1, 4, 6), (1, 3, 8), (2, 4, 4), (0, 4, 6)])
def test_pixels_of_another_grid_are_our_own_mistake(t0: Tower, grid: Any) -> None:
    config, weights = t0
    host = HostTower(config, weights)
    pixels_mk = random_pixels(config, (1, 4, 4)) if grid != (1, 3, 8) else random_pixels(config, (1, 4, 6))
    with pytest.raises(InternalError, match="are not those of grid"):
        host.encode(pixels_mk, grid)
    with pytest.raises(InternalError, match="are not those of grids"):
        encode_all(host, pixels_mk, [grid, grid])


def test_each_part_of_a_block_is_read(t0: Tower) -> None:
    """A part that were left out would leave the features as they are."""
    config, weights = t0
    pixels_mk, grid = random_pixels(config, (1, 4, 4)), (1, 4, 4)
    before = HostTower(config, weights).encode(pixels_mk, grid).tokens_mn
    for block in range(config.depth):
        for name in BlockPart:
            for field in ("weight", "bias"):
                affine = weights.blocks[block][name]
                shaken = replace(affine, **{field: getattr(affine, field)[::-1]})
                blocks = list(weights.blocks)
                blocks[block] = blocks[block] | {name: shaken}
                changed = HostTower(config, replace(weights, blocks=tuple(blocks))).encode(pixels_mk, grid)
                assert not np.array_equal(changed.tokens_mn, before), f"block {block} {name} {field}"
