"""Launches against the kernels' own signatures, sizes and bounds, on a hollow CUDA backend; needs CuPy but no GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kestrel_cuda.backends.base import Activation, DeviceWeight, HeadShape, KvLayer, SequenceState, Slab, SourceMatrix
from kestrel_cuda.errors import InternalError
from kestrel_cuda.kernels import library
from kestrel_cuda.quant.grouped import ACTIVATION_GROUP, SMALLEST_SCALE
from kestrel_cuda.quant.packed import Element, PackedGeometry, entry_views, slab_layout
from kestrel_cuda.weight_keys import LM_HEAD

# What sm_86, sm_89 and sm_120 give one block.
LEAST_SHARED_BYTES = 99 << 10

INT8, INT4, G256, BF16, F16, F32 = (
    PackedGeometry(Element.INT8, 4096, 70, 32),
    PackedGeometry(Element.INT4, 4096, 70, 32),
    PackedGeometry(Element.INT8, 4096, 70, 256),
    PackedGeometry(Element.BF16, 4096, 70),
    PackedGeometry(Element.F16, 4096, 70),
    PackedGeometry(Element.F32, 4096, 70),
)


def expanded(name: str) -> str:
    """A source with its kernels written out, macros and all."""
    return library._expand_macros(library.source(name))


def constants(name: str) -> dict[str, int]:
    """The integer constants of a .cu file and of common.cuh; those that depend on a template are left out."""
    found: dict[str, int] = {}
    for constant, expression in re.findall(r"constexpr int (\w+) = ([^;]+);", library.source(name)):
        try:
            found[constant] = eval(expression.replace("/", "//"), {"__builtins__": {}}, found)
        except (NameError, SyntaxError):
            continue
    return found


def launch_bounds(name: str) -> dict[str, int]:
    """Threads a block of each kernel may have."""
    pattern = r"__launch_bounds__\(([^,)]+)(?:, 1)?\)\s*(\w+)\("
    return {kernel: eval(threads, {}, constants(name)) for threads, kernel in re.findall(pattern, expanded(name))}


ALL_KERNELS = {kernel: name for name in library.kernel_files() for kernel in library.signatures(name)}


@dataclass
class FakeRawKernel:
    """What a kernel is handed, instead of a launch."""

    launches: list[tuple[Any, ...]] = field(default_factory=list)
    max_dynamic_shared_size_bytes: int = 0

    def kernel(self, *launch: Any) -> None:
        self.launches.append(launch)


class FakeLibrary(dict[str, library.Kernel]):
    """Kernels by name, as the sources declare them; a name that no source declares is a KeyError."""

    def __init__(self) -> None:
        self.raw = {kernel: FakeRawKernel() for kernel in ALL_KERNELS}
        stream = object()
        super().__init__(
            (kernel, library.Kernel(library.signatures(name)[kernel], self.raw[kernel], stream))
            for kernel, name in ALL_KERNELS.items()
        )

    @property
    def launches(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], int]]:
        """Kernel, grid, block and dynamic shared memory of every launch."""
        for kernel, raw in self.raw.items():
            for grid, block, _, shared_bytes, _ in raw.launches:
                yield kernel, grid, block, shared_bytes


class TestArguments:
    SIGNATURE = library.Signature(
        "scale_rows",
        (
            library.Parameter("x_mk", "float", True),
            library.Parameter("m", "int", False),
            library.Parameter("words", "u32", True),
            library.Parameter("halves", "u16", True),
            library.Parameter("raw", "void", True),
            library.Parameter("eps", "float", False),
            library.Parameter("num_bytes", "i64", False),
        ),
    )

    def good(self) -> dict[str, Any]:
        """In another order than the signature's."""
        return {
            "num_bytes": 1 << 40, "eps": 1e-6, "m": 3, "x_mk": np.zeros(4, np.float32), "raw": np.zeros(4, np.int64),
            "words": np.zeros(4, np.uint32), "halves": np.zeros(4, np.uint16),
        }  # fmt: skip

    def launch(self, arguments: dict[str, Any], **options: Any) -> FakeRawKernel:
        raw = FakeRawKernel()
        library.Kernel(self.SIGNATURE, raw, "stream")((1, 2), (32,), **options, **arguments)
        return raw

    def test_they_are_packed_in_the_signatures_order_and_width(self) -> None:
        arguments = self.good()
        ((grid, block, packed, shared_bytes, stream),) = self.launch(arguments).launches
        assert (grid, block, shared_bytes, stream) == ((1, 2), (32,), 0, "stream")
        assert packed[0] is arguments["x_mk"]
        assert packed[2] is arguments["words"]
        assert [type(packed[i]) for i in (1, 5, 6)] == [np.int32, np.float32, np.int64]
        assert (packed[1], packed[5], packed[6]) == (3, np.float32(1e-6), 1 << 40)

    @pytest.mark.parametrize("name", [parameter.name for parameter in SIGNATURE.parameters])
    def test_a_missing_one_is_named(self, name: str) -> None:
        arguments = self.good()
        del arguments[name]
        with pytest.raises(InternalError, match=f"scale_rows: no argument for {name}"):
            self.launch(arguments)

    def test_one_too_many_is_named(self) -> None:
        with pytest.raises(InternalError, match="scale_rows takes no ldo"):
            self.launch(self.good() | {"ldo": 4})

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [("x_mk", np.float64), ("x_mk", np.float16), ("x_mk", np.int32), ("words", np.int32), ("words", np.uint8),
         ("words", np.float32), ("halves", np.int16), ("halves", np.float32), ("halves", np.int8)],
    )  # fmt: skip
    def test_an_array_of_another_type_is_refused(self, name: str, dtype: type[np.generic]) -> None:
        with pytest.raises(InternalError, match=f"scale_rows: {name} takes an array of"):
            self.launch(self.good() | {name: np.zeros(4, dtype)})

    @pytest.mark.parametrize(("name", "dtype"), [("words", np.int8), ("halves", np.float16)])
    def test_arrays_of_the_same_bits_are_taken(self, name: str, dtype: type[np.generic]) -> None:
        assert self.launch(self.good() | {name: np.zeros(4, dtype)}).launches

    @pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float16, np.float32])
    def test_void_takes_any_array(self, dtype: type[np.generic]) -> None:
        assert self.launch(self.good() | {"raw": np.zeros(4, dtype)}).launches

    @pytest.mark.parametrize("name", ["x_mk", "words", "raw"])
    @pytest.mark.parametrize("value", [None, 0, 1.0, [1, 2], np.float32(1), np.uint32(1)])
    def test_what_is_not_an_array_is_refused(self, name: str, value: object) -> None:
        with pytest.raises(InternalError, match=f"scale_rows: {name} takes an array"):
            self.launch(self.good() | {name: value})

    @pytest.mark.parametrize(
        ("name", "value"),
        [("m", 1.5), ("m", "3"), ("m", None), ("m", np.zeros(2, np.int32)), ("m", 1 << 31), ("num_bytes", 1.0),
         ("num_bytes", 1 << 63), ("eps", None), ("eps", np.zeros(1, np.float32)), ("eps", "1")],
    )  # fmt: skip
    def test_what_is_not_such_a_number_is_refused(self, name: str, value: object) -> None:
        with pytest.raises(InternalError, match=f"scale_rows: {name} takes"):
            self.launch(self.good() | {name: value})

    @pytest.mark.parametrize(("name", "value"), [("m", np.int64(5)), ("eps", 1), ("eps", np.float64(0.5)), ("m", True)])
    def test_numpys_numbers_are_numbers(self, name: str, value: object) -> None:
        assert self.launch(self.good() | {name: value}).launches

    def test_shared_memory_over_48_kib_is_asked_for_and_never_less_again(self) -> None:
        raw = FakeRawKernel()
        kernel = library.Kernel(self.SIGNATURE, raw, None)
        asked = []
        for shared_bytes in (48 << 10, 60 << 10, 50 << 10, 80 << 10):
            kernel((1,), (32,), shared_bytes=shared_bytes, **self.good())
            asked.append(raw.max_dynamic_shared_size_bytes >> 10)
        assert asked == [0, 60, 60, 80]
        assert [launch[3] >> 10 for launch in raw.launches] == [48, 60, 50, 80]


class TestParsing:
    @pytest.mark.parametrize("name", library.kernel_files())
    def test_every_kernel_of_a_file_is_read(self, name: str) -> None:
        assert len(library.signatures(name)) == expanded(name).count('extern "C" __global__')

    def test_kernels_written_by_macro_are_read(self) -> None:
        sizes = [f"{cache}_{d}" for cache in ("f16", "f32") for d in (16, 32, 64, 128)]
        assert {f"attend_{kind}_{size}" for kind in ("split", "tiled") for size in sizes} <= ALL_KERNELS.keys()
        half, wide = (library.signatures("attention")[f"attend_split_{size}"] for size in ("f16_64", "f32_64"))
        assert [p.c_type for p in half.parameters if p.name == "k_hsd"] == ["u16"]
        assert [p.c_type for p in wide.parameters if p.name == "k_hsd"] == ["float"]

    def test_no_two_files_have_a_kernel_of_the_same_name(self) -> None:
        assert len(ALL_KERNELS) == sum(len(library.signatures(name)) for name in library.kernel_files())

    def test_an_unknown_parameter_type_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            library, "source", lambda name: 'extern "C" __global__ void f(const double* x, int n) {\n}\n'
        )
        with pytest.raises(InternalError, match=r"odd\.cu: cannot read the parameter 'const double\* x' of f"):
            library.signatures.__wrapped__("odd")


@pytest.fixture(scope="module")
def cuda() -> Any:
    """The module of the CUDA backend; skips where CuPy is missing."""
    pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
    from kestrel_cuda.backends import cuda

    return cuda


class TestSizes:
    @pytest.mark.parametrize(
        ("ours", "name", "theirs"),
        [
            ("SPLIT_SLOTS", "attention", "kSplit"),
            ("TILED_ROWS", "attention", "kRows"),
            ("TILE_M", "gemm", "kTileM"),
            ("TILE_N", "gemm", "kTileN"),
            ("PIECE_INPUTS", "gemm", "kPiece"),
            ("PIECE_INPUTS", "gemv", "kPiece"),
            ("MAX_WARPS", "gemv", "kMaxWarps"),
            ("FLOAT_ROWS", "gemv", "kFloatRows"),
        ],
    )
    def test_the_backends_are_the_kernels(self, cuda: Any, ours: str, name: str, theirs: str) -> None:
        assert getattr(cuda, ours) == constants(name)[theirs]

    def test_groups_and_the_smallest_scale(self) -> None:
        assert constants("quantize")["kGroup"] == ACTIVATION_GROUP
        smallest = re.search(r"kSmallestScale = ([\d.e+-]+)f", library.source("quantize"))
        assert smallest
        assert np.float32(smallest[1]) == SMALLEST_SCALE

    def test_head_dims(self, cuda: Any) -> None:
        compiled = {int(kernel.rsplit("_", 1)[1]) for kernel in ALL_KERNELS if kernel.startswith("attend_split_")}
        assert compiled == set(cuda.HEAD_DIMS)
        assert max(cuda.HEAD_DIMS) <= constants("rope")["kMaxHeadDim"]
        assert constants("attention")["kRows"] >= cuda.MAX_QUERIES_PER_KV

    def test_row_counts_of_the_few_row_linears(self, cuda: Any) -> None:
        counts = [int(found[1]) for kernel in ALL_KERNELS if (found := re.fullmatch(r"linear_rows(\d+)_int8", kernel))]
        assert max(counts) == cuda.MAX_ROWS_KERNEL

    def test_tiles_of_the_transposes(self, cuda: Any) -> None:
        from kestrel_cuda.backends import cuda_packer

        assert constants("transpose")["kTile"] == cuda_packer._TILE


def hollow_backend(cuda: Any, kernels: FakeLibrary) -> Any:
    """The backend's steps over NumPy arrays, launching nothing."""

    class HollowBackend(cuda.CudaBackend):  # type: ignore[misc]
        def __init__(self) -> None:
            self.kernels = kernels
            self.num_multiprocessors = 4
            self.device_memory = SimpleNamespace(array=np.zeros, free=lambda array: None)
            self._best, self._best_id = np.zeros(256, np.float32), np.zeros(256, np.int32)

        def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
            return np.zeros(shape, dtype)

        def mark(self) -> None:
            pass

        def elapsed_ms(self, start: Any, end: Any) -> float:
            return 1.0

    return HollowBackend()


def weight(geometry: PackedGeometry) -> DeviceWeight:
    scales = np.zeros(geometry.scales_shape, np.float16) if geometry.element.is_grouped else None
    return DeviceWeight(geometry, np.zeros(geometry.codes_shape, geometry.codes_dtype), scales)


def state(ctx: int, head_dim: int) -> SequenceState:
    table = np.zeros((ctx, head_dim // 2), np.float32)
    return SequenceState(np.zeros(ctx + 1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32), table, table)


def run_linears(backend: Any) -> None:
    for geometry in (INT8, INT4, G256, BF16, F16, F32):
        for m in (1, 2, 3, 4, 5, 64, 65, 300):
            x: Activation = backend.activation(m, geometry.num_inputs, geometry.element.is_grouped)
            for column in (0, 4):
                backend.linear(x, weight(geometry), np.zeros((m, 80), np.float32), m, column=column, add=column > 0)


def run_attention(backend: Any, head_dims: tuple[int, ...]) -> None:
    for head_dim in head_dims:
        for group, kv_heads in ((1, 2), (5, 2), (32, 1)):
            num_heads, ctx = group * kv_heads, 700
            heads = HeadShape(num_heads, kv_heads, head_dim, num_heads * head_dim, (num_heads + kv_heads) * head_dim, 1)
            norm = np.zeros(head_dim, np.float32)
            backend.check_heads(head_dim, group)
            backend.reserve_attention(heads, 40, ctx)
            qkv = np.zeros((40, (num_heads + 2 * kv_heads) * head_dim), np.float32)
            q = np.zeros((40, num_heads, head_dim), np.float32)
            for dtype in (np.float16, np.float32):
                kv = KvLayer(*(np.zeros((kv_heads, ctx, head_dim), dtype) for _ in range(2)))
                for m in (1, 8, 9, 40):
                    backend.rope_store(qkv, norm, norm, heads, state(ctx, head_dim), kv, q, m)
                    for quantized in (False, True):
                        out = backend.activation(40, num_heads * head_dim, quantized)
                        backend.attend(q, kv, heads, state(ctx, head_dim), out, m, 600)


def run_the_rest(backend: Any) -> None:
    for m in (1, 17):
        h = np.zeros((m, 300), np.float32)
        for dtype in (np.uint16, np.float16, np.float32):
            backend.embed(np.zeros((50, 300), dtype), state(8, 16), h, m)
        for quantized in (False, True):
            out = backend.activation(m, 300, quantized)
            backend.norm(h, np.zeros(300, np.float32), 1e-6, out, m)
            backend.silu_mul(np.zeros((m, 600), np.float32), 300, out, m)
    for vocab in (1, 656, 151936):
        backend.choose(np.zeros(vocab, np.float32), vocab, state(8, 16), 1)
    backend.advance(state(8, 16), 3)


def run_packer(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kestrel_cuda.backends import cuda_packer

    monkeypatch.setattr(cuda_packer, "SCRATCH_BYTES", 1 << 20)
    monkeypatch.setattr(cuda_packer.CudaPacker, "_upload", lambda self, rows_nk: self._source)
    packer = cuda_packer.CudaPacker(backend)
    for geometry in (INT8, INT4, G256, BF16, F16, F32):
        layout = slab_layout(0, [(LM_HEAD, geometry)])
        raw = np.zeros(layout.num_bytes, np.uint8)
        codes_kn, scales_gn = entry_views(raw, layout.entries[0])
        device = DeviceWeight(geometry, codes_kn, scales_gn if geometry.element.is_grouped else None)
        stored = {Element.BF16: [np.uint16], Element.F16: [np.float16]}.get(
            geometry.element, [np.uint16, np.float16, np.float32]
        )
        for dtype in stored:
            source = SourceMatrix("w", np.zeros((70, 4096), dtype))
            packer.pack(Slab(layout, raw, {LM_HEAD.projection: device}), layout.entries[0], [source])


def test_every_launch_fits_its_kernel(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments by name and type, threads within the bounds, shared memory that every card has; no kernel unused."""
    monkeypatch.setattr(cuda, "runtime", SimpleNamespace(memGetInfo=lambda: (1 << 40, 1 << 40)))
    kernels = FakeLibrary()
    backend = hollow_backend(cuda, kernels)
    run_linears(backend)
    run_attention(backend, cuda.HEAD_DIMS)
    run_the_rest(backend)
    run_packer(backend, monkeypatch)
    backend.read_rate_gb_per_s(1 << 20)

    bounds = {kernel: threads for name in library.kernel_files() for kernel, threads in launch_bounds(name).items()}
    assert bounds.keys() == ALL_KERNELS.keys() - {"advance_position"}
    launched = set()
    for kernel, grid, block, shared_bytes in kernels.launches:
        launched.add(kernel)
        threads = int(np.prod(block))
        assert all(size >= 1 for size in (*grid, *block)), kernel
        assert threads % 32 == 0 or kernel == "advance_position", kernel
        # The linears take a warp a piece of K; every other kernel is written for one block size.
        most = bounds.get(kernel, 1)
        assert threads <= most if kernel.startswith(("linear_rows", "linear_float")) else threads == most, kernel
        assert shared_bytes <= LEAST_SHARED_BYTES, f"{kernel} asks for {shared_bytes} bytes of shared memory"
    assert launched == ALL_KERNELS.keys(), "kernels that no step launches"


def test_shared_memory_is_what_the_kernels_lay_out(cuda: Any) -> None:
    """Computed anew from the sources' constants, layout by layout."""
    kernels = FakeLibrary()
    backend = hollow_backend(cuda, kernels)
    run_linears(backend)
    run_attention(backend, cuda.HEAD_DIMS)
    asked: dict[str, set[int]] = {}
    for kernel, _, _, shared_bytes in kernels.launches:
        asked.setdefault(kernel, set()).add(shared_bytes)

    c = constants("gemm")
    for element, words in (("int8", 8), ("int4", 4)):
        x = c["kTileM"] * c["kRowWords"] * 4
        w = c["kGroupsPerPiece"] * words * c["kColumnWords"] * 4
        scales = c["kGroupsPerPiece"] * (c["kTileN"] * 2 + c["kTileM"] * 4)
        assert asked[f"linear_tiles_{element}"] == {2 * (x + w + scales)}

    c = constants("attention")
    for cache, item in (("f16", 2), ("f32", 4)):
        for d in cuda.HEAD_DIMS:
            # Queries and scores of a kv head's queries, and the partial sums of as many heads as fit the block.
            at_once = c["kAttentionThreads"] // (d // 2 * c["kSubtiles"])
            partial = at_once * c["kSubtiles"] * d
            split = {4 * (group * (d + c["kSplit"]) + partial) for group in (1, 5, 32)}
            assert asked[f"attend_split_{cache}_{d}"] == split
            floats = c["kRows"] * (d + 4 + c["kScoreStride"] + 4)
            tile = c["kSubtile"] * (d + 16 // item) * item
            assert asked[f"attend_tiled_{cache}_{d}"] == {4 * floats + tile}
