"""Memory of a backend: bytes counted as they come and go, copies both ways, and what happens when there is no room."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.errors import DeviceError
from kestrel_cuda.quant.packed import Element, PackedGeometry, SlabLayout, slab_layout
from kestrel_cuda.weight_keys import Projection, WeightKey
from tests.backends.arrays import normal, rng

MIB = 1 << 20
# malloc takes pages of their own for arrays of this size, and two registered arrays must not share a page.
OWN_PAGES_BYTES = 32 * MIB


def layout(num_outputs: int = 64) -> SlabLayout:
    return slab_layout(
        0,
        [
            (WeightKey(0, Projection.QKV), PackedGeometry(Element.INT8, 512, num_outputs, 32)),
            (WeightKey(0, Projection.O), PackedGeometry(Element.BF16, 64, 7)),
        ],
    )


class TestEveryBackend:
    def test_arrays_are_counted_to_the_byte(self, backend: Backend) -> None:
        before = backend.memory().allocated_bytes
        arrays = [backend.zeros((3, 5), np.float32), backend.to_device(np.ones(7, np.int8))]
        after = backend.memory()
        assert after.allocated_bytes - before == 60 + 7
        assert after.peak_allocated_bytes >= after.allocated_bytes
        for array in arrays:
            backend.free(array)
        assert backend.memory().allocated_bytes == before

    def test_the_peak_can_be_counted_anew(self, backend: Backend) -> None:
        backend.free(backend.zeros((MIB,), np.uint8))
        backend.reset_peak()
        before = backend.memory()
        assert before.peak_allocated_bytes == before.allocated_bytes
        backend.free(backend.zeros((1000,), np.uint8))
        after = backend.memory()
        assert after.allocated_bytes == before.allocated_bytes
        assert after.peak_allocated_bytes == before.allocated_bytes + 1000

    def test_a_slab_gives_back_what_it_took(self, backend: Backend) -> None:
        before = backend.memory().allocated_bytes
        slabs = [backend.allocate_slab(layout()) for _ in range(3)]
        assert backend.memory().allocated_bytes - before == 3 * layout().num_bytes
        peak = backend.memory().peak_allocated_bytes
        for slab in slabs:
            backend.free_slab(slab)
        after = backend.memory()
        assert after.allocated_bytes == before
        assert after.peak_allocated_bytes == peak, "the peak stays"

    def test_free_and_total_are_this_machines(self, backend: Backend) -> None:
        memory = backend.memory()
        assert 0 < memory.free_bytes <= memory.total_bytes

    @pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.uint16, np.int32])
    def test_zeros_are_zeros(self, backend: Backend, dtype: type[np.generic]) -> None:
        host = backend.to_host(backend.zeros((17, 33), dtype))
        assert host.shape == (17, 33)
        assert host.dtype == dtype
        assert not host.any()

    def test_arrays_go_up_and_come_back(self, backend: Backend) -> None:
        values = normal(rng(1), 70, 90)
        device = backend.to_device(values.copy())
        assert (backend.to_host(device) == values).all()
        transposed = backend.to_device(values.T)
        assert (backend.to_host(transposed) == values.T).all(), "any memory order may be sent"
        assert (backend.to_host(device[3:9]) == values[3:9]).all()

    def test_what_comes_back_is_a_copy(self, backend: Backend) -> None:
        device = backend.zeros((4,), np.float32)
        backend.to_host(device)[:] = 1
        assert not backend.to_host(device).any()

    def test_part_of_an_array_can_be_written_and_copied(self, backend: Backend) -> None:
        device = backend.zeros((4, 5), np.float32)
        backend.write(device[1:3], np.ones((2, 5), np.float32))
        assert backend.to_host(device).sum(axis=1).tolist() == [0, 5, 5, 0]
        other = backend.zeros((2, 5), np.float32)
        backend.copy(other, device[2:])
        assert backend.to_host(other).sum(axis=1).tolist() == [5, 0]

    def test_slabs_are_uploaded_and_downloaded_whole(self, backend: Backend) -> None:
        host = backend.host_slab(layout())
        assert host.shape == (layout().num_bytes,)
        assert not host.any()
        host[:] = rng(2).integers(0, 256, host.size, np.uint8)
        slab = backend.allocate_slab(layout())
        assert not backend.to_host(slab.raw).any(), "a new slab is zeros: pad columns are never written"
        backend.upload(slab, host)
        backend.wait_upload(slab)
        back = backend.host_slab(layout())
        backend.download(back, slab)
        assert (back == host).all()
        codes = backend.to_host(slab.weights[Projection.QKV].codes_kn)
        assert (codes.reshape(-1).view(np.uint8) == host[: codes.nbytes]).all(), "weights are views of the slab"
        assert slab.weights[Projection.O].scales_gn is None
        backend.free_slab(slab)

    def test_uploads_into_one_slab_keep_their_order(self, backend: Backend) -> None:
        """What was submitted before a release still reads the old bytes, what waits for the upload the new ones."""
        slab, copies = backend.allocate_slab(layout()), []
        for value in (1, 2, 3):
            host = backend.host_slab(layout())
            host[:] = value
            backend.upload(slab, host)
            backend.wait_upload(slab)
            copies.append(backend.zeros((layout().num_bytes,), np.uint8))
            backend.copy(copies[-1], slab.raw)
            backend.release(slab)
        assert [set(backend.to_host(copy).tolist()) for copy in copies] == [{1}, {2}, {3}]
        backend.free_slab(slab)

    def test_a_host_array_can_be_mapped(self, backend: Backend) -> None:
        values = np.zeros((OWN_PAGES_BYTES // 100, 64), np.uint16)
        mapped = backend.map_host(values)
        assert mapped.shape == values.shape
        assert mapped.dtype == values.dtype

    def test_memory_shared_with_the_host_is_none_of_the_device(self, backend: Backend) -> None:
        before = backend.memory().allocated_bytes
        shared = backend.shared_zeros((3, 5), np.float32)
        seen = backend.peek(shared)
        assert (shared.shape, shared.dtype, shared.nbytes) == (seen.shape, seen.dtype, seen.nbytes)
        assert not seen.any()
        assert backend.memory().allocated_bytes == before
        rows = normal(rng(3), 3, 5)
        backend.add(shared, backend.to_device(rows))
        backend.wait(backend.mark())
        assert (seen == rows).all()

    def test_a_mark_follows_another(self, backend: Backend) -> None:
        start = backend.mark()
        backend.zeros((1000,), np.float32)
        elapsed_ms = backend.elapsed_ms(start, backend.mark())
        assert 0 <= elapsed_ms < 10_000
        backend.synchronize()


def test_the_cpu_pins_nothing_and_reads_at_no_rate(cpu_backend: Backend) -> None:
    cpu_backend.host_slab(layout())
    assert cpu_backend.host_pinned_bytes() == 0
    assert cpu_backend.read_rate_gb_per_s() is None
    assert cpu_backend.link_rate_gb_per_s() is None


class TestSharedMemory:
    """Of the CUDA device with a runtime that maps, or refuses to; needs CuPy but no GPU."""

    @pytest.fixture
    def device(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
        pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
        from kestrel_cuda.backends import cuda_device, cuda_memory

        def register(address: int, num_bytes: int, flags: int) -> None:
            assert flags == cuda_memory._REGISTER_MAPPED
            if request.param == "refuses":
                raise RuntimeError

        runtime = SimpleNamespace(
            hostRegister=register, hostUnregister=lambda address: None, CUDARuntimeError=RuntimeError
        )
        monkeypatch.setattr(cuda_memory, "runtime", runtime)
        memory = cuda_memory.DeviceMemory.__new__(cuda_memory.DeviceMemory)
        memory._device, memory._live, memory._registered, memory.pinned_bytes = 0, {}, {}, 0
        device = cuda_device.CudaDevice.__new__(cuda_device.CudaDevice)
        device.device_memory = memory
        return device

    @pytest.mark.parametrize("device", ["maps"], indirect=True)
    def test_the_host_s_view_is_of_the_same_bytes(self, device: Any) -> None:
        arrays = [device.shared_zeros((4,), np.int32), device.shared_zeros((2, 3), np.float16)]
        for array in arrays:
            seen = device.peek(array)
            assert (seen.shape, seen.dtype) == (array.shape, array.dtype)
            assert seen.ctypes.data == array.data.ptr
            assert not seen.any()
        assert device.host_pinned_bytes() == 16 + 12
        device.device_memory.close()
        assert device.host_pinned_bytes() == 0

    @pytest.mark.parametrize("device", ["refuses"], indirect=True)
    def test_a_driver_that_refuses_to_map_is_said(self, device: Any) -> None:
        with pytest.raises(DeviceError, match=r"refused to map 16 bytes of host memory .*; free host memory, or raise"):
            device.shared_zeros((4,), np.int32)
        assert device.host_pinned_bytes() == 0


@pytest.mark.cuda
class TestDevice:
    def test_every_allocation_and_free_is_counted(self, cuda_backend: Backend) -> None:
        memory = cuda_backend.device_memory  # type: ignore[attr-defined]
        allocations, frees, bytes_before = memory.num_allocations, memory.num_frees, memory.allocated_bytes
        first = memory.array((1000,), np.float32)
        second = cuda_backend.zeros((3,), np.int8)
        assert memory.num_allocations - allocations == 2
        assert memory.allocated_bytes - bytes_before == 4003
        memory.free(first)
        memory.free(second)
        assert memory.num_frees - frees == 2
        assert memory.allocated_bytes == bytes_before

    def test_freed_memory_is_back_with_the_driver(self, cuda_backend: Backend) -> None:
        memory = cuda_backend.device_memory  # type: ignore[attr-defined]
        free_before = cuda_backend.memory().free_bytes
        array = memory.array((256 * MIB,), np.uint8)
        assert cuda_backend.memory().free_bytes <= free_before - 256 * MIB
        memory.free(array)
        assert cuda_backend.memory().free_bytes >= free_before

    def test_no_room_is_said_with_numbers_and_does_no_harm(self, cuda_backend: Backend) -> None:
        memory = cuda_backend.device_memory  # type: ignore[attr-defined]
        before = (memory.num_allocations, memory.allocated_bytes, memory.peak_bytes)
        with pytest.raises(DeviceError) as raised:
            cuda_backend.zeros((1 << 50,), np.uint8)
        message = str(raised.value)
        assert re.search(r"give 1024\.00 TiB: [\d.]+ \w+ of [\d.]+ \w+ are free, [\d.]+ \w+ are in use", message)
        assert "\n" not in message
        assert "--keep" in message
        assert (memory.num_allocations, memory.allocated_bytes, memory.peak_bytes) == before
        assert cuda_backend.to_host(cuda_backend.zeros((8,), np.float32)).tolist() == [0] * 8

    def test_host_slabs_and_mapped_arrays_are_pinned_to_the_byte(self, cuda_backend: Backend) -> None:
        before = cuda_backend.host_pinned_bytes()
        # D18: just over a power of two, an allocator that rounds up to the next would nearly double it.
        wide = layout(num_outputs=61700)
        assert OWN_PAGES_BYTES < wide.num_bytes < OWN_PAGES_BYTES * 1.01
        slabs = [cuda_backend.host_slab(wide) for _ in range(3)]
        assert cuda_backend.host_pinned_bytes() - before == 3 * wide.num_bytes
        assert all(slab.nbytes == wide.num_bytes for slab in slabs)
        cuda_backend.map_host(np.zeros((OWN_PAGES_BYTES // 100, 64), np.float16))
        mapped_bytes = OWN_PAGES_BYTES // 100 * 128
        assert cuda_backend.host_pinned_bytes() - before == 3 * wide.num_bytes + mapped_bytes

    def test_arrays_of_another_size_or_order_are_refused(self, cuda_backend: Backend) -> None:
        from kestrel_cuda.errors import InternalError

        device = cuda_backend.zeros((4, 6), np.float32)
        with pytest.raises(InternalError, match="cannot write 4 bytes over 96"):
            cuda_backend.write(device, np.zeros(1, np.float32))
        with pytest.raises(InternalError, match="cannot write"):
            cuda_backend.write(device[:, 1:3], np.zeros((4, 2), np.float32))
        with pytest.raises(InternalError, match="contiguous"):
            cuda_backend.to_host(device[:, 1:3])
        with pytest.raises(InternalError, match="cannot copy 24 bytes over 96"):
            cuda_backend.copy(device, device[0])

    def test_measuring_rates_leaves_no_scratch_behind(self, cuda_backend: Backend, figures: dict[str, float]) -> None:
        before, pinned = cuda_backend.memory().allocated_bytes, cuda_backend.host_pinned_bytes()
        read, link = cuda_backend.read_rate_gb_per_s(), cuda_backend.link_rate_gb_per_s()
        assert read is not None
        assert link is not None
        assert 50 < read < 20_000
        assert 1 < link < read
        assert cuda_backend.memory().allocated_bytes == before
        assert cuda_backend.host_pinned_bytes() == pinned
        figures["read_rate_gb_per_s"] = round(read, 1)
        figures["link_rate_gb_per_s"] = round(link, 1)

    @pytest.fixture
    def other_backend(self, cuda_backend: Backend, pytestconfig: pytest.Config) -> Iterator[Backend]:
        """A second backend to close; CuPy's allocator goes back to the first one."""
        import cupy

        from kestrel_cuda.backends import open_backend

        allocator = cupy.cuda.get_allocator()
        yield open_backend("cuda", cubin_dir=pytestconfig.getoption("--cubins"))
        cupy.cuda.set_allocator(allocator)

    def test_a_second_backend_counts_the_context_that_was_there(
        self, cuda_backend: Backend, other_backend: Backend
    ) -> None:
        first, second = cuda_backend.memory().context_bytes, other_backend.memory().context_bytes
        assert second >= first > 50 * MIB
        other_backend.close()

    def test_closing_gives_everything_back(self, other_backend: Backend) -> None:
        other_backend.zeros((5 * MIB,), np.uint8)
        other_backend.allocate_slab(layout())
        other_backend.host_slab(layout())
        other_backend.shared_zeros((4,), np.int32)
        assert other_backend.memory().allocated_bytes > 5 * MIB
        other_backend.close()
        assert other_backend.memory().allocated_bytes == 0
        assert other_backend.host_pinned_bytes() == 0

    def test_steps_can_be_captured_and_replayed(self, cuda_backend: Backend) -> None:
        from tests.backends.arrays import sequence_state

        state = sequence_state(cuda_backend, 50, 3)
        logits = cuda_backend.to_device(np.array([0, 2, 1], np.float32))
        cuda_backend.choose(logits, 3, state, 1)  # compiled before the capture
        replay = cuda_backend.capture(lambda: cuda_backend.choose(logits, 3, state, 1))
        memory = cuda_backend.device_memory  # type: ignore[attr-defined]
        before = (memory.num_allocations, memory.num_frees)
        for _ in range(5):
            replay()
        assert cuda_backend.to_host(state.position)[0] == 3 + 1 + 5, "a capture runs nothing, a replay once each"
        assert cuda_backend.to_host(state.tokens)[4:10].tolist() == [1] * 6
        assert (memory.num_allocations, memory.num_frees) == before
