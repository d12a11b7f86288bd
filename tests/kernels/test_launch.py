"""A launch is handed what the kernel's signature says, or is refused by the name of the parameter."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kestrel_cuda.errors import InternalError
from kestrel_cuda.kernels import launch
from tests.kernel_sources import FakeRawKernel

SIGNATURE = launch.Signature(
    "scale_rows",
    (
        launch.Parameter("x_mk", "float", True),
        launch.Parameter("m", "int", False),
        launch.Parameter("words", "u32", True),
        launch.Parameter("halves", "u16", True),
        launch.Parameter("raw", "void", True),
        launch.Parameter("eps", "float", False),
        launch.Parameter("num_bytes", "i64", False),
        launch.Parameter("x_map", "CopyMap", False),
    ),
)


class TestArguments:
    def good(self) -> dict[str, Any]:
        """In another order than the signature's."""
        return {
            "num_bytes": 1 << 40, "eps": 1e-6, "m": 3, "x_mk": np.zeros(4, np.float32), "raw": np.zeros(4, np.int64),
            "words": np.zeros(4, np.uint32), "halves": np.zeros(4, np.uint16), "x_map": np.zeros(1, launch.COPY_MAP),
        }  # fmt: skip

    def launched(self, arguments: dict[str, Any], **options: Any) -> FakeRawKernel:
        raw = FakeRawKernel()
        launch.Kernel(SIGNATURE, raw, "stream")((1, 2), (32,), **options, **arguments)
        return raw

    def test_they_are_handed_on_in_the_signatures_order(self) -> None:
        arguments = self.good()
        ((grid, block, values, shared_bytes, stream),) = self.launched(arguments).launches
        assert (grid, block, shared_bytes, stream) == ((1, 2), (32,), 0, "stream")
        names = [parameter.name for parameter in SIGNATURE.parameters]
        assert all(value is arguments[name] for name, value in zip(names, values, strict=True))

    def test_the_driver_finds_each_where_it_is_told_in_its_width(self) -> None:
        """Twice, since the memory is the same; the second time other values."""
        seen: list[list[bytes]] = []

        def read(function: int, *shape_and_places: int) -> None:
            *shape, shared_bytes, stream, places, extra = shape_and_places
            assert (function, shape, shared_bytes, stream, extra) == (17, [1, 2, 1, 32, 1, 1], 96, 23, 0)
            at = (ctypes.c_void_p * len(widths)).from_address(places)
            seen.append([ctypes.string_at(place, width) for place, width in zip(at, widths, strict=True)])

        widths = [8, 4, 8, 8, 8, 4, 8, 128]
        hand = launch.DriverLaunch(SIGNATURE, 17, read)
        for number in (3, -5):
            pointers = [SimpleNamespace(data=SimpleNamespace(ptr=(1 << 47) + i + number)) for i in range(4)]
            copy_map = np.arange(16, dtype=np.uint64).view(launch.COPY_MAP)
            values = [pointers[0], number, *pointers[1:], 1e-6 * number, number << 40, copy_map]
            hand((1, 2), (32,), values, 96, SimpleNamespace(ptr=23))
            expected = [np.uint64(pointer.data.ptr).tobytes() for pointer in pointers]
            expected.insert(1, np.int32(number).tobytes())
            expected += [np.float32(1e-6 * number).tobytes(), np.int64(number << 40).tobytes(), copy_map.tobytes()]
            assert seen.pop() == expected

    @pytest.mark.parametrize("name", [parameter.name for parameter in SIGNATURE.parameters])
    def test_a_missing_one_is_named(self, name: str) -> None:
        arguments = self.good()
        del arguments[name]
        with pytest.raises(InternalError, match=f"scale_rows: no argument for {name}"):
            self.launched(arguments)

    def test_one_too_many_is_named(self) -> None:
        with pytest.raises(InternalError, match="scale_rows takes no ldo"):
            self.launched(self.good() | {"ldo": 4})

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [("x_mk", np.float64), ("x_mk", np.float16), ("x_mk", np.int32), ("words", np.int32), ("words", np.uint8),
         ("words", np.float32), ("halves", np.int16), ("halves", np.float32), ("halves", np.int8)],
    )  # fmt: skip
    def test_an_array_of_another_type_is_refused(self, name: str, dtype: type[np.generic]) -> None:
        with pytest.raises(InternalError, match=f"scale_rows: {name} takes an array of"):
            self.launched(self.good() | {name: np.zeros(4, dtype)})

    @pytest.mark.parametrize(("name", "dtype"), [("words", np.int8), ("halves", np.float16)])
    def test_arrays_of_the_same_bits_are_taken(self, name: str, dtype: type[np.generic]) -> None:
        assert self.launched(self.good() | {name: np.zeros(4, dtype)}).launches

    @pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float16, np.float32])
    def test_void_takes_any_array(self, dtype: type[np.generic]) -> None:
        assert self.launched(self.good() | {"raw": np.zeros(4, dtype)}).launches

    @pytest.mark.parametrize("name", ["x_mk", "words", "raw"])
    @pytest.mark.parametrize("value", [None, 0, 1.0, [1, 2], np.float32(1), np.uint32(1)])
    def test_what_is_not_an_array_is_refused(self, name: str, value: object) -> None:
        with pytest.raises(InternalError, match=f"scale_rows: {name} takes an array"):
            self.launched(self.good() | {name: value})

    @pytest.mark.parametrize(
        ("name", "value"),
        [("m", 1.5), ("m", "3"), ("m", None), ("m", np.zeros(2, np.int32)), ("m", 1 << 31), ("num_bytes", 1.0),
         ("num_bytes", 1 << 63), ("eps", None), ("eps", np.zeros(1, np.float32)), ("eps", "1")],
    )  # fmt: skip
    def test_what_is_not_such_a_number_is_refused(self, name: str, value: object) -> None:
        with pytest.raises(InternalError, match=f"scale_rows: {name} takes"):
            self.launched(self.good() | {name: value})

    @pytest.mark.parametrize(("name", "value"), [("m", np.int64(5)), ("eps", 1), ("eps", np.float64(0.5)), ("m", True)])
    def test_numpys_numbers_are_numbers(self, name: str, value: object) -> None:
        assert self.launched(self.good() | {name: value}).launches

    @pytest.mark.parametrize(
        "value",
        [None, 0, 1 << 40, b"\0" * 128, np.zeros(2, launch.COPY_MAP), np.zeros(0, launch.COPY_MAP),
         np.zeros(16, np.uint64), np.zeros(128, np.uint8), np.zeros(1, np.uint64), np.zeros(1, "V128")],
    )  # fmt: skip
    def test_what_is_not_one_copy_map_is_refused(self, value: object) -> None:
        with pytest.raises(InternalError, match="scale_rows: x_map takes one CopyMap, not"):
            self.launched(self.good() | {"x_map": value})

    @pytest.mark.parametrize("option", ["dependent", "all_at_once"])
    def test_a_special_launch_takes_no_copy_map(self, option: str) -> None:
        with pytest.raises(InternalError, match="scale_rows takes copy maps, which"):
            self.launched(self.good(), **{option: True})

    def test_shared_memory_over_48_kib_is_asked_for_and_never_less_again(self) -> None:
        raw = FakeRawKernel()
        kernel = launch.Kernel(SIGNATURE, raw, None)
        asked = []
        for shared_bytes in (48 << 10, 60 << 10, 50 << 10, 80 << 10):
            kernel((1,), (32,), shared_bytes=shared_bytes, **self.good())
            asked.append(raw.max_dynamic_shared_size_bytes >> 10)
        assert asked == [0, 60, 60, 80]
        assert [launch[3] >> 10 for launch in raw.launches] == [48, 60, 50, 80]
