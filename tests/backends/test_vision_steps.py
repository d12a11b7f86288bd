"""The vision tower's steps against float64, in float32 and in bfloat16; sizes that no tile divides."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import Array
from kestrel_cuda.backends.vision import BFLOAT16, Affine, After, PatchPlaces
from kestrel_cuda.checkpoint.tensor_file import narrow, widen
from kestrel_cuda.config import VisionConfig
from kestrel_cuda.model.patch_positions import frame_places
from tests.backends.arrays import Doubles, Floats, assert_same_bits, normal, poison, rng
from tests.compare import assert_close

KINDS = [np.dtype(np.float32), BFLOAT16]
IDS = ["float32", "bfloat16"]
BOUND = {np.dtype(np.float32): 1e-12, BFLOAT16: 2e-5}
"""Normalized mean square error of rows; the second is rounding to 8 bits."""


@pytest.fixture(params=["", "without warpgroups"])
def feature(request: pytest.FixtureRequest, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with Hopper's mma of warpgroups once more as one that has none."""
    if request.param:
        if not getattr(backend, "has_warpgroup_mma", False):
            pytest.skip("it has no mma of warpgroups")
        monkeypatch.setattr(backend, "compute_capability", 80)


def vision(num_heads: int, head_dim: int, side: int = 7) -> VisionConfig:
    return VisionConfig(1, num_heads * head_dim, num_heads, 64, 64, 3, 16, 2, 2, side, (), 10000.0)


def skip_unless_served(backend: Backend, kind: DTypeLike) -> None:
    if backend.name == "cpu" and kind == BFLOAT16:
        pytest.skip("the CPU has float32 alone")


def put(backend: Backend, values: Floats, kind: DTypeLike) -> tuple[Array, Doubles]:
    """Rows on the device, and what they hold there."""
    if kind == BFLOAT16:
        return backend.to_device(narrow(values)), widen(narrow(values)).astype(np.float64)
    return backend.to_device(values), values.astype(np.float64)


def empty(backend: Backend, shape: tuple[int, ...], kind: DTypeLike) -> Array:
    return backend.to_device(np.full(shape, 0x7FC1, np.uint16) if kind == BFLOAT16 else poison(shape))


def read(backend: Backend, array: Array) -> Floats:
    return widen(backend.to_host(array))


def put_affine(backend: Backend, n: int, k: int, kind: DTypeLike, seed: int) -> tuple[Affine, Doubles, Doubles]:
    weight, exact_nk = put(backend, normal(rng(seed), n, k, scale=k**-0.5), kind)
    bias, exact_n = put(backend, normal(rng(seed, 1), n), np.float32)
    return Affine(weight, bias), exact_nk, exact_n


def gelu(x: Doubles, after: After) -> Doubles:
    if after is After.GELU_ERF:
        return np.asarray(x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2)
    if after is After.GELU_TANH:
        return np.asarray(x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2)
    return x


WARPGROUP_WIDTHS = {"tiles": 0, "warpgroups of 128": 128, "warpgroups of 192": 192}
"""Columns of a tile of Hopper's kernel, or another kernel."""


def take_linear(backend: Backend, monkeypatch: pytest.MonkeyPatch, linear: str) -> None:
    """Have the backend take that kernel for rows of bfloat16; skips on a card that has it not."""
    if not (width := WARPGROUP_WIDTHS[linear]):
        monkeypatch.setattr(backend, "compute_capability", 80)
        return
    if not backend.has_warpgroup_mma:
        pytest.skip("no mma of warpgroups on this card")
    from kestrel_cuda.backends import cuda_vision

    monkeypatch.setattr(cuda_vision, "WARPGROUP_WIDTHS", (width,))
    # Then a block has several tiles.
    monkeypatch.setattr(backend, "num_multiprocessors", 2)


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
class TestAffine:
    @pytest.fixture(autouse=True, params=WARPGROUP_WIDTHS)
    def linear(self, request: Any, backend: Backend, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        if backend.name == "cuda" and kind == BFLOAT16:
            take_linear(backend, monkeypatch, request.param)
        elif request.param != "tiles":
            pytest.skip("only rows of bfloat16 on a GPU have several kernels")

    @pytest.mark.parametrize(
        ("m", "n", "k"), [(1, 8, 8), (5, 24, 40), (129, 136, 1032), (300, 264, 72), (64, 512, 1536), (900, 584, 200)]
    )
    @pytest.mark.parametrize("after", After)
    def test_against_float64(self, backend: Backend, kind: Any, m: int, n: int, k: int, after: After) -> None:
        skip_unless_served(backend, kind)
        x, exact_mk = put(backend, normal(rng(m, k), m, k), kind)
        affine, exact_nk, exact_n = put_affine(backend, n, k, kind, seed=n)
        before = normal(rng(3), m, n)
        out_kind = np.dtype(np.float32) if after in (After.ADD, After.NOTHING) else kind
        out = backend.to_device(before) if after is After.ADD else empty(backend, (m, n), out_kind)
        backend.affine(x, affine, out, after)
        expected = gelu(exact_mk @ exact_nk.T + exact_n, after) + (before if after is After.ADD else 0)
        bound = 5e-12 if out_kind == np.float32 else BOUND[kind]
        assert_close(read(backend, out), expected, max_nmse=bound, what=f"{m} x {n} x {k} {after.name}")

    def test_rows_of_bfloat16_without_anything_after(self, backend: Backend, kind: Any) -> None:
        skip_unless_served(backend, kind)
        x, exact_mk = put(backend, normal(rng(1), 70, 64), kind)
        affine, exact_nk, exact_n = put_affine(backend, 192, 64, kind, seed=2)
        out = empty(backend, (70, 192), kind)
        backend.affine(x, affine, out)
        assert_close(read(backend, out), exact_mk @ exact_nk.T + exact_n, max_nmse=BOUND[kind])

    def test_a_row_has_the_same_bits_in_every_batch(self, backend: Backend, kind: Any) -> None:
        if backend.name == "cpu":
            pytest.skip("the CPU's float32 products round differently in batches of another size")
        x, _ = put(backend, normal(rng(4), 200, 104), kind)
        affine, _, _ = put_affine(backend, 72, 104, kind, seed=5)
        together, alone = empty(backend, (200, 72), np.float32), empty(backend, (1, 72), np.float32)
        backend.affine(x, affine, together)
        for row in (0, 63, 64, 127, 128, 199):
            backend.affine(x[row : row + 1], affine, alone)
            assert_same_bits(backend.to_host(alone), backend.to_host(together)[row : row + 1], f"row {row} alone")

    def test_what_is_not_a_number_stays_in_its_row(self, backend: Backend, kind: Any) -> None:
        skip_unless_served(backend, kind)
        values = normal(rng(6), 40, 64)
        values[7, 3] = np.nan
        x, _ = put(backend, values, kind)
        affine, _, _ = put_affine(backend, 64, 64, kind, seed=7)
        out = empty(backend, (40, 64), np.float32)
        backend.affine(x, affine, out)
        assert (np.isnan(read(backend, out)).any(axis=1) == (np.arange(40) == 7)).all()


@pytest.mark.cuda
@pytest.mark.parametrize("k", [72, 1152, 4304])
def test_tiles_of_both_widths_have_the_same_bits(
    cuda_backend: Backend, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """The backend takes a width by the number of rows, and a row's bits never depend on that."""
    x, _ = put(cuda_backend, normal(rng(k), 400, k), BFLOAT16)
    affine, _, _ = put_affine(cuda_backend, 776, k, BFLOAT16, seed=8)
    found = []
    for linear, width in WARPGROUP_WIDTHS.items():
        if width:
            take_linear(cuda_backend, monkeypatch, linear)
            out = empty(cuda_backend, (400, 776), np.float32)
            cuda_backend.affine(x, affine, out)
            found.append(cuda_backend.to_host(out))
    assert_same_bits(*found)


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@pytest.mark.parametrize("k", [8, 24, 100, 1024, 1152, 4608])
def test_layer_norm(backend: Backend, kind: Any, k: int) -> None:
    skip_unless_served(backend, kind)
    h = normal(rng(k), 19, k, scale=3) + np.float32(5)
    weights, bias = 1 + normal(rng(k, 1), k), normal(rng(k, 2), k)
    out = empty(backend, (19, k), kind)
    backend.layer_norm(backend.to_device(h), Affine(backend.to_device(weights), backend.to_device(bias)), out)
    wide = h.astype(np.float64)
    normed = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    assert_close(read(backend, out), normed * weights + bias, max_nmse=BOUND[kind])


@pytest.mark.parametrize("num_frames", [1, 2])
def test_pixels_become_their_channels_values_in_every_frame(backend: Backend, num_frames: int) -> None:
    m, area = 19, 30
    codes = rng(num_frames).integers(0, 256, (m, 3, num_frames, area), np.uint8)
    values_cv = normal(rng(9), 3, 256)
    values_cv[:, :6] = [1.0, 1.00390625, 1.01171875, -1.00390625, -0.0, 1e-40]
    expected = np.stack([values_cv[channel][codes[:, channel]] for channel in range(3)], axis=1)
    expected = np.broadcast_to(expected, (m, 3, 2, area)).reshape(m, -1)
    for kind in KINDS[: 1 if backend.name == "cpu" else 2]:
        out = empty(backend, (m, 6 * area), kind)
        on_device = (backend.to_device(array) for array in (codes.reshape(m, -1), values_cv))
        backend.put_pixels(out, *on_device)
        nearest_even = widen(narrow(expected)) if kind == BFLOAT16 else expected
        found = read(backend, out)
        tiny = np.abs(nearest_even) < 1e-38  # zeros on a GPU
        assert_same_bits(np.where(tiny, 0, found), np.where(tiny, 0, nearest_even))


def places_on(backend: Backend, config: VisionConfig, rows: int, columns: int) -> PatchPlaces:
    return PatchPlaces(*(backend.to_device(array) for array in frame_places(config, rows, columns).arrays()))


def test_positions_are_added_to_every_frame(backend: Backend, cpu_backend: Backend) -> None:
    config = vision(3, 20)
    table, h = normal(rng(1), 49, 60), normal(rng(2), 3 * 48, 60)
    found = []
    for each in (backend, cpu_backend):
        h_mn = each.to_device(h.copy())
        each.add_patch_positions(h_mn, each.to_device(table), places_on(each, config, 6, 8))
        found.append(each.to_host(h_mn))
    assert_same_bits(*found)
    added = (found[0] - h).reshape(3, 48, 60)
    assert_close(added[0], added[2], max_abs=1e-5)
    assert_close(added[0][0], table[0], max_abs=1e-5)


def exact_attention(qkv: Doubles, num_heads: int, places: PatchPlaces) -> Doubles:
    """Over one frame, by complex numbers."""
    m, d = len(qkv), qkv.shape[1] // 3 // num_heads
    q, k, v = qkv.reshape(m, 3, num_heads, d).transpose(1, 2, 0, 3)
    turns = (places.cos_pd + 1j * places.sin_pd)[places.places_m2].reshape(m, d // 2)
    q, k = ((x[..., : d // 2] + 1j * x[..., d // 2 :]) * turns for x in (q, k))
    scores = (q @ k.conj().swapaxes(-1, -2)).real / math.sqrt(d)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray((p / p.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(m, -1))


@pytest.mark.usefixtures("feature")
@pytest.mark.parametrize("kind", KINDS, ids=IDS)
class TestAttention:
    @pytest.mark.parametrize("head_dim", [16, 32, 64, 72, 80, 128])
    @pytest.mark.parametrize(
        ("num_frames", "rows", "columns"), [(1, 2, 2), (1, 10, 14), (3, 8, 8), (2, 6, 22), (1, 22, 26)]
    )
    def test_against_float64(
        self, backend: Backend, kind: Any, head_dim: int, num_frames: int, rows: int, columns: int
    ) -> None:
        skip_unless_served(backend, kind)
        num_heads, frame = 3, rows * columns
        values = normal(rng(head_dim, frame), num_frames * frame, 3 * num_heads * head_dim, scale=1.5)
        qkv, exact_mn = put(backend, values, kind)
        out = empty(backend, (num_frames * frame, num_heads * head_dim), kind)
        config = vision(num_heads, head_dim)
        backend.attend_patches(qkv, num_heads, places_on(backend, config, rows, columns), out)
        on_host = frame_places(config, rows, columns)
        expected = [exact_attention(part, num_heads, on_host) for part in np.split(exact_mn, num_frames)]
        # In bfloat16 rotated queries and keys, and weights, are rounded once more.
        bound = 1e-11 if kind == np.float32 else 2e-4
        assert_close(read(backend, out), np.concatenate(expected), max_nmse=bound)

    def test_scores_far_apart_and_a_maximum_that_grows(self, backend: Backend, kind: Any) -> None:
        """Later keys outweigh earlier ones by far more than a float holds."""
        skip_unless_served(backend, kind)
        head_dim, frame = 64, 4 * 70
        values = np.zeros((frame, 3 * head_dim), np.float32)
        values[:, 0] = 100.0
        values[:, head_dim] = np.arange(frame)
        values[:, 2 * head_dim :] = normal(rng(1), frame, head_dim)
        config = vision(1, head_dim)
        still = frame_places(config, 4, 70)
        turned = PatchPlaces(*(a.copy() for a in still.arrays()))
        turned.cos_pd[...], turned.sin_pd[...] = 1.0, 0.0
        qkv, exact_mn = put(backend, values, kind)
        out = empty(backend, (frame, head_dim), kind)
        backend.attend_patches(qkv, 1, PatchPlaces(*(backend.to_device(a) for a in turned.arrays())), out)
        assert_close(read(backend, out), exact_attention(exact_mn, 1, turned), max_nmse=2e-4)

    def test_infinite_scores_are_no_number(self, backend: Backend, kind: Any) -> None:
        skip_unless_served(backend, kind)
        values = normal(rng(2), 16, 3 * 32)
        values[:, :32] = values[:, 32:64] = 3e38
        qkv, _ = put(backend, values, kind)
        out = empty(backend, (16, 32), kind)
        backend.attend_patches(qkv, 1, places_on(backend, vision(1, 32), 4, 4), out)
        assert not np.isfinite(read(backend, out)).any()


def bits_of(array: NDArray[Any]) -> bytes:
    return array.tobytes()


@pytest.mark.usefixtures("feature")
@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@pytest.mark.parametrize("head_dim", [32, 64, 72])
def test_a_frame_does_not_depend_on_its_neighbours(backend: Backend, kind: Any, head_dim: int) -> None:
    skip_unless_served(backend, kind)
    config = vision(2, head_dim)
    values = normal(rng(3), 3 * 80, 3 * 2 * head_dim)
    together, _ = put(backend, values, kind)
    out = empty(backend, (3 * 80, 2 * head_dim), kind)
    backend.attend_patches(together, 2, places_on(backend, config, 8, 10), out)
    alone, _ = put(backend, values[80:160], kind)
    out_alone = empty(backend, (80, 2 * head_dim), kind)
    backend.attend_patches(alone, 2, places_on(backend, config, 8, 10), out_alone)
    assert bits_of(backend.to_host(out)[80:160]) == bits_of(backend.to_host(out_alone))
