"""A CUDA backend without a GPU, and calls of each of its steps over shapes that reach every kernel. Needs CuPy."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kestrel_cuda.backends.base import Slab, SourceMatrix
from kestrel_cuda.backends.composed import ComposedSteps
from kestrel_cuda.backends.operands import (
    CHOSEN_SLOTS,
    Activation,
    Decoder,
    DecoderLayer,
    DeviceWeight,
    HeadShape,
    KvLayer,
    SequenceState,
)
from kestrel_cuda.backends.vision import BFLOAT16, Affine, After
from kestrel_cuda.config import VisionConfig
from kestrel_cuda.kernels import launch
from kestrel_cuda.model.patch_positions import frame_places
from kestrel_cuda.quant.kv_rows import KV_GROUP
from kestrel_cuda.quant.packed import Element, PackedGeometry, entry_views, slab_layout
from kestrel_cuda.weight_keys import LM_HEAD
from tests.kernel_sources import FakeLibrary

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
            self._maps = SimpleNamespace(of=hollow_map)

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


def hollow_map(matrix: Any, box: tuple[int, int], *, swizzled: bool = False) -> Any:
    """No map, after a look at what the copy engine and the driver want of one."""
    columns_bytes, box_bytes = (length * matrix.dtype.itemsize for length in (matrix.shape[1], box[1]))
    assert columns_bytes % 16 == box_bytes % 16 == 0
    assert max(box) <= 256
    assert not swizzled or box_bytes == 128
    return np.zeros(1, launch.COPY_MAP)


def weight(geometry: PackedGeometry) -> DeviceWeight:
    scales = np.zeros(geometry.scales_shape, np.float16) if geometry.element.is_grouped else None
    return DeviceWeight(geometry, np.zeros(geometry.codes_shape, geometry.codes_dtype), scales)


def state(ctx: int, head_dim: int) -> SequenceState:
    table = np.zeros((ctx, head_dim // 2), np.float32)
    tokens, position, chosen = (np.zeros(length, np.int32) for length in (ctx + 1, 1, CHOSEN_SLOTS))
    return SequenceState(tokens, position, chosen, table, table)


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
    table = np.zeros((656, num_inputs), np.uint16)
    return Decoder((layer, layer), lm_head, norm, heads, table, row, np.zeros((1, 656), np.float32))


def int8_cache(head_dim: int) -> KvLayer:
    codes, scales = np.zeros((2, 700, head_dim), np.int8), np.zeros((2, 700, head_dim // KV_GROUP), np.float16)
    return KvLayer(codes, codes, scales, scales)


def run_whole_token(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kestrel_cuda.backends import cuda_token, token_cuts

    monkeypatch.setattr(cuda_token, "driver_bindings_work", lambda: True)
    monkeypatch.setattr(cuda_token, "copy_map", lambda array, cut, rows_per_piece: [0] * 16)
    monkeypatch.setattr(cuda_token, "kv_map", lambda rows_hsd, channels: [0] * 16)
    monkeypatch.setattr(cuda_token, "_beside", lambda layer: [0] * token_cuts.NUM_LAYER_POINTERS)
    monkeypatch.setattr(backend, "most_shared_bytes", COPYING_SHARED_BYTES)
    for element, head_dim in product((Element.INT8, Element.INT4), cuda_token.HEAD_DIMS):
        whole = decoder(element, head_dim)
        backend.reserve_attention(whole.heads, 1, 700)
        for embedding, most_kv_slots in product((whole.embedding, None), (0, token_cuts.MOST_KV_SLOTS)):
            with pytest.MonkeyPatch.context() as smaller:
                smaller.setattr(token_cuts, "MOST_KV_SLOTS", most_kv_slots)
                token = backend.whole_token(replace(whole, embedding=embedding))
            for num_slots in (256, 600):
                token(state(700, head_dim), num_slots)
            token.close()
        for served_elsewhere in (
            decoder(element, head_dim, num_inputs=192),
            decoder(element, head_dim, num_inputs=2 * token_cuts.MOST_NORM_INPUTS),
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
        values = np.zeros((2, 256), np.float32)
        for num_codes in (32, 64):
            backend.put_pixels(x, np.zeros((m, num_codes), np.uint8), values)
        norm = Affine(np.zeros(64, np.float32), np.zeros(64, np.float32))
        backend.layer_norm(h, norm, x)
        for after in After:
            out = np.zeros((m, 72), np.float32 if after is After.ADD else kind)
            backend.affine(x, Affine(np.zeros((72, 64), kind), np.zeros(72, np.float32)), out, after)
        # Wide enough for three wide tiles to be fewer columns one after another than five narrow ones.
        wide = Affine(np.zeros((576, 64), kind), np.zeros(576, np.float32))
        backend.affine(x, wide, np.zeros((m, 576), kind))
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


def launch_everything(cuda: Any) -> FakeLibrary:
    """Every step of the backend, over shapes that reach every kernel; `cuda` is the backend's module."""
    from kestrel_cuda.backends import cuda_attention, cuda_device

    kernels = FakeLibrary()
    backend = hollow_backend(cuda, kernels)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cuda_device, "runtime", SimpleNamespace(memGetInfo=lambda: (1 << 40, 1 << 40)))
        monkeypatch.setattr(cuda, "driver_bindings_work", lambda: True)
        for capability in (80, 90):
            monkeypatch.setattr(backend, "compute_capability", capability)
            run_linears(backend)
            run_attention(backend, cuda_attention.HEAD_DIMS)
            run_vision(backend)
        run_stretches(backend)
        run_whole_token(backend, monkeypatch)
        run_the_rest(backend)
        run_packer(backend, monkeypatch)
        backend.read_rate_gb_per_s(1 << 20)
    return kernels
