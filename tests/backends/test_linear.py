"""Linears of every weight kind against float64, every written element checked; on the GPU, a row's bits for every M."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.quant.grouped import GroupScheme, quantize_activations
from kestrel_cuda.quant.packed import Element, round_up
from tests.backends.arrays import (
    Doubles,
    Floats,
    HostActivation,
    HostWeight,
    assert_poison_outside,
    assert_same_bits,
    float_weight,
    grouped_weight,
    normal,
    poison,
    poisoned,
    rng,
    rows_of,
)
from tests.compare import assert_close

SCHEMES = {"int8": GroupScheme(8, 32), "int4": GroupScheme(4, 32), "g256": GroupScheme(8, 256)}
FLOATS = {"bf16": Element.BF16, "f16": Element.F16, "f32": Element.F32}
KINDS = [*SCHEMES, *FLOATS]

# Float32 sums of up to 384 groups: a row's error has a standard deviation of about 5e-7 of the row's size.
MAX_NMSE = 1e-12
MAX_ERROR_OF_RMS = 2e-5
MAX_NMSE_BETWEEN_BACKENDS = 1e-9

NUM_ROWS = [*range(1, 18), 64]
SHAPES = [(1, 32), (3, 96), (4, 128), (33, 160), (31, 1), (100, 33), (130, 544), (36, 2048), (37, 2080), (70, 12288)]
SHAPES_OF_256 = [(1, 256), (3, 512), (33, 768), (130, 2048), (37, 2304), (70, 12288)]


def shapes(kind: str) -> list[tuple[int, int]]:
    """(n, k): k around the pieces of 128 and the rounds of 16 pieces, n around tiles of 32 and 128 columns."""
    return SHAPES_OF_256 if kind == "g256" else SHAPES


CASES = [pytest.param(kind, n, k, id=f"{kind}-{n}x{k}") for kind in KINDS for n, k in shapes(kind)]


def random_weight(kind: str, n: int, k: int) -> HostWeight:
    """Codes over the whole range, scales of a few orders of magnitude; int4 scales of both signs."""
    random = rng(1, n, k)
    if kind in FLOATS:
        return float_weight(normal(random, n, k), FLOATS[kind])
    scheme = SCHEMES[kind]
    k_padded = round_up(k, scheme.group_size)
    low, high = (-127, 127) if scheme.bits == 8 else (-8, 7)
    codes = random.integers(low, high, (n, k_padded), np.int8, endpoint=True)
    codes[:, k:] = 0
    scales = np.exp2(random.uniform(-8, 1, (n, k_padded // scheme.group_size)))
    scales *= random.choice([-1, 1], scales.shape) if scheme.bits == 4 else 1
    return grouped_weight(codes, scales.astype(np.float16), scheme, k)


def random_activation(kind: str, m: int, k: int) -> HostActivation:
    x = normal(rng(2, m, k), m, k)
    return HostActivation(k, x, None, None) if kind in FLOATS else HostActivation(k, None, *quantize_activations(x))


def product(
    backend: Backend,
    x: HostActivation,
    weight: HostWeight,
    num_rows: int,
    *,
    column: int = 0,
    residual_mn: Floats | None = None,
) -> Floats:
    """The rows written, after a check that nothing else was; `residual_mn` is added to when given."""
    n = weight.geometry.num_outputs
    before = poison((num_rows + 2, column + n + 5))
    target = (slice(num_rows), slice(column, column + n))
    if residual_mn is not None:
        before[target] = residual_mn
    out = backend.to_device(before.copy())
    device_x, device_weight = x.on(backend), weight.on(backend)
    backend.linear(device_x, device_weight, out, num_rows, column=column, add=residual_mn is not None)
    after = backend.to_host(out)
    assert_poison_outside(after, target, "output")
    return after[target]


def assert_near(actual: Floats, expected: Doubles, what: str) -> None:
    rms = float(np.sqrt(np.square(expected).mean()))
    assert_close(actual, expected, max_nmse=MAX_NMSE, max_abs=MAX_ERROR_OF_RMS * rms, what=what)


@pytest.mark.parametrize(("kind", "n", "k"), CASES)
def test_every_number_of_rows(backend: Backend, cpu_backend: Backend, kind: str, n: int, k: int) -> None:
    x, weight = random_activation(kind, max(NUM_ROWS), k), random_weight(kind, n, k)
    expected = x.exact_mk @ weight.values_nk.T
    on_cpu = product(cpu_backend, x, weight, max(NUM_ROWS)) if backend.name != "cpu" else None
    for m in NUM_ROWS:
        actual = product(backend, x, weight, m)
        assert_near(actual, expected[:m], f"{m} rows")
        if on_cpu is not None:
            assert_close(actual, on_cpu[:m], max_nmse=MAX_NMSE_BETWEEN_BACKENDS, what=f"{m} rows against the CPU")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 17, 65])
def test_columns_and_residual(backend: Backend, kind: str, m: int) -> None:
    n, k = 44, 256
    x, weight = random_activation(kind, m, k), random_weight(kind, n, k)
    expected = x.exact_mk @ weight.values_nk.T
    residual = normal(rng(3, m), m, n, scale=float(np.abs(expected).mean()))
    for column in (0, 4, 132):
        assert_near(product(backend, x, weight, m, column=column), expected, f"at column {column}")
        added = product(backend, x, weight, m, column=column, residual_mn=residual)
        assert_near(added, residual + expected, f"added at column {column}")


@pytest.mark.parametrize("kind", list(SCHEMES))
@pytest.mark.parametrize("m", [1, 2, 4, 17])
@pytest.mark.parametrize("k", [256, 2304, 12288])
def test_maximal_codes_are_exact(backend: Backend, kind: str, m: int, k: int) -> None:
    """With one power of two for a scale, every partial sum fits float32: nothing may be off at all."""
    scheme, n = SCHEMES[kind], 8
    top, bottom = (127, -127) if scheme.bits == 8 else (7, -8)
    codes = np.full((n, k), top, np.int8)
    codes[1::4] = bottom
    codes[2::4, ::2] = bottom
    codes[3::4, k // 2 :] = bottom
    scales = np.full((n, k // scheme.group_size), 2.0**-7, np.float16)
    weight = grouped_weight(codes, scales, scheme, k)
    x_codes = np.full((m, k), 127, np.int8)
    x_codes[1::2] = -127
    x = HostActivation(k, None, x_codes, np.full((m, k // 32), 2.0**-5, np.float32))
    expected = x.exact_mk @ weight.values_nk.T
    assert (expected == expected.astype(np.float32)).all()
    assert (product(backend, x, weight, m) == expected).all()


@pytest.mark.parametrize("kind", list(SCHEMES))
@pytest.mark.parametrize("m", [1, 2, 4, 9])
def test_zero_groups_add_nothing(backend: Backend, kind: str, m: int) -> None:
    scheme, n, k = SCHEMES[kind], 20, 768
    random = rng(4, m)
    codes = random.integers(-8, 8, (n, k), np.int8)
    scales = np.exp2(random.uniform(-4, 0, (n, k // scheme.group_size))).astype(np.float16)
    scales[::2, ::2] = 0  # lost to float16, codes and all
    zero = np.repeat(scales == 0, scheme.group_size, axis=1)
    codes[4::4][zero[4::4]] = 0
    codes[7], scales[7] = 0, 0
    x_codes, x_scales = quantize_activations(normal(random, m, k))
    x_codes[:, 32:64], x_scales[:, 1] = 0, 0
    x_codes[-1], x_scales[-1] = 0, 0
    weight, x = grouped_weight(codes, scales, scheme, k), HostActivation(k, None, x_codes, x_scales)
    expected = x.exact_mk @ weight.values_nk.T
    residual = normal(random, m, n)
    actual = product(backend, x, weight, m)
    assert not actual[:, 7].any()
    assert not actual[-1].any()
    if m > 1:
        assert_near(actual, expected, "some groups zero")
    added = product(backend, x, weight, m, residual_mn=residual)
    assert_same_bits(added[:, 7], residual[:, 7], "a column of zeros added")
    assert_same_bits(added[-1], residual[-1], "a row of zeros added")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [2, 3, 4, 9, 70])
def test_a_nan_stays_in_its_row_and_is_not_lost(backend: Backend, kind: str, m: int) -> None:
    n, k = 36, 256
    x, weight = random_activation(kind, m, k), random_weight(kind, n, k)
    clean = product(backend, x, weight, m)
    bad = m // 2
    if x.values_mk is not None:
        x.values_mk[bad, 200] = np.nan
    else:
        assert x.scales_mg is not None
        x.scales_mg[bad, -1] = np.nan
    dirty = product(backend, x, weight, m)
    assert np.isnan(dirty[bad]).all()
    others = np.arange(m) != bad
    assert_close(dirty[others], clean[others], max_abs=0, what="rows beside it")


def test_scales_far_apart(backend: Backend) -> None:
    """Weight scales from the smallest float16 to large ones, activation scales over sixty powers of two."""
    m, n, k = 6, 40, 544
    random = rng(5)
    scales = np.exp2(random.integers(-24, 15, (n, k // 32))).astype(np.float16)
    codes = random.integers(-127, 128, (n, k), np.int8)
    x_codes = random.integers(-127, 128, (m, k), np.int8)
    x_scales = np.exp2(random.uniform(-40, 20, (m, k // 32))).astype(np.float32)
    weight = grouped_weight(codes, scales, SCHEMES["int8"], k)
    x = HostActivation(k, None, x_codes, x_scales)
    actual, expected = product(backend, x, weight, m), x.exact_mk @ weight.values_nk.T
    # By element: each against the size of its own terms.
    size = np.abs(x.exact_mk) @ np.abs(weight.values_nk.T)
    assert (np.abs(actual - expected) <= 2.0**-20 * size).all()


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prefill(cuda_backend: Backend, cpu_backend: Backend, kind: str) -> None:
    m, n, k = 2048, 200, 768
    x, weight = random_activation(kind, m, k), random_weight(kind, n, k)
    actual = product(cuda_backend, x, weight, m)
    assert_near(actual, x.exact_mk @ weight.values_nk.T, "2048 rows")
    on_cpu = product(cpu_backend, x, weight, m)
    assert_close(actual, on_cpu, max_nmse=MAX_NMSE_BETWEEN_BACKENDS, what="2048 rows against the CPU")


TILE_ROWS = (5, 31, 63, 64, 65, 127, 128, 129, 300)
# Pieces that are not whole, groups that divide by four and not; columns around multiples of 2, 4, 8, 64 and 128.
TILE_SHAPES = [(1, 32), (36, 96), (63, 128), (70, 288), (129, 544), (130, 640), (257, 1056), (260, 2048)]
TILE_SHAPES_OF_256 = [(44, 256), (129, 768), (260, 2304)]
# Rows of packed columns in multiples of eight, which warpgroups sum up, and one that they leave to the tiles.
WARPGROUP_SHAPES = [
    (7, 32),
    (63, 128),
    (70, 288),
    (128, 96),
    (133, 160),
    (134, 544),
    (262, 1056),
    (264, 2048),
    (129, 640),
]
WARPGROUP_SHAPES_OF_256 = [(48, 256), (133, 768), (264, 2304), (129, 512)]
TILES = {
    "wide": (1, None, 80),
    "two stages": (1, 99 << 10, 80),
    "small": (1 << 20, None, 80),
    "warpgroups": (1, None, 90),
}
"""Multiprocessors, shared memory of a block (None: the card's own) and compute capability with which the backend takes
each."""


def tile_shapes(tile: str, kind: str) -> list[tuple[int, int]]:
    if tile == "warpgroups":
        return WARPGROUP_SHAPES_OF_256 if kind == "g256" else WARPGROUP_SHAPES
    return TILE_SHAPES_OF_256 if kind == "g256" else TILE_SHAPES


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("tile", "kind", "n", "k"),
    [(tile, kind, n, k) for tile in TILES for kind in SCHEMES for n, k in tile_shapes(tile, kind)],
)
def test_edges_of_tiles(
    cuda_backend: Backend, monkeypatch: pytest.MonkeyPatch, tile: str, kind: str, n: int, k: int
) -> None:
    """Every row as it is alone, and nothing written beside; set or added, at columns of every alignment."""
    num_multiprocessors, most_shared_bytes, capability = TILES[tile]
    if tile == "warpgroups" and cuda_backend.compute_capability != capability:
        pytest.skip("no mma of warpgroups on this card")
    monkeypatch.setattr(cuda_backend, "compute_capability", capability)
    monkeypatch.setattr(cuda_backend, "num_multiprocessors", num_multiprocessors)
    if most_shared_bytes is not None:
        monkeypatch.setattr(cuda_backend, "most_shared_bytes", most_shared_bytes)
    num_rows = max(TILE_ROWS)
    x, weight = random_activation(kind, num_rows, k).on(cuda_backend), random_weight(kind, n, k).on(cuda_backend)
    for column, right, add in ((0, 0, False), (0, 1, True), (1, 4, False), (2, 2 + n % 2, True), (4, 4, True)):
        before = poison((num_rows, column + n + right))
        if add:
            before[:, column : column + n] = normal(rng(7, n, k), num_rows, n, scale=10)
        out = cuda_backend.to_device(before)
        for row in range(num_rows):
            cuda_backend.linear(rows_of(x, row, 1), weight, out[row : row + 1], 1, column=column, add=add)
        alone = cuda_backend.to_host(out)
        assert np.isfinite(alone[:, column : column + n]).all()
        for m in TILE_ROWS:
            cuda_backend.write(out, before)
            cuda_backend.linear(x, weight, out, m, column=column, add=add)
            expected = np.vstack([alone[:m], before[m:]])
            assert_same_bits(cuda_backend.to_host(out), expected, f"{m} rows at column {column}")


def windows(num_rows: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of every run of consecutive rows of these lengths: each row at each position of each."""
    for m in (2, 3, 4, 5, 8, 16, 17, 64, 100):
        for first in range(num_rows - m + 1):
            yield first, m


@pytest.mark.cuda
@pytest.mark.parametrize("add", [False, True], ids=["set", "add"])
@pytest.mark.parametrize(
    ("kind", "k"), [(kind, k) for kind in KINDS for k in ((256, 2304) if kind == "g256" else (33, 160, 2080))]
)
def test_a_row_has_the_same_bits_in_every_batch(cuda_backend: Backend, kind: str, k: int, add: bool) -> None:
    num_rows, n, column = 140, 130, 4
    random = rng(6, k)
    x, weight = random_activation(kind, num_rows, k).on(cuda_backend), random_weight(kind, n, k).on(cuda_backend)
    before = poison((num_rows, column + n + 2))
    target = slice(column, column + n)
    if add:
        before[:, target] = normal(random, num_rows, n, scale=10)
    out = poisoned(cuda_backend, before.shape)

    def rows(first: int, m: int) -> Floats:
        cuda_backend.write(out[:m], before[first : first + m])
        cuda_backend.linear(rows_of(x, first, m), weight, out, m, column=column, add=add)
        return cuda_backend.to_host(out[:m])

    alone = np.vstack([rows(row, 1) for row in range(num_rows)])
    assert np.isfinite(alone[:, target]).all()
    for first, m in windows(num_rows):
        assert_same_bits(rows(first, m), alone[first : first + m], f"rows {first} .. {first + m - 1} at once")
