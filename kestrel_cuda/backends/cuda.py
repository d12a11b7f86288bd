"""The steps of a layer as kernel launches on one stream of one GPU. Compared with backends/cpu.py, its definition.

Which kernel runs depends on the number of rows; the bits of a row's result do not (see kernels/gemv.cu and
kernels/attention.cu for the orders of summation they share).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.errors import DeviceError, InternalError

try:
    import cupy
    from cupy.cuda import runtime
except ImportError as error:
    raise DeviceError(f"CuPy cannot be imported ({error}); pip install cupy-cuda12x brings it") from error

from kestrel_cuda.backends.base import (
    Activation,
    DeviceWeight,
    HeadShape,
    KvLayer,
    MemoryInfo,
    SequenceState,
    Slab,
    new_activation,
)
from kestrel_cuda.backends.cuda_memory import DeviceMemory, page_aligned
from kestrel_cuda.backends.cuda_packer import CudaPacker
from kestrel_cuda.backends.driver_memory import used_bytes
from kestrel_cuda.kernels.library import KernelLibrary
from kestrel_cuda.quant.grouped import ACTIVATION_GROUP
from kestrel_cuda.quant.packed import Element, SlabLayout

LEAST_COMPUTE_CAPABILITY = 80
HEAD_DIMS = (16, 32, 64, 128)
MAX_QUERIES_PER_KV = 32

# Sizes shared with the kernels; tests/kernels/test_signatures.py reads them out of the sources.
SPLIT_SLOTS = 256
SPLIT_MAX_ROWS = 8
TILED_ROWS = 32
TILE_M, TILE_N = 64, 128
PIECE_INPUTS = 128
MAX_ROWS_KERNEL = 4
MAX_WARPS = 16
FLOAT_ROWS = 8

_TABLE_KINDS = {np.dtype(np.uint16): 0, np.dtype(np.float16): 1, np.dtype(np.float32): 2}
_WEIGHT_KINDS = {Element.BF16: 0, Element.F16: 1, Element.F32: 2}


@dataclass(frozen=True)
class SlabEvents:
    """`ready`: the last upload has arrived. `read`: the steps that read the slab before it was released are done."""

    ready: Any
    read: Any


class CudaBackend:
    """One GPU. Raises DeviceError when it is missing, too old, or the driver cannot be used."""

    name = "cuda"
    num_load_threads = 1
    can_capture = True

    def __init__(self, device: int = 0, *, cubin_dir: Path | None = None) -> None:
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            raise DeviceError(f"no usable NVIDIA GPU: {error}") from None
        if not 0 <= device < count:
            raise DeviceError(f"there is no GPU {device}; this machine has {count} (numbered from 0)")
        pci_bus_id = runtime.deviceGetPCIBusId(device)
        used_before_bytes = used_bytes(pci_bus_id)
        properties = runtime.getDeviceProperties(device)
        self.device_name = properties["name"].decode()
        self.compute_capability = properties["major"] * 10 + properties["minor"]
        if self.compute_capability < LEAST_COMPUTE_CAPABILITY:
            raise DeviceError(
                f"{self.device_name} has compute capability {properties['major']}.{properties['minor']}; "
                "8.0 or newer is needed (Ampere, 2020)"
            )
        self.num_multiprocessors = properties["multiProcessorCount"]
        cupy.cuda.Device(device).use()
        self.device_memory = DeviceMemory(device, used_before_bytes, pci_bus_id)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.copy_stream = cupy.cuda.Stream(non_blocking=True)
        self.kernels = KernelLibrary(self.stream, cubin_dir)
        self._attention: tuple[Any, Any, Any, Any] | None = None
        self._best = self.zeros((256,), np.float32)
        self._best_id = self.zeros((256,), np.int32)

    # memory

    def memory(self) -> MemoryInfo:
        return self.device_memory.info()

    def reset_peak(self) -> None:
        self.device_memory.peak_bytes = self.device_memory.allocated_bytes

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        array = self.device_memory.array(shape, dtype)
        self.fill_zero(array)
        return array

    def free(self, array: Any) -> None:
        self.synchronize()
        self.device_memory.free(array)

    def fill_zero(self, array: Any) -> None:
        array.data.memset_async(0, array.nbytes, self.stream)

    def to_device(self, array: NDArray[Any]) -> Any:
        target = self.device_memory.array(array.shape, array.dtype)
        self.write(target, array)
        return target

    def to_host(self, array: Any) -> NDArray[Any]:
        if not array.flags.c_contiguous:
            raise InternalError("only contiguous device arrays can be copied to the host")
        host = np.empty(array.shape, array.dtype)
        if host.nbytes:
            array.data.copy_to_host_async(ctypes.c_void_p(host.ctypes.data), host.nbytes, self.stream)
        self.stream.synchronize()
        return host

    def write(self, target: Any, source: NDArray[Any]) -> None:
        if target.nbytes != source.nbytes or not target.flags.c_contiguous:
            raise InternalError(f"cannot write {source.nbytes} bytes over {target.nbytes}")
        source = np.ascontiguousarray(source)
        if source.nbytes:
            target.data.copy_from_host_async(ctypes.c_void_p(source.ctypes.data), source.nbytes, self.stream)
        self.stream.synchronize()

    def copy(self, target: Any, source: Any) -> None:
        if target.nbytes != source.nbytes or not (target.flags.c_contiguous and source.flags.c_contiguous):
            raise InternalError(f"cannot copy {source.nbytes} bytes over {target.nbytes}, or not in one piece")
        target.data.copy_from_device_async(source.data, source.nbytes, self.stream)

    def map_host(self, array: NDArray[Any]) -> Any:
        held = page_aligned(array.nbytes).view(array.dtype).reshape(array.shape)
        held[...] = array
        if not self.device_memory.pin(held, mapped=True):
            raise DeviceError(f"the driver refused to map {held.nbytes} bytes of host memory for the embeddings")
        return self.device_memory.view_of_host(held)

    def allocate_slab(self, layout: SlabLayout) -> Slab:
        raw = self.zeros((layout.num_bytes,), np.uint8)
        weights = {}
        for entry in layout.entries:
            geometry = entry.geometry
            codes = raw[entry.codes_offset : entry.codes_offset + geometry.codes_bytes]
            codes_kn = codes.view(geometry.codes_dtype).reshape(geometry.codes_shape)
            scales = raw[entry.scales_offset : entry.scales_offset + geometry.scales_bytes]
            scales_gn = scales.view(np.float16).reshape(geometry.scales_shape) if geometry.element.is_grouped else None
            weights[entry.key.projection] = DeviceWeight(geometry, codes_kn, scales_gn)
        events = SlabEvents(cupy.cuda.Event(disable_timing=True), cupy.cuda.Event(disable_timing=True))
        events.read.record(self.stream)
        return Slab(layout, raw, weights, events)

    def free_slab(self, slab: Slab) -> None:
        self.synchronize()
        self.device_memory.free(slab.raw)

    def host_slab(self, layout: SlabLayout) -> NDArray[np.uint8]:
        host = page_aligned(layout.num_bytes)
        host.fill(0)
        self.device_memory.pin(host)
        return host

    def upload(self, slab: Slab, host: NDArray[np.uint8]) -> None:
        self.copy_stream.wait_event(slab.events.read)
        slab.raw.data.copy_from_host_async(ctypes.c_void_p(host.ctypes.data), host.nbytes, self.copy_stream)
        slab.events.ready.record(self.copy_stream)

    def wait_upload(self, slab: Slab) -> None:
        self.stream.wait_event(slab.events.ready)

    def uploads_done(self) -> Callable[[], None]:
        event = cupy.cuda.Event(disable_timing=True)
        event.record(self.copy_stream)
        return event.synchronize  # type: ignore[no-any-return]

    def release(self, slab: Slab) -> None:
        slab.events.read.record(self.stream)

    def download(self, host: NDArray[np.uint8], slab: Slab) -> None:
        slab.raw.data.copy_to_host_async(ctypes.c_void_p(host.ctypes.data), host.nbytes, self.stream)
        self.stream.synchronize()

    def packer(self) -> CudaPacker:
        return CudaPacker(self)

    def host_pinned_bytes(self) -> int:
        return self.device_memory.pinned_bytes

    # time

    def mark(self) -> Any:
        event = cupy.cuda.Event()
        event.record(self.stream)
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end))

    def synchronize(self) -> None:
        self.copy_stream.synchronize()
        self.stream.synchronize()

    def capture(self, steps: Callable[[], None]) -> Callable[[], None]:
        self.stream.begin_capture()
        try:
            steps()
        finally:
            graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)

    def read_rate_gb_per_s(self, num_bytes: int = 1 << 30) -> float | None:
        """Median rate of reading `num_bytes` of device memory once (10^9 bytes a second), scratch freed again.

        None when that much is not free.
        """
        if runtime.memGetInfo()[0] < 2 * num_bytes:
            return None
        data = self.zeros((num_bytes,), np.uint8)
        grid = (self.num_multiprocessors * 4,)
        times_ms = []
        for _ in range(7):
            start = self.mark()
            self.kernels["read_vectors"](
                grid, (512,), data=data, out=self._best_id.view(np.uint32), num_vectors=num_bytes // 16
            )
            times_ms.append(self.elapsed_ms(start, self.mark()))
        self.device_memory.free(data)
        return num_bytes / float(np.median(times_ms[2:])) / 1e6

    def link_rate_gb_per_s(self, num_bytes: int = 256 << 20) -> float:
        """Median rate of copies of `num_bytes` from pinned host memory (10^9 bytes a second), scratch freed again."""
        host = page_aligned(num_bytes)
        host.fill(0)
        pinned = self.device_memory.pin(host)
        device = self.device_memory.array((num_bytes,), np.uint8)
        times_ms = []
        for _ in range(7):
            start = self.mark()
            device.data.copy_from_host_async(ctypes.c_void_p(host.ctypes.data), num_bytes, self.stream)
            times_ms.append(self.elapsed_ms(start, self.mark()))
        self.device_memory.free(device)
        if pinned:
            self.device_memory.unpin(host)
        return num_bytes / float(np.median(times_ms[2:])) / 1e6

    # steps

    def activation(self, max_rows: int, num_inputs: int, quantized: bool) -> Activation:
        return new_activation(self.zeros, max_rows, num_inputs, quantized)

    def embed(self, table: Any, state: SequenceState, h_mk: Any, num_rows: int) -> None:
        self.kernels["embed_rows"](
            (num_rows,), (256,), table=table, tokens=state.tokens, position=state.position, h_mk=h_mk,
            table_kind=_TABLE_KINDS[table.dtype], k=h_mk.shape[1],
        )  # fmt: skip

    def norm(self, h_mk: Any, weight_k: Any, eps: float, out: Activation, num_rows: int) -> None:
        k = out.num_inputs
        if out.codes_mk is None:
            self.kernels["rms_norm"](
                (num_rows,), (256,), h_mk=h_mk, weight_k=weight_k, y_mk=out.values_mk, k=k, eps=eps
            )
        else:
            self.kernels["rms_norm_quantize"](
                (num_rows,), (256,), h_mk=h_mk, weight_k=weight_k, codes_mk=out.codes_mk, scales_mg=out.scales_mg, k=k,
                k_padded=out.codes_mk.shape[1], eps=eps,
            )  # fmt: skip

    def linear(
        self, x: Activation, weight: DeviceWeight, out_mn: Any, num_rows: int, *, column: int = 0, add: bool = False
    ) -> None:
        geometry = weight.geometry
        out = out_mn if column == 0 else out_mn.reshape(-1)[column:]
        common = {"out_mn": out, "m": num_rows, "n": geometry.num_outputs, "n_padded": geometry.n_padded,
                  "ldo": out_mn.shape[1], "residual": int(add)}  # fmt: skip
        if weight.scales_gn is None:
            warps = min(MAX_WARPS, max(1, -(-geometry.num_inputs // PIECE_INPUTS)))
            self.kernels["linear_float"](
                (-(-geometry.n_padded // 32), -(-num_rows // FLOAT_ROWS)), (32 * max(warps, FLOAT_ROWS),),
                x_mk=x.values_mk, values_kn=weight.codes_kn, weight_kind=_WEIGHT_KINDS[geometry.element],
                k=geometry.num_inputs, **common,
            )  # fmt: skip
            return
        assert x.codes_mk is not None
        suffix = geometry.element.value
        common |= {"x_codes": x.codes_mk, "x_scales": x.scales_mg, "codes_kn": weight.codes_kn,
                   "scales_gn": weight.scales_gn, "k_padded": geometry.k_padded,
                   "groups_per_scale": geometry.group_size // ACTIVATION_GROUP}  # fmt: skip
        if num_rows > MAX_ROWS_KERNEL:
            kernel = self.kernels[f"linear_tiles_{suffix}"]
            shared_bytes = _tiles_shared_bytes(8 if geometry.element is Element.INT8 else 4)
            grid = (-(-geometry.n_padded // TILE_N), -(-num_rows // TILE_M))
            kernel(grid, (256,), shared_bytes=shared_bytes, **common)
            return
        rows = 1 if num_rows == 1 else 2 if num_rows == 2 else 4
        warps = max(min(MAX_WARPS, -(-geometry.k_padded // PIECE_INPUTS)), rows)
        grid = (-(-geometry.n_padded // 32), -(-num_rows // rows))
        self.kernels[f"linear_rows{rows}_{suffix}"](grid, (32 * warps,), **common)

    def rope_store(
        self, qkv_mn: Any, q_norm_d: Any, k_norm_d: Any, heads: HeadShape, state: SequenceState, kv: KvLayer,
        q_mhd: Any, num_rows: int,
    ) -> None:  # fmt: skip
        self.kernels["qk_norm_rope_store"](
            (-(-(heads.num_heads + 2 * heads.num_kv_heads) // 8), num_rows), (256,), qkv=qkv_mn, q_norm_d=q_norm_d,
            k_norm_d=k_norm_d, cos_sd=state.cos_sd, sin_sd=state.sin_sd, position=state.position, q_mhd=q_mhd,
            k_hsd=kv.k_hsd, v_hsd=kv.v_hsd, ld=qkv_mn.shape[1], k_column=heads.k_column, v_column=heads.v_column,
            num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim,
            ctx=kv.k_hsd.shape[1], kv_kind=_TABLE_KINDS[kv.k_hsd.dtype], eps=heads.norm_eps,
        )  # fmt: skip

    def check_heads(self, head_dim: int, queries_per_kv: int) -> None:
        if head_dim not in HEAD_DIMS or queries_per_kv > MAX_QUERIES_PER_KV:
            raise DeviceError(
                f"this checkpoint has a head_dim of {head_dim} and {queries_per_kv} query heads a kv head; the GPU "
                f"kernels take {', '.join(map(str, HEAD_DIMS))} and up to {MAX_QUERIES_PER_KV}: use --backend cpu"
            )

    def reserve_attention(self, heads: HeadShape, max_rows: int, ctx: int) -> None:
        rows, splits = min(max_rows, SPLIT_MAX_ROWS), -(-ctx // SPLIT_SLOTS)
        stats = (rows, heads.num_heads, splits)
        self._attention = (
            self.zeros(stats, np.float32),
            self.zeros(stats, np.float32),
            self.zeros((*stats, heads.head_dim), np.float32),
            self.zeros((max_rows, heads.num_heads * heads.head_dim), np.float32),
        )

    def attend(
        self, q_mhd: Any, kv: KvLayer, heads: HeadShape, state: SequenceState, out: Activation, num_rows: int,
        num_slots: int,
    ) -> None:  # fmt: skip
        assert self._attention is not None
        max_mhs, sum_mhs, out_mhsd, joined = self._attention
        target = joined if out.values_mk is None else out.values_mk
        d, group = heads.head_dim, heads.queries_per_kv
        suffix = f"{'f16' if kv.k_hsd.dtype == np.float16 else 'f32'}_{d}"
        k_hsd, v_hsd = (a.view(np.uint16) if a.dtype == np.float16 else a for a in (kv.k_hsd, kv.v_hsd))
        common = {"q_mhd": q_mhd, "k_hsd": k_hsd, "v_hsd": v_hsd, "position": state.position,
                  "queries_per_kv": group, "ctx": kv.k_hsd.shape[1], "scale": d**-0.5}  # fmt: skip
        if num_rows <= SPLIT_MAX_ROWS:
            num_splits = -(-num_slots // SPLIT_SLOTS)
            shared_bytes = 4 * (group * (d + SPLIT_SLOTS) + 512)
            kernel = self.kernels[f"attend_split_{suffix}"]
            kernel(
                (num_splits, heads.num_kv_heads, num_rows), (256,), shared_bytes=shared_bytes, max_mhs=max_mhs,
                sum_mhs=sum_mhs, out_mhsd=out_mhsd, **common,
            )  # fmt: skip
            self.kernels["attend_merge"](
                (-(-heads.num_heads * d // 256), num_rows), (256,), max_mhs=max_mhs, sum_mhs=sum_mhs, out_mhsd=out_mhsd,
                position=state.position, out_mhd=target, num_heads=heads.num_heads, head_dim=d, num_splits=num_splits,
            )  # fmt: skip
        else:
            item = kv.k_hsd.dtype.itemsize
            floats = TILED_ROWS * (d + 4) + TILED_ROWS * (SPLIT_SLOTS + 4) + 4 * TILED_ROWS
            shared_bytes = 4 * floats + 64 * (d + 16 // item) * item
            kernel = self.kernels[f"attend_tiled_{suffix}"]
            grid = (-(-num_rows // (TILED_ROWS // group)), heads.num_kv_heads)
            kernel(grid, (256,), shared_bytes=shared_bytes, out_mhd=target, m=num_rows, **common)
        if out.codes_mk is not None:
            self._quantize(target, out, num_rows)

    def _quantize(self, x_mk: Any, out: Activation, num_rows: int) -> None:
        assert out.codes_mk is not None
        k_padded = out.codes_mk.shape[1]
        self.kernels["quantize_rows"](
            (-(-k_padded // 256), num_rows), (256,), x_mk=x_mk, codes_mk=out.codes_mk, scales_mg=out.scales_mg,
            k=out.num_inputs, k_padded=k_padded,
        )  # fmt: skip

    def silu_mul(self, gate_up_mn: Any, up_column: int, out: Activation, num_rows: int) -> None:
        k, ld = out.num_inputs, gate_up_mn.shape[1]
        if out.codes_mk is None:
            self.kernels["silu_mul_rows"](
                (-(-k // 256), num_rows),
                (256,),
                gate_up=gate_up_mn,
                y_mk=out.values_mk,
                k=k,
                ld=ld,
                up_column=up_column,
            )
        else:
            k_padded = out.codes_mk.shape[1]
            self.kernels["silu_mul_quantize"](
                (-(-k_padded // 256), num_rows), (256,), gate_up=gate_up_mn, codes_mk=out.codes_mk,
                scales_mg=out.scales_mg, k=k, k_padded=k_padded, ld=ld, up_column=up_column,
            )  # fmt: skip

    def choose(self, logits_v: Any, num_ids: int, state: SequenceState, num_rows: int) -> None:
        blocks = min(256, -(-num_ids // 256))
        self.kernels["argmax_partial"](
            (blocks,), (256,), logits_v=logits_v, best_b=self._best, best_id_b=self._best_id, v=num_ids
        )
        self.kernels["argmax_final"](
            (1,), (256,), best_b=self._best, best_id_b=self._best_id, tokens=state.tokens, position=state.position,
            chosen=state.chosen, num_blocks=blocks, num_rows=num_rows,
        )  # fmt: skip

    def advance(self, state: SequenceState, num_rows: int) -> None:
        self.kernels["advance_position"]((1,), (1,), position=state.position, num_rows=num_rows)

    def close(self) -> None:
        self.synchronize()
        self.device_memory.close()


def _tiles_shared_bytes(words_per_group: int) -> int:
    """Two stages of gemm.cu's `Stage`."""
    groups = PIECE_INPUTS // ACTIVATION_GROUP
    x = TILE_M * (PIECE_INPUTS // 4 + 8) * 4
    w = groups * words_per_group * (TILE_N + 4) * 4
    return 2 * (x + w + groups * TILE_N * 2 + TILE_M * groups * 4)
