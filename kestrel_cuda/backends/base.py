"""The backend protocol: device memory, and the fused steps of a decoder layer. Knows nothing of checkpoints or windows.

The steps are what one kernel can do, not tensor algebra, so a backend may make each a single launch and a whole token a
single submission. `backends/cpu.py` is their definition in plain NumPy; operands.py has what they take, and the
axis letters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kestrel_cuda.backends.operands import (
    Activation,
    Array,
    Decoder,
    DeviceWeight,
    HeadShape,
    KvLayer,
    SequenceState,
    TokenShape,
)
from kestrel_cuda.backends.vision import VisionSteps
from kestrel_cuda.config import KvDtype
from kestrel_cuda.quant.packed import Element, SlabEntry, SlabLayout
from kestrel_cuda.weight_keys import Projection


@dataclass(frozen=True)
class MemoryInfo:
    """Device memory in bytes: what the driver says, and what this backend holds now and held at most.

    `context_bytes` is what the driver took for this process before anything was allocated.
    """

    free_bytes: int
    total_bytes: int
    allocated_bytes: int
    peak_allocated_bytes: int
    context_bytes: int


@dataclass(frozen=True)
class Slab:
    """Device bytes that hold every packed matrix of one layer; `layout.layer` is whoever used it first.

    `events` is the backend's own: when the bytes have arrived, and when their last reader is done.
    """

    layout: SlabLayout
    raw: Array
    weights: Mapping[Projection, DeviceWeight]
    events: Any = None


@dataclass(frozen=True)
class SourceMatrix:
    """A matrix as the checkpoint stores it: [N, K] of uint16 (bf16 bits), float16 or float32."""

    name: str
    data: NDArray[np.generic]


@dataclass(frozen=True)
class PackedTensor:
    """What packing found in one source matrix."""

    name: str
    num_nonfinite: int
    num_oversized_scales: int
    num_lost_groups: int


@dataclass(frozen=True)
class Preparation:
    """What is being made ready: `wait` for it, or `drop` what has not been begun."""

    wait: Callable[[], None]
    drop: Callable[[], None]


class WholeToken(Protocol):
    """Takes one row from its id, or from its embedding, through every layer to its logits in one submission."""

    def __call__(self, state: SequenceState, num_slots: int) -> None:
        """`num_slots` of the cache may be filled, the new one among them."""

    def close(self) -> None:
        """Give back its memory; nothing captured with it may be replayed again."""


class Packer(Protocol):
    """Turns source matrices into packed ones, with scratch memory of its own until closed."""

    def pack(self, slab: Slab, entry: SlabEntry, members: Sequence[SourceMatrix]) -> None:
        """Quantize `members` (rows of the same K) side by side into `entry` of `slab`."""

    def finish(self) -> list[PackedTensor]:
        """Wait for everything packed since the last call and say what was found, in order."""

    def close(self) -> None: ...


class Backend(VisionSteps, Protocol):
    """Device memory, the steps of a layer and those of the vision tower.

    Every step runs in submission order and may return before it is done.
    """

    name: str
    device_name: str
    num_load_threads: int
    can_capture: bool
    runs_ahead: bool
    """Whether steps return before they are done."""

    rows_are_independent: bool
    """Whether the bits of a row are the same whatever rows are beside it."""

    # memory
    def memory(self) -> MemoryInfo: ...
    def reset_peak(self) -> None:
        """Count the peak anew from what is allocated now."""

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array: ...
    def free(self, array: Array) -> None:
        """Give back an array that `zeros` or `to_device` made."""

    def to_device(self, array: NDArray[Any]) -> Array: ...
    def to_host(self, array: Array) -> NDArray[Any]: ...
    def write(self, target: Array, source: NDArray[Any]) -> None: ...
    def copy(self, target: Array, source: Array) -> None: ...
    def map_host(self, array: NDArray[Any]) -> Array:
        """An array that steps can read while its bytes stay in host memory."""

    def shared_zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Zeros in host memory that steps write and the host may read in place once they are done; held until `close`.

        Raises DeviceError when the driver refuses to map them.
        """

    def peek(self, array: Array) -> NDArray[Any]:
        """The host's own view of what `shared_zeros` made: no copy, no wait."""

    def allocate_slab(self, layout: SlabLayout) -> Slab: ...
    def slab_over(self, layout: SlabLayout, raw: Array) -> Slab:
        """A slab over bytes that are there already, of the backend's own kind of array."""

    def free_slab(self, slab: Slab) -> None: ...
    def host_slab(self, layout: SlabLayout) -> NDArray[np.uint8]: ...
    def upload(self, slab: Slab, host: NDArray[np.uint8]) -> None:
        """Start copying a host slab over, beside the steps; it begins once the slab's last readers are done."""

    def wait_upload(self, slab: Slab) -> None:
        """Make the steps submitted from here on wait for the slab's upload."""

    def uploads_done(self) -> Callable[[], None]:
        """A wait, for any thread, until every upload submitted so far has left host memory."""

    def release(self, slab: Slab) -> None:
        """Nothing submitted from here on reads the slab: a later upload into it waits only for what came before."""

    def download(self, host: NDArray[np.uint8], slab: Slab) -> None: ...
    def packer(self) -> Packer: ...
    def host_pinned_bytes(self) -> int: ...
    def host_unpinned_bytes(self) -> int:
        """Bytes of host slabs that the driver refused to pin, so that their copies go through its own buffers."""

    # time
    def mark(self) -> Any: ...
    def wait(self, mark: Any) -> None:
        """Return once every step submitted before the mark is done."""

    def elapsed_ms(self, start: Any, end: Any) -> float: ...
    def synchronize(self) -> None: ...
    def capture(self, steps: Callable[[], None]) -> Callable[[], None]:
        """A callable that replays what `steps` submits; `steps` must use the same arrays each time."""

    def read_rate_gb_per_s(self) -> float | None:
        """Measured rate of reading device memory; None where the question has no meaning."""

    def link_rate_gb_per_s(self) -> float | None:
        """Measured rate of plain copies from pinned host memory to the device; None where there is no link."""

    # steps
    def prepare_steps(
        self, *, quantized: bool, kv: KvDtype, head_dim: int, element: Element | None, token: TokenShape | None
    ) -> Preparation:
        """Begin to make ready what a decoder of this kind submits, so that no prompt waits for it.

        `element` is that of all weights, where they have one; `token` is given where tokens are to be taken in one
        launch.
        To wait for it raises DeviceError when the device cannot run it.
        """

    def activation(self, max_rows: int, num_inputs: int, quantized: bool) -> Activation: ...
    def embed(self, table: Array, state: SequenceState, h_mk: Array, num_rows: int) -> None:
        """h[row] = table[tokens[position + row]], widened to float32."""

    def norm(self, h_mk: Array, weight_k: Array, eps: float, out: Activation, num_rows: int) -> None:
        """RMSNorm of rows, into whatever form `out` has."""

    def linear(
        self, x: Activation, weight: DeviceWeight, out_mn: Array, num_rows: int, *, column: int = 0, add: bool = False
    ) -> None:
        """out[:, column ...] = x @ weight, or += when `add`."""

    def rope_store(
        self,
        qkv_mn: Array,
        q_norm_d: Array,
        k_norm_d: Array,
        heads: HeadShape,
        state: SequenceState,
        kv: KvLayer,
        q_mhd: Array,
        num_rows: int,
    ) -> None:
        """RMSNorm and rotate queries and keys; keys and values go to cache slots position + row."""

    def attend(
        self,
        q_mhd: Array,
        kv: KvLayer,
        heads: HeadShape,
        state: SequenceState,
        out: Activation,
        num_rows: int,
        num_slots: int,
    ) -> None:
        """Causal attention of each query over slots 0 .. position + row; `num_slots` is position + num_rows."""

    def check_heads(self, head_dim: int, queries_per_kv: int) -> None:
        """Raise DeviceError when `attend` has no way to serve such heads."""

    def reserve_attention(self, heads: HeadShape, max_rows: int, ctx: int) -> None:
        """Allocate what `attend` needs for these sizes, once."""

    def silu_mul(self, gate_up_mn: Array, up_column: int, out: Activation, num_rows: int) -> None:
        """silu(gate) * up, into whatever form `out` has."""

    def add(self, target_mk: Array, rows_mk: Array) -> None:
        """target += rows, in float32; both are contiguous."""

    # stretches of steps: backends/composed.py has them as sequences

    def norm_linear(
        self,
        h_mk: Array,
        weight_k: Array,
        eps: float,
        scratch: Activation,
        parts: Sequence[tuple[DeviceWeight, int]],
        out_mn: Array,
        num_rows: int,
    ) -> None: ...

    def norm_gate_up(
        self,
        h_mk: Array,
        weight_k: Array,
        eps: float,
        scratch: Activation,
        parts: Sequence[tuple[DeviceWeight, int]],
        gate_up_mn: Array,
        up_column: int,
        out: Activation,
        num_rows: int,
    ) -> None: ...

    def rope_attend(
        self,
        qkv_mn: Array,
        q_norm_d: Array,
        k_norm_d: Array,
        heads: HeadShape,
        state: SequenceState,
        kv: KvLayer,
        q_mhd: Array,
        out: Activation,
        num_rows: int,
        num_slots: int,
    ) -> None: ...

    def whole_token(self, decoder: Decoder) -> WholeToken | None:
        """A whole token with the bits of the steps one by one; None where this backend has none for such weights.

        `decoder` must stay where it is.
        """

    def choose(self, logits_v: Array, num_ids: int, state: SequenceState, num_rows: int) -> None:
        """The best of the first `num_ids` logits, lowest id first among equals, goes to the state (-1 in `chosen` when
        none is a number); the position moves on by `num_rows`."""

    def advance(self, state: SequenceState, num_rows: int) -> None:
        """Move the position on without choosing an id."""

    def close(self) -> None: ...
