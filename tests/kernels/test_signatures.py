"""Launches against the kernels' own signatures, sizes and bounds, on a hollow CUDA backend; needs CuPy but no GPU."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kestrel_cuda.backends.base import (
    Activation,
    Decoder,
    DecoderLayer,
    DeviceWeight,
    HeadShape,
    KvLayer,
    SequenceState,
    Slab,
    SourceMatrix,
)
from kestrel_cuda.backends.composed import ComposedSteps
from kestrel_cuda.backends.vision import BFLOAT16, Affine, After
from kestrel_cuda.config import VisionConfig
from kestrel_cuda.kernels import library
from kestrel_cuda.model.patch_positions import frame_places
from kestrel_cuda.quant.grouped import ACTIVATION_GROUP, SMALLEST_SCALE
from kestrel_cuda.quant.kv_rows import KV_GROUP, LARGEST_KV_SCALE
from kestrel_cuda.quant.packed import Element, PackedGeometry, entry_views, slab_layout
from kestrel_cuda.weight_keys import LM_HEAD
from tests.kernel_sources import (
    ALL_KERNELS,
    FakeLibrary,
    constants,
    expanded,
    few_rows_bytes,
    launch_bounds,
    many_rows_bytes,
    tile_stage_bytes,
)

# What sm_86, sm_89 and sm_120 give one block.
LEAST_SHARED_BYTES = 99 << 10
COPYING_SHARED_BYTES = 227 << 10
"""What sm_90 and sm_100 give one block: the cards that a whole token runs on."""

PLAIN_SHARED_BYTES = 48 << 10
"""What a kernel gets without asking, its static arrays counted in."""

NUM_MULTIPROCESSORS = 4
GROUPS = ((1, 2), (5, 2), (16, 1))
"""(queries a kv head, kv heads)"""

INT8, INT4, G256, BF16, F16, F32 = (
    PackedGeometry(Element.INT8, 4096, 70, 32),
    PackedGeometry(Element.INT4, 4096, 70, 32),
    PackedGeometry(Element.INT8, 4096, 70, 256),
    PackedGeometry(Element.BF16, 4096, 70),
    PackedGeometry(Element.F16, 4096, 70),
    PackedGeometry(Element.F32, 4096, 70),
)
# More columns than the hollow GPU takes by narrow blocks; a joint matrix of gates and ups.
WIDE_INT8, WIDE_INT4 = (PackedGeometry(e, 288, 514, 32) for e in (Element.INT8, Element.INT4))
GATE_UP_INT8, GATE_UP_INT4 = (PackedGeometry(e, 5120, 192, 32) for e in (Element.INT8, Element.INT4))


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
            ("cuda_attention.SPLIT_SLOTS", "attention", "kSplit"),
            ("cuda_attention.SPLIT_SLOTS", "attention_few", "kSplit"),
            ("cuda_attention.SUBTILE_SLOTS", "attention", "kSubtile"),
            ("cuda_attention.FLOAT_TILE_ROWS", "attention", "kRows"),
            ("cuda_attention.HALF_TILE_ROWS", "attention_many", "kTileRows"),
            ("cuda_attention.HALF_TILE_THREADS", "attention_many", "kTileThreads"),
            ("cuda_attention.HALF_TILE_STAGES", "attention_many", "kStages"),
            ("cuda_attention.TILES_AHEAD", "attention_many_q8", "kAhead"),
            ("cuda_attention.PIECE_CODES", "attention_many_q8", "kPieceCodes"),
            ("cuda_attention.MAX_QUERIES_PER_KV", "attention_few", "kMmaRows"),
            ("cuda_decode.COLUMNS", "decode", "kColumns"),
            ("cuda_decode.PIECE_INPUTS", "decode", "kPiece"),
            ("cuda_decode.NORM_THREADS", "decode", "kDecodeThreads"),
            ("cuda_decode.NORM_THREADS", "norm", "kNormThreads"),
            ("cuda.WIDE_M", "gemm", "kWideM"),
            ("cuda.WIDE_N", "gemm", "kWideN"),
            ("cuda.WIDE_THREADS", "gemm", "kWideThreads"),
            ("cuda.SMALL_M", "gemm", "kSmallM"),
            ("cuda.SMALL_N", "gemm", "kSmallN"),
            ("cuda.SMALL_THREADS", "gemm", "kSmallThreads"),
            ("cuda.TILE_STAGES", "gemm", "kMaxStages"),
            ("cuda.PIECE_INPUTS", "gemm", "kPiece"),
            ("cuda.PIECE_INPUTS", "gemv", "kPiece"),
            ("cuda_attention.FEW_THREADS", "attention_few", "kFewThreads"),
            ("cuda_token.THREADS", "token", "kThreads"),
            ("cuda_token.THREADS", "token", "kFewThreads"),
            ("cuda_token.WARPS", "token", "kWarps"),
            ("cuda_token.COLUMNS", "token", "kColumns"),
            ("cuda_token.PIECE_INPUTS", "token", "kPiece"),
            ("cuda_token.PIECE_GROUPS", "token", "kGroupsPerPiece"),
            ("cuda_token.MMA_ROWS", "token", "kMmaRows"),
            ("cuda_token.SUBTILES", "token", "kSubtiles"),
            ("cuda_vision.ROW_WARPS", "vision", "kRowWarps"),
            ("cuda_vision.VALUE_THREADS", "vision", "kValueThreads"),
            ("cuda_vision.TILE_M", "vision_linear", "kTileM"),
            ("cuda_vision.TILE_N", "vision_linear", "kTileN"),
            ("cuda_vision.TILE_THREADS", "vision_linear", "kTileThreads"),
            ("cuda_vision.FLOAT_TILE", "vision_linear", "kFloatTile"),
            ("cuda_vision.FLOAT_THREADS", "vision_linear", "kFloatThreads"),
            ("cuda_vision.CHUNK", "vision_linear", "kChunk"),
            ("cuda_vision.CHUNK", "vision_attention", "kChunk"),
            ("cuda_vision.ATTENTION_KEYS", "vision_attention", "kKeys"),
            ("cuda_vision.FLOAT_ATTENTION_THREADS", "vision_attention", "kFloatThreads"),
            ("cuda_vision.FLOAT_QUERIES", "vision_attention", "kFloatQueries"),
            ("cuda_vision.FLOAT_HEAD_DIM", "vision_attention", "kFloatHeadDim"),
            ("cuda.MAX_WARPS", "gemv", "kMaxWarps"),
            ("cuda.FLOAT_ROWS", "gemv", "kFloatRows"),
        ],
    )
    @pytest.mark.usefixtures("cuda")
    def test_the_backends_are_the_kernels(self, ours: str, name: str, theirs: str) -> None:
        module, constant = ours.split(".")
        backend = importlib.import_module(f"kestrel_cuda.backends.{module}")
        assert getattr(backend, constant) == constants(name)[theirs]

    def test_groups_and_the_smallest_scale(self) -> None:
        assert constants("quantize")["kGroup"] == ACTIVATION_GROUP
        smallest = re.search(r"kSmallestScale = ([\d.e+-]+)f", library.source("quantize"))
        assert smallest
        assert np.float32(smallest[1]) == SMALLEST_SCALE
        assert constants("rope")["kCacheGroup"] == KV_GROUP
        largest = re.search(r"kLargestCacheScale = ([\d.]+)f", library.source("rope"))
        assert largest
        assert np.float32(largest[1]) == LARGEST_KV_SCALE

    @pytest.mark.usefixtures("cuda")
    def test_head_dims(self) -> None:
        from kestrel_cuda.backends import cuda_attention as attention

        grouped = {d for d in attention.HEAD_DIMS if d % KV_GROUP == 0}
        for step, caches in (("split", "f16 f32 q8"), ("tiled", "f16 f32 q8"), ("row", "f16 q8")):
            for cache in caches.split():
                kind = f"attend_{step}_{cache}_"
                compiled = {int(kernel.removeprefix(kind)) for kernel in ALL_KERNELS if kernel.startswith(kind)}
                assert compiled == (grouped if cache == "q8" else set(attention.HEAD_DIMS)), kind
        assert max(attention.HEAD_DIMS) <= constants("rope")["kMaxHeadDim"]
        assert min(attention.FLOAT_TILE_ROWS, attention.HALF_TILE_ROWS) >= attention.MAX_QUERIES_PER_KV

    @pytest.mark.usefixtures("cuda")
    def test_warps_and_sets_of_the_one_row_linears(self) -> None:
        from kestrel_cuda.backends import cuda_decode as decode

        assert constants("decode")["kDecodeThreads"] >= 32 * decode.MOST_WARPS
        wide = re.search(r"linear_wide_##SUFFIX.*?linear_row<WEIGHTS, (\d+)>", library.source("decode"), re.S)
        assert wide
        assert int(wide[1]) == decode.WIDE_SETS

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
            self.num_multiprocessors = NUM_MULTIPROCESSORS
            self.compute_capability = 90
            self.most_shared_bytes = LEAST_SHARED_BYTES
            self.device_memory = SimpleNamespace(array=np.zeros, free=lambda array: None)
            self._best, self._best_id = np.zeros(256, np.float32), np.zeros(256, np.int32)

        def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
            return np.zeros(shape, dtype)

        def to_device(self, array: Any) -> Any:
            return array

        def free(self, array: Any) -> None:
            pass

        def copy(self, target: Any, source: Any) -> None:
            pass

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
    for geometry in (WIDE_INT8, WIDE_INT4):
        x = backend.activation(1, geometry.num_inputs, True)
        for add in (False, True):
            backend.linear(x, weight(geometry), np.zeros((1, 520), np.float32), 1, add=add)


def run_stretches(backend: Any) -> None:
    """Up to the attention, and after it: one row, several rows, and weights that no stretch has a kernel for."""
    for geometry in (INT8, INT4, G256, BF16, WIDE_INT8, GATE_UP_INT8, GATE_UP_INT4):
        k, n, quantized = geometry.num_inputs, geometry.num_outputs, geometry.element.is_grouped
        norm, matrix = np.zeros(k, np.float32), weight(geometry)
        for m in (1, 5):
            h, out_mn = np.zeros((m, k), np.float32), np.zeros((m, 2 * geometry.n_padded), np.float32)
            scratch = backend.activation(m, k, quantized)
            for parts in ([(matrix, 0)], [(matrix, 0), (matrix, geometry.n_padded)]):
                backend.norm_linear(h, norm, 1e-6, scratch, parts, out_mn, m)
            y = backend.activation(m, n // 2, quantized)
            backend.norm_gate_up(h, norm, 1e-6, scratch, [(matrix, 0)], out_mn, n // 2, y, m)


def run_attention(backend: Any, head_dims: tuple[int, ...]) -> None:
    for head_dim in head_dims:
        for group, kv_heads in GROUPS:
            num_heads, ctx = group * kv_heads, 700
            heads = HeadShape(num_heads, kv_heads, head_dim, num_heads * head_dim, (num_heads + kv_heads) * head_dim, 1)
            norm = np.zeros(head_dim, np.float32)
            backend.check_heads(head_dim, group)
            backend.reserve_attention(heads, 40, ctx)
            qkv = np.zeros((40, (num_heads + 2 * kv_heads) * head_dim), np.float32)
            q = np.zeros((40, num_heads, head_dim), np.float32)
            for dtype in (np.float16, np.float32, np.int8):
                if dtype == np.int8 and head_dim % KV_GROUP:
                    continue
                kv = KvLayer(*(np.zeros((kv_heads, ctx, head_dim), dtype) for _ in range(2)))
                if dtype == np.int8:
                    scales = np.zeros((kv_heads, ctx, head_dim // KV_GROUP), np.float16)
                    kv = replace(kv, k_scales_hsg=scales, v_scales_hsg=scales)
                for m in (1, 8, 9, 40):
                    for quantized in (False, True):
                        out = backend.activation(40, num_heads * head_dim, quantized)
                        backend.rope_attend(qkv, norm, norm, heads, state(ctx, head_dim), kv, q, out, m, 600)
                        ComposedSteps.rope_attend(
                            backend, qkv, norm, norm, heads, state(ctx, head_dim), kv, q, out, m, 600
                        )


def decoder(element: Element, head_dim: int, group: int = 2, num_inputs: int = 256) -> Decoder:
    """Two layers that a whole token serves."""
    heads = HeadShape(2 * group, 2, head_dim, 2 * group * head_dim, (2 * group + 2) * head_dim, 1e-6)
    attended = 2 * group * head_dim
    qkv, o, gate_up, down, lm_head = (
        weight(PackedGeometry(element, k, n, 32))
        for k, n in (
            (num_inputs, attended + 4 * head_dim), (attended, num_inputs), (num_inputs, 768), (384, num_inputs),
            (num_inputs, 656),
        )
    )  # fmt: skip
    row, norm = np.zeros((1, num_inputs), np.float32), np.zeros(num_inputs, np.float32)
    head_norm, cache = np.zeros(head_dim, np.float32), np.zeros((2, 700, head_dim), np.float16)
    layer = DecoderLayer(qkv, o, gate_up, down, norm, norm, head_norm, head_norm, KvLayer(cache, cache))
    return Decoder((layer, layer), lm_head, norm, heads, row, np.zeros((1, 656), np.float32))


def int8_cache(head_dim: int) -> KvLayer:
    codes, scales = np.zeros((2, 700, head_dim), np.int8), np.zeros((2, 700, head_dim // KV_GROUP), np.float16)
    return KvLayer(codes, codes, scales, scales)


def run_whole_token(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kestrel_cuda.backends import cuda_token

    monkeypatch.setattr(cuda_token, "driver_bindings_work", lambda: True)
    monkeypatch.setattr(cuda_token, "copy_map", lambda array, cut, rows_per_piece: [0] * 16)
    monkeypatch.setattr(cuda_token, "_beside", lambda layer: [0] * cuda_token.NUM_LAYER_POINTERS)
    monkeypatch.setattr(backend, "most_shared_bytes", COPYING_SHARED_BYTES)
    for element, head_dim in product((Element.INT8, Element.INT4), cuda_token.HEAD_DIMS):
        whole = decoder(element, head_dim)
        backend.reserve_attention(whole.heads, 1, 700)
        token = backend.whole_token(whole)
        token(state(700, head_dim))
        token.close()
        for served_elsewhere in (
            decoder(element, head_dim, num_inputs=192),
            decoder(element, head_dim, num_inputs=2 * cuda_token.MOST_NORM_INPUTS),
            replace(whole, heads=replace(whole.heads, head_dim=16)),
            replace(whole, lm_head=weight(BF16)),
            replace(whole, layers=(whole.layers[0], replace(whole.layers[1], o=weight(G256)))),
            replace(whole, layers=(whole.layers[0], replace(whole.layers[1], kv=int8_cache(head_dim)))),
        ):
            assert backend.whole_token(served_elsewhere) is None
    whole = decoder(Element.INT8, 128)
    for change in ({"most_shared_bytes": LEAST_SHARED_BYTES}, {"compute_capability": 120}, {"compute_capability": 80}):
        with pytest.MonkeyPatch.context() as smaller:
            for name, value in change.items():
                smaller.setattr(backend, name, value)
            assert backend.whole_token(whole) is None


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
    backend.add(np.zeros((3, 300), np.float32), np.zeros((3, 300), np.float32))


def run_vision(backend: Any) -> None:
    from kestrel_cuda.backends.cuda_vision import ATTENTION_WARPS

    h, m = np.zeros((40, 64), np.float32), 40
    for kind in (np.float32, BFLOAT16):
        x = np.zeros((m, 64), kind)
        backend.put_pixels(x, h)
        norm = Affine(np.zeros(64, np.float32), np.zeros(64, np.float32))
        backend.layer_norm(h, norm, x)
        for after in After:
            out = np.zeros((m, 72), np.float32 if after is After.ADD else kind)
            backend.affine(x, Affine(np.zeros((72, 64), kind), np.zeros(72, np.float32)), out, after)
        for head_dim in ATTENTION_WARPS:
            config = VisionConfig(1, 2 * head_dim, 2, 64, 64, 3, 16, 2, 2, 3, (), 10000.0)
            places = frame_places(config, 4, 10)
            backend.attend_patches(np.zeros((80, 6 * head_dim), kind), 2, places, np.zeros((80, 2 * head_dim), kind))
    backend.add_patch_positions(h, np.zeros((9, 64), np.float32), places)


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


@pytest.fixture(scope="module")
def launched(cuda: Any) -> FakeLibrary:
    """Every step of the backend, over shapes that reach every kernel."""
    from kestrel_cuda.backends import cuda_attention, cuda_device

    kernels = FakeLibrary()
    backend = hollow_backend(cuda, kernels)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cuda_device, "runtime", SimpleNamespace(memGetInfo=lambda: (1 << 40, 1 << 40)))
        run_linears(backend)
        run_stretches(backend)
        run_attention(backend, cuda_attention.HEAD_DIMS)
        run_whole_token(backend, monkeypatch)
        run_the_rest(backend)
        run_vision(backend)
        run_packer(backend, monkeypatch)
        backend.read_rate_gb_per_s(1 << 20)
    return kernels


def test_every_launch_fits_its_kernel(launched: FakeLibrary) -> None:
    """Arguments by name and type, threads within the bounds; no kernel unused."""
    bounds = {kernel: threads for name in library.kernel_files() for kernel, threads in launch_bounds(name).items()}
    assert bounds.keys() == ALL_KERNELS.keys() - {"advance_position"}
    names = set()
    for kernel, grid, block, _ in launched.launches:
        names.add(kernel)
        threads = int(np.prod(block))
        assert all(size >= 1 for size in (*grid, *block)), kernel
        assert threads % 32 == 0 or kernel == "advance_position", kernel
        # The linears take a warp a piece of K; every other kernel is written for one block size.
        most = bounds.get(kernel, 1)
        assert threads <= most if kernel.startswith("linear_") else threads == most, kernel
    assert names == ALL_KERNELS.keys(), "kernels that no step launches"


def test_the_linears_have_a_thread_for_every_column(launched: FakeLibrary) -> None:
    """Which `linear_row` and `linear_wide` add the pieces of at the end, in one go."""
    from kestrel_cuda.backends import cuda_decode as decode

    for kernel, grid, block, _ in launched.launches:
        if kernel.startswith(("linear_row_", "linear_wide_")):
            sets = decode.WIDE_SETS if "wide" in kernel else 1
            assert block[0] >= sets * decode.COLUMNS, kernel
            assert (grid[0] - 1) * sets * decode.COLUMNS < WIDE_INT8.n_padded, kernel


def test_shared_memory_is_there_on_every_card(launched: FakeLibrary) -> None:
    """Static and dynamic together; what no kernel gets by itself was asked for before."""
    lacking = {}
    for kernel, _, _, dynamic_bytes in launched.launches:
        raw = launched.raw[kernel]
        total = raw.shared_size_bytes + dynamic_bytes
        most = COPYING_SHARED_BYTES if kernel.startswith("decode_token_") else LEAST_SHARED_BYTES
        assert total <= most, f"{kernel} asks for {total} bytes of shared memory"
        if total > PLAIN_SHARED_BYTES and raw.max_dynamic_shared_size_bytes < dynamic_bytes:
            lacking[kernel] = f"{raw.shared_size_bytes} static and {dynamic_bytes} dynamic bytes"
    assert not lacking, "over 48 KiB without asking for it"


def test_kernels_that_start_early_wait(launched: FakeLibrary) -> None:
    """Whatever is launched before its predecessor is done waits for it, and lets its own successor start."""
    waiting = set()
    for name in library.kernel_files():
        text = expanded(name)
        bodies = dict(re.findall(r"inline void (\w+)\(.*?\) \{\n(.*?)^\}", text, re.M | re.S))
        for kernel, body in re.findall(r"\b(\w+)\([^()]*\)\s*\{\s*(.*?)^ *\}", text, re.M | re.S):
            if kernel in ALL_KERNELS and (called := re.search(r"(\w+)<[^>]*>\([^;]*\);\s*$", body)):
                code = bodies.get(called[1], "")
                if "wait_for_previous();" in code:
                    assert code.count("launch_dependents();") == 1, kernel
                    assert code.index("launch_dependents();") < code.index("wait_for_previous();"), kernel
                    waiting.add(kernel)
    assert {kernel for kernel, raw in launched.raw.items() if raw.num_early} == waiting
    assert all(raw.num_early in (0, len(raw.launches)) for raw in launched.raw.values())


def test_shared_memory_is_what_the_kernels_lay_out(launched: FakeLibrary) -> None:
    """Computed anew from the sources' constants, layout by layout."""
    from kestrel_cuda.backends import cuda_token, cuda_vision
    from kestrel_cuda.backends.cuda_attention import HEAD_DIMS

    asked: dict[str, set[int]] = {}
    for kernel, _, _, shared_bytes in launched.launches:
        asked.setdefault(kernel, set()).add(shared_bytes)

    c = constants("gemm")
    for element in ("int8", "int4"):
        for kernel, size in (("linear_tiles", "Wide"), ("linear_small_tiles", "Small")):
            stage_bytes = tile_stage_bytes(int(element[-1]), c[f"k{size}M"], c[f"k{size}N"])
            # Only three wide stages of int8 are more than every card has.
            num_stages = c["kMaxStages"] - ((size, element) == ("Wide", "int8"))
            assert asked[f"{kernel}_{element}"] == {num_stages * stage_bytes}

    c = constants("decode")
    for element, wide in (("int8", WIDE_INT8), ("int4", WIDE_INT4)):

        def sums(k: int, num_sets: int) -> int:
            return num_sets * -(-k // c["kPiece"]) * c["kColumns"] * 4

        def own_activation(k: int) -> int:
            # Codes, their scales, the norm's weight and the row.
            return k + k // c["kGroup"] * 4 + 2 * k * 4

        few, many = 4096, 5120
        assert asked[f"linear_wide_{element}"] == {sums(wide.num_inputs, 4)}
        assert asked[f"norm_linear_{element}"] == {sums(k, 1) + own_activation(k) for k in (few, many)}
        # Only joint matrices of whole groups have a kernel.
        assert asked[f"norm_gate_up_{element}"] >= {sums(many, 4) + own_activation(many)}
        assert asked[f"linear_row_{element}"] >= {sums(few, 1)}

    c = constants("attention")
    for d in HEAD_DIMS:
        # Queries and scores of a kv head's queries, and the partial sums of as many heads as fit the block.
        at_once = c["kAttentionThreads"] // (d // 2 * c["kSubtiles"])
        partial = at_once * c["kSubtiles"] * d
        assert asked[f"attend_split_f32_{d}"] == {4 * (group * (d + c["kSplit"]) + partial) for group, _ in GROUPS}
        floats = c["kRows"] * (d + 4 + c["kScoreStride"] + 4) + c["kSubtile"] * (d + 4)
        assert asked[f"attend_tiled_f32_{d}"] == {4 * floats}

    c = constants("attention_few")
    for d in HEAD_DIMS:
        # The weighted values of each subtile for a kv head's queries.
        parts = {group: 4 * c["kSubtiles"] * group * d for group, _ in GROUPS}
        # Other groups share an activation scale between kv heads.
        whole = {size for group, size in parts.items() if group * d % ACTIVATION_GROUP == 0}
        for cache in ("f16", "q8") if d % KV_GROUP == 0 else ("f16",):
            assert asked[f"attend_split_{cache}_{d}"] == set(parts.values())
            assert asked[f"attend_row_{cache}_{d}"] == whole
        assert asked[f"attend_tiled_f16_{d}"] == {many_rows_bytes("attention_many", "f16", d)}
        if d % KV_GROUP == 0:
            addresses = 4 * 8  # not arrays
            assert asked[f"attend_tiled_q8_{d}"] == {many_rows_bytes("attention_many_q8", "q8", d) + addresses}

    c = constants("vision_attention")
    for d, warps in cuda_vision.ATTENTION_WARPS.items():
        # Keys and values by stages; rows of whole mma steps, and a chunk more.
        row_bytes = (-(-d // 16) * 2 + 1) * 16
        tiles_bytes = 2 * (3 if d <= 80 else 2) * c["kKeys"] * row_bytes
        assert asked[f"attend_patches_{d}"] == {tiles_bytes}
        assert 16 * warps * row_bytes <= tiles_bytes, "queries are laid over them first"

    for d, (group, _) in product(cuda_token.HEAD_DIMS, GROUPS):
        is_last = 4  # not an array
        few = -(-(few_rows_bytes("token", "f16", d) + is_last) // 16) * 16
        assert cuda_token.few_rows_bytes(d, group) == few + 4 * c["kSubtiles"] * group * d
