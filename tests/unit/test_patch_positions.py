"""Order, learned positions and rotation of patches against float64 and by hand. The tower itself is test_vision's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from kestrel_cuda.backends.cpu_vision import learned_positions, patch_angles
from kestrel_cuda.model.patch_positions import frame_places, patch_places
from tests.checkpoints import RELEASED_TOWER as RELEASED
from tests.compare import assert_close

GRIDS = [(2, 2), (2, 24), (4, 6), (6, 10), (14, 22), (16, 44), (48, 48), (46, 50), (94, 98), (122, 162), (2, 228)]


def places(num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    """Row and column by patch, spelled out."""
    return [
        (row + down, column + across)
        for row in range(0, num_rows, 2)
        for column in range(0, num_columns, 2)
        for down in (0, 1)
        for across in (0, 1)
    ]


def exact_positions(table: NDArray[np.float64], side: int, num_rows: int, num_columns: int) -> NDArray[np.float64]:
    """Linear along each axis in float64, on places that are exact fractions."""

    def weights(size: int) -> NDArray[np.float64]:
        """[size, side]: how much of each entry each place takes."""
        w = np.zeros((size, side))
        for index in range(size):
            first, rest = divmod(index * (side - 1), max(size - 1, 1))
            share = rest / max(size - 1, 1)
            w[index, first] = 1 - share
            if share:
                w[index, first + 1] = share
        return w

    grid = table.reshape(side, side, -1)
    full = np.einsum("ra,cb,abn->rcn", weights(num_rows), weights(num_columns), grid, optimize=True)
    return np.array([full[place] for place in places(num_rows, num_columns)])


@pytest.mark.parametrize("grid", GRIDS)
def test_patches_of_a_token_are_neighbours(grid: tuple[int, int]) -> None:
    rows, columns = patch_places(RELEASED, *grid)
    assert list(zip(rows, columns, strict=True)) == places(*grid)


def test_other_merge_sizes() -> None:
    rows, columns = patch_places(replace(RELEASED, merge_size=1), 2, 3)
    assert (rows.tolist(), columns.tolist()) == ([0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2])
    rows, columns = patch_places(replace(RELEASED, merge_size=3), 3, 6)
    assert rows.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2] * 2
    assert columns.tolist() == [0, 1, 2] * 3 + [3, 4, 5] * 3


@pytest.mark.parametrize("side", [1, 5, 8, 48])
@pytest.mark.parametrize("grid", GRIDS)
def test_learned_positions_are_bilinear_with_corners_aligned(grid: tuple[int, int], side: int) -> None:
    table = np.random.default_rng(side).standard_normal((side * side, 3)).astype(np.float32)
    found = learned_positions(table, frame_places(replace(RELEASED, position_side=side), *grid))
    assert found.dtype == np.float32
    exact = exact_positions(table.astype(np.float64), side, *grid)
    # A place has 24 bits, of which the 6 above the point are not left for the share: 2^-19 of a step of the table.
    assert_close(found, exact, max_abs=3e-5, what=f"{grid} from {side}")


def test_a_grid_of_the_tables_size_takes_its_entries() -> None:
    table = np.random.default_rng(0).standard_normal((64, 5)).astype(np.float32)
    found = learned_positions(table, frame_places(replace(RELEASED, position_side=8), 8, 8))
    assert np.array_equal(found, table.reshape(8, 8, 5)[tuple(np.array(places(8, 8)).T)])


def test_case_d28_interpolation_of_the_position_table() -> None:
    """Entry (r, c) holds r and c, so that what comes out is where it was taken from."""
    rows, columns = np.indices((48, 48)).reshape(2, -1).astype(np.float32)
    table = np.stack([rows, columns, np.zeros_like(rows)], axis=1)
    found = dict(zip(places(16, 44), learned_positions(table, frame_places(RELEASED, 16, 44)), strict=True))
    assert found[0, 0].tolist() == [0, 0, 0]
    assert found[15, 43].tolist() == [47, 47, 0]
    assert_close(found[0, 1], [0, 47 / 43, 0], max_abs=1e-6)
    assert_close(found[1, 0], [47 / 15, 0, 0], max_abs=1e-6)
    for (row, column), value in found.items():
        assert_close(value, [row * 47 / 15, column * 47 / 43, 0], max_abs=1e-5, what=f"{row}, {column}")


@pytest.mark.parametrize("grid", [(2, 2), (6, 10), (16, 44), (122, 162)])
@pytest.mark.parametrize("hidden_size", [1024, 1152])
def test_rotation_is_by_row_then_by_column(grid: tuple[int, int], hidden_size: int) -> None:
    config = replace(RELEASED, hidden_size=hidden_size)
    cos, sin = patch_angles(frame_places(config, *grid))
    assert cos.dtype == sin.dtype == np.float32
    num = config.head_dim // 4
    inverse = 10000.0 ** (-2 * np.arange(num) / (config.head_dim // 2))
    angles = np.array([[*(row * inverse), *(column * inverse)] for row, column in places(*grid)])
    assert cos.shape == angles.shape == (grid[0] * grid[1], config.head_dim // 2)
    assert_close(cos, np.cos(angles), max_abs=2e-5, what="cos")
    assert_close(sin, np.sin(angles), max_abs=2e-5, what="sin")


def test_rotation_base_is_the_checkpoints() -> None:
    cos, _ = patch_angles(frame_places(replace(RELEASED, rope_theta=100.0), 4, 4))
    assert cos[2, 1] == pytest.approx(np.cos(100 ** (-2 / 36)), abs=1e-6)
