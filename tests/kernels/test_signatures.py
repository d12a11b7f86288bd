"""Launches against the kernels' own signatures, sizes and bounds, on a hollow CUDA backend; needs CuPy but no GPU."""

from __future__ import annotations

import importlib
import re
from itertools import product
from typing import Any

import numpy as np
import pytest

from kestrel_cuda.backends.vision import LAYER_NORM_EPS, After
from kestrel_cuda.kernels import library
from kestrel_cuda.quant.grouped import ACTIVATION_GROUP, SMALLEST_SCALE
from kestrel_cuda.quant.kv_rows import KV_GROUP, LARGEST_KV_SCALE
from tests.hollow_backend import (
    COPYING_SHARED_BYTES,
    GROUPS,
    LEAST_SHARED_BYTES,
    PLAIN_SHARED_BYTES,
    WIDE_INT4,
    WIDE_INT8,
    launch_everything,
)
from tests.kernel_sources import (
    ALL_KERNELS,
    FakeLibrary,
    constants,
    expanded,
    few_queries_bytes,
    few_weights_bytes,
    launch_bounds,
    many_rows_bytes,
    struct_bytes,
    tile_stage_bytes,
)


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
            ("cuda_attention.WARPGROUP_TILE_ROWS", "attention_many_warpgroup", "kTileRows"),
            ("cuda_attention.WARPGROUP", "attention_many_warpgroup", "kWarpgroup"),
            ("cuda_attention.WARPGROUP_TILE_THREADS", "attention_many_warpgroup", "kTileThreads"),
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
            ("cuda.WARPGROUP_M", "gemm_warpgroup", "kTileM"),
            ("cuda.WARPGROUP_N", "gemm_warpgroup", "kTileN"),
            ("cuda.WARPGROUP_THREADS", "gemm_warpgroup", "kTileThreads"),
            ("cuda.WARPGROUP_STAGES", "gemm_warpgroup", "kStages"),
            ("cuda.WARPGROUP_SCALES", "gemm_warpgroup", "kScaleWords"),
            ("cuda.WARPGROUP_WORDS", "gemm_warpgroup", "kColumnWords"),
            ("cuda.PIECE_INPUTS", "gemm_warpgroup", "kSwizzledRow"),
            ("cuda.PIECE_GROUPS", "gemm_warpgroup", "kGroupsPerPiece"),
            ("cuda.PIECE_INPUTS", "gemm", "kPiece"),
            ("cuda.PIECE_INPUTS", "gemv", "kPiece"),
            ("cuda_attention.QUANTIZED_INPUTS", "quantize", "kQuantizedInputs"),
            ("cuda_attention.FEW_THREADS", "attention_few", "kFewThreads"),
            ("token_cuts.THREADS", "token_int8_boxed", "kThreads"),
            ("token_cuts.THREADS", "token_int8_boxed", "kFewThreads"),
            ("cuda_token.COPY_THREADS", "token_int8_boxed", "kCopyThreads"),
            ("token_cuts.WARPS", "token_int8_boxed", "kWarps"),
            ("token_cuts.COLUMNS", "token_int8_boxed", "kColumns"),
            ("token_cuts.BOX_ITEMS", "token_int8_boxed", "kBoxItems"),
            ("token_cuts.ITEM_BIT", "token_int8_boxed", "kItemBit"),
            ("token_cuts.KIND_BIT", "token_int8_boxed", "kKindBit"),
            ("token_cuts.PIECE_INPUTS", "token_int8_boxed", "kPiece"),
            ("token_cuts.PIECE_GROUPS", "token_int8_boxed", "kGroupsPerPiece"),
            ("token_cuts.MMA_ROWS", "token_int8_boxed", "kMmaRows"),
            ("token_cuts.SUBTILES", "token_int8_boxed", "kSubtiles"),
            ("token_cuts.SPLIT_SLOTS", "token_int8_boxed", "kSplit"),
            ("token_cuts.SUBTILE_SLOTS", "token_int8_boxed", "kSubtile"),
            ("token_cuts.PANEL_CHANNELS", "token_int8_boxed", "kPanelChannels"),
            ("token_cuts.MOST_SLOTS", "token_int8_boxed", "kMostSlots"),
            ("token_cuts.MOST_KV_SLOTS", "token_int8_boxed", "kMostKvSlots"),
            ("token_cuts.LEAST_KV_SLOTS", "token_int8_boxed", "kSubtiles"),
            ("token_cuts.SLICE_CHANNELS", "token_int8_one_split", "kGroup"),
            ("token_cuts.SLICE_QUERIES", "token_int8_one_split", "kSliceQueries"),
            ("cuda_vision.ROW_WARPS", "vision", "kRowWarps"),
            ("cuda_vision.VALUE_THREADS", "vision", "kValueThreads"),
            ("cuda_vision.TILE_M", "vision_linear", "kTileM"),
            ("cuda_vision.TILE_N", "vision_linear", "kTileN"),
            ("cuda_vision.TILE_THREADS", "vision_linear", "kTileThreads"),
            ("cuda_vision.WARPGROUP_M", "vision_linear_warpgroup", "kTileM"),
            ("cuda_vision.WARPGROUP_K", "vision_linear_warpgroup", "kTileK"),
            ("cuda_vision.WARPGROUP_THREADS", "vision_linear_warpgroup", "kTileThreads"),
            ("cuda_vision.CHUNK", "vision_linear_warpgroup", "kChunk"),
            ("cuda_vision.FLOAT_TILE", "vision_linear", "kFloatTile"),
            ("cuda_vision.FLOAT_THREADS", "vision_linear", "kFloatThreads"),
            ("cuda_vision.CHUNK", "vision_linear", "kChunk"),
            ("cuda_vision.CHUNK", "vision_attention", "kChunk"),
            ("cuda_vision.ATTENTION_KEYS", "vision_attention", "kKeys"),
            ("cuda_vision.FLOAT_ATTENTION_THREADS", "vision_attention", "kFloatThreads"),
            ("cuda_vision.FLOAT_QUERIES", "vision_attention", "kFloatQueries"),
            ("cuda_vision.FLOAT_HEAD_DIM", "vision_attention", "kFloatHeadDim"),
            ("cuda_vision.WARPGROUP_QUERIES", "vision_attention_warpgroup", "kQueries"),
            ("cuda_vision.WARPGROUP_KEYS", "vision_attention_warpgroup", "kKeys"),
            ("cuda_vision.WARPGROUP_ATTENTION_THREADS", "vision_attention_warpgroup", "kAttendThreads"),
            ("cuda_vision.WARPGROUP_ATTENTION_STAGES", "vision_attention_warpgroup", "kStages"),
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

    @pytest.mark.usefixtures("cuda")
    def test_what_follows_a_linear_of_the_tower(self) -> None:
        text = library.source("vision_linear")
        names = {"kNothing": After.NOTHING, "kGeluTanh": After.GELU_TANH, "kGeluErf": After.GELU_ERF, "kAdd": After.ADD}
        listed = re.search(r"enum After \{([^}]*)\}", text)
        assert listed
        assert {name: int(number) for name, number in re.findall(r"(\w+) = (\d+)", listed[1])} == names
        eps = re.search(r"kLayerNormEps = ([\d.e+-]+)f", library.source("vision"))
        assert eps
        assert float(eps[1]) == LAYER_NORM_EPS

    def test_tiles_of_the_transposes(self, cuda: Any) -> None:
        from kestrel_cuda.backends import cuda_packer

        assert constants("transpose")["kTile"] == cuda_packer._TILE


@pytest.fixture(scope="module")
def launched(cuda: Any) -> FakeLibrary:
    return launch_everything(cuda)


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
        one_architecture = ALL_KERNELS[kernel] in library.FEATURE_ARCHITECTURES
        most = COPYING_SHARED_BYTES if one_architecture else LEAST_SHARED_BYTES
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
            if kernel in ALL_KERNELS:
                called = re.search(r"(\w+)<[^>]*>\([^;]*\);\s*$", body)
                code = bodies.get(called[1], "") if called else body
                if "wait_for_previous();" in code:
                    assert code.count("launch_dependents();") == 1, kernel
                    assert code.index("launch_dependents();") < code.index("wait_for_previous();"), kernel
                    waiting.add(kernel)
    assert {kernel for kernel, raw in launched.raw.items() if raw.num_early} == waiting
    assert all(raw.num_early in (0, len(raw.launches)) for raw in launched.raw.values())


def test_kernels_whose_blocks_wait_for_one_another_are_launched_whole(launched: FakeLibrary) -> None:
    whole = {kernel for kernel, raw in launched.raw.items() if raw.num_at_once == len(raw.launches) > 0}
    assert whole == {kernel for kernel in launched.raw if kernel.startswith("decode_token_")}


def test_shared_memory_is_what_the_kernels_lay_out(launched: FakeLibrary) -> None:
    """Computed anew from the sources' constants, layout by layout."""
    from kestrel_cuda.backends import cuda_token, cuda_vision, token_cuts
    from kestrel_cuda.backends.cuda_attention import HEAD_DIMS, WARPGROUP_HEAD_DIMS

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

    c = constants("gemm_warpgroup")
    for element in ("int8", "int4"):
        word_rows = c["kPiece"] * int(element[-1]) // 32
        scales = c["kGroupsPerPiece"] * (c["kTileN"] * 2 + c["kScaleWords"] * 4)
        stage_bytes = c["kTileM"] * c["kSwizzledRow"] + word_rows * c["kColumnWords"] * 4 + scales
        whole = c["kStages"] * (-(-stage_bytes // 1024) * 1024) + 2 * c["kStages"] * 8
        assert asked[f"linear_warpgroups_{element}"] == {-(-whole // 1024) * 1024}

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
        if d in WARPGROUP_HEAD_DIMS:
            w = constants("attention_many_warpgroup")
            rows = w["kTileRows"] + w["kKeyStages"] * w["kKeySlots"] + w["kValueStages"] * w["kSubtile"]
            of_threads = 4 * w["kAttenders"] * w["kWarpgroup"] * (d // 8 * 4 + 2)
            whole = rows * d * 2 + of_threads + 2 * 8 * (w["kKeyStages"] + w["kValueStages"])
            assert asked[f"attend_warpgroups_f16_{d}"] == {whole}
        if d % KV_GROUP == 0:
            addresses = 4 * 8  # not arrays
            assert asked[f"attend_tiled_q8_{d}"] == {many_rows_bytes("attention_many_q8", "q8", d) + addresses}

    c = constants("vision_linear_warpgroup")
    for width in cuda_vision.WARPGROUP_WIDTHS:
        num_stages = 3 if width > 128 else 4
        # Stages, sums on their way out, and barriers; the whole a multiple of the stages' alignment.
        stages_bytes = num_stages * (c["kTileM"] + width) * c["kSwizzledRow"]
        whole = stages_bytes + c["kTileM"] * (width + 8) * 4 + (2 * num_stages + 2) * 8
        assert asked[f"affine_warpgroup_bf16_{width}"] == {-(-whole // 1024) * 1024}

    c = constants("vision_attention")
    for d, warps in cuda_vision.ATTENTION_WARPS.items():
        # Keys and values by stages; rows of whole mma steps, and a chunk more.
        row_bytes = (-(-d // 16) * 2 + 1) * 16
        tiles_bytes = 2 * (3 if d <= 80 else 2) * c["kKeys"] * row_bytes
        assert asked[f"attend_patches_{d}"] == {tiles_bytes}
        assert 16 * warps * row_bytes <= tiles_bytes, "queries are laid over them first"

    c = constants("vision_attention_warpgroup")
    for d in cuda_vision.WARPGROUP_HEAD_DIMS:
        # 64 channels of keys, values and queries; then, 16 bytes of all rows together, those past them.
        row_bytes, tail = c["kSwizzledRow"], d - c["kPanel"]
        k_tail = q_tail = -(-tail // 16) * 32
        stage_bytes = c["kKeys"] * (2 * row_bytes + k_tail + 2 * tail) + 2 * 16
        whole = c["kStages"] * (-(-stage_bytes // 1024) * 1024) + c["kQueries"] * (row_bytes + q_tail) + 16
        whole += 2 * c["kStages"] * 8
        assert asked[f"attend_patches_warpgroups_{d}"] == {-(-whole // 1024) * 1024}

    for d, (group, _) in product(cuda_token.HEAD_DIMS, GROUPS):
        token = "token_int8_boxed"
        assert token_cuts.few_queries_bytes(d) == few_queries_bytes(token, "f16", d)
        parts_bytes = 4 * c["kSubtiles"] * group * d
        assert token_cuts.few_weights_bytes(d, group) == few_weights_bytes(token) + parts_bytes
        merge_bytes = struct_bytes(token, "MergeRoom", d) + 16 * constants(token)["kMergedSplits"]
        assert merge_bytes <= few_weights_bytes(token), "splits are merged where weights were"

    c = constants("token_int8_one_split")
    row = c["kSwizzledRow"] * (d := token_cuts.BOXED_HEAD_DIM) // c["kPanelChannels"]
    assert token_cuts.boxes_of("boxed", d) == token_cuts.KvBoxes(c["kSubtile"] * row, c["kSubtiles"], c["kMostKvSlots"])
    slice_bytes = c["kSubtile"] * (row + c["kSliceRow"])
    assert token_cuts.boxes_of("one_split", d) == token_cuts.KvBoxes(slice_bytes, c["kSubtiles"], c["kSubtiles"])
    assert c["kWordsOfGroup"] * 16 == cuda_token.GROUP_WORDS * 8
    laid_out = {name: struct_bytes("token_int8_one_split", name, d) for name in ("SliceWeights", "SliceQueries")}
    assert laid_out["SliceWeights"] <= token_cuts.few_weights_bytes(d, 1)
    assert laid_out["SliceQueries"] + 2 * d <= token_cuts.few_queries_bytes(d)
