"""The Qwen3-VL decoder stack over a backend's steps. Knows no token text, no file names and no window rule.

A forward takes rows whose token ids and rotations already lie in the sequence state; between them and the next id
everything stays on the device, in buffers allocated once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.base import Backend, Slab, WholeToken
from kestrel_cuda.backends.operands import Array, Decoder, DecoderLayer, DeviceWeight, HeadShape, SequenceState
from kestrel_cuda.config import TextConfig
from kestrel_cuda.model.kv_cache import KvCache
from kestrel_cuda.model.visual_rows import VisualRows
from kestrel_cuda.model.weights import DecoderWeights
from kestrel_cuda.quant.grouped import ACTIVATION_GROUP
from kestrel_cuda.quant.packed import round_up
from kestrel_cuda.residency.store import WeightStore
from kestrel_cuda.weight_keys import Projection

LOGIT_ROWS = 16
"""Rows of logits computed at a time when all of a prompt's are asked for."""

ALIGNED_ROWS = 16
"""Rows after a multiple of these begin where a kernel may read as many bytes at once as at the first row."""

MAX_CAPTURED_LAYERS = 2048
"""Captures held at most; layers met in further slabs are submitted plainly."""

Observer = Callable[[str, NDArray[np.float32]], None]


@dataclass(frozen=True)
class LayerNorms:
    """Norm weights of one layer on the device."""

    input_k: Array
    post_attention_k: Array
    q_d: Array
    k_d: Array


@dataclass(frozen=True)
class Unquantized:
    """What is never quantized: embedding rows in their stored dtype and the norms in float32."""

    embedding: Array
    has_embedding_on_device: bool
    layers: tuple[LayerNorms, ...]
    final_k: Array


def workspace_bytes(text: TextConfig, weights: DecoderWeights, max_rows: int, quantized: bool) -> int:
    """Bytes of the buffers a TextModel allocates for `max_rows` rows, attention scratch left to the backend."""

    def activation(num_inputs: int) -> int:
        padded = round_up(num_inputs, ACTIVATION_GROUP)
        return padded + padded // ACTIVATION_GROUP * 4 if quantized else 4 * num_inputs

    floats = text.hidden_size + weights.qkv.width + text.q_size + weights.gate_up.width
    inputs = activation(text.hidden_size) + activation(text.q_size) + activation(text.intermediate_size)
    logits = LOGIT_ROWS * (4 * round_up(text.vocab_size, 4) + activation(text.hidden_size))
    return max_rows * (4 * floats + inputs) + logits


class TextModel:
    """The decoder with its work buffers for up to `max_rows` rows at a time."""

    def __init__(
        self,
        backend: Backend,
        text: TextConfig,
        weights: DecoderWeights,
        store: WeightStore,
        unquantized: Unquantized,
        cache: KvCache,
        *,
        max_rows: int,
        quantized: bool,
        whole_token: bool = False,
    ) -> None:
        self.max_rows = max_rows
        self._backend = backend
        self._text = text
        self._store = store
        self._fixed = unquantized
        self._cache = cache
        self._qkv_output, self._gate_up_output = weights.qkv, weights.gate_up
        columns = weights.qkv.columns
        self._heads = HeadShape(
            text.num_heads,
            text.num_kv_heads,
            text.head_dim,
            columns[Projection.K],
            columns[Projection.V],
            text.rms_norm_eps,
        )
        self.h_mk = backend.zeros((max_rows, text.hidden_size), np.float32)
        self._hidden = backend.activation(max_rows, text.hidden_size, quantized)
        self._qkv = backend.zeros((max_rows, weights.qkv.width), np.float32)
        self._q = backend.zeros((max_rows, text.num_heads, text.head_dim), np.float32)
        self._attended = backend.activation(max_rows, text.q_size, quantized)
        self._gate_up = backend.zeros((max_rows, weights.gate_up.width), np.float32)
        self._mlp = backend.activation(max_rows, text.intermediate_size, quantized)
        self._captured: dict[tuple[int, int], tuple[Slab, Callable[[], None]]] = {}
        self._captured_shape = (0, 0)
        self._whole_token: WholeToken | None = None
        self.wants_whole_token = whole_token
        self._final = backend.activation(LOGIT_ROWS, text.hidden_size, quantized)
        self.logits_mv = backend.zeros((LOGIT_ROWS, round_up(text.vocab_size, 4)), np.float32)
        backend.reserve_attention(self._heads, max_rows, cache.ctx)

    def forward(
        self,
        state: SequenceState,
        num_rows: int,
        num_slots: int,
        observe: Observer | None = None,
        *,
        visual_rows: Sequence[VisualRows] = (),
        capture_layers: bool = False,
        num_wanted: int | None = None,
    ) -> None:
        """Run rows position .. position + num_rows through every layer, into `h_mk`.

        `num_slots` is position + num_rows as the host knows it, or more. `observe` is given each layer's residual
        rows. `visual_rows` are the rows that stand for pictures. With `capture_layers` a layer's launches are captured
        for each slab it is met in and replayed. With `num_wanted` only so many rows at the end are those of the last
        layer, which otherwise leaves keys and values alone.
        """
        backend, h = self._backend, self.h_mk
        backend.embed(self._fixed.embedding, state, h, num_rows)
        for visual in visual_rows:
            backend.copy(h[visual.rows], visual.tokens_mk)
        if observe:
            observe("embed", backend.to_host(h[:num_rows]))
        for layer in range(self._text.num_layers):
            slab = self._store.layer(layer)
            if capture_layers:
                self._replay_layer(layer, slab, state, num_rows, num_slots)
            else:
                is_last = layer == self._text.num_layers - 1
                self._submit_layer(layer, slab, state, num_rows, num_slots, num_wanted if is_last else None)
            for visual in visual_rows:
                if layer < len(visual.deepstack_mk):
                    backend.add(h[visual.rows], visual.deepstack_mk[layer])
            if observe:
                observe(f"layer {layer}", backend.to_host(h[:num_rows]))

    def token(self, state: SequenceState, num_slots: int) -> None:
        """One row from its id to its logits, every weight resident to stay: in one launch where the backend has it."""
        slabs = [self._store.layer(layer) for layer in range(self._text.num_layers)]
        lm_head = self._store.lm_head()
        if self.wants_whole_token and self._whole_token is None:
            decoder = self._decoder(slabs, lm_head)
            self._whole_token = self._backend.whole_token(decoder) if decoder is not None else None
        if self._whole_token is None or not self._fixed.has_embedding_on_device:
            self._backend.embed(self._fixed.embedding, state, self.h_mk, 1)
        if self._whole_token is not None:
            self._whole_token(state, num_slots)
            return
        for layer, slab in enumerate(slabs):
            self._submit_layer(layer, slab, state, 1, num_slots)
        self._submit_logits(lm_head, self.h_mk, 1)

    @property
    def has_whole_token(self) -> bool:
        """Whether tokens are decoded in one launch."""
        return self._whole_token is not None

    def _decoder(self, slabs: list[Slab], lm_head: DeviceWeight) -> Decoder | None:
        if len(self._qkv_output.parts) > 1 or len(self._gate_up_output.parts) > 1:
            return None
        layers = tuple(
            DecoderLayer(
                qkv=slab.weights[Projection.QKV],
                o=slab.weights[Projection.O],
                gate_up=slab.weights[Projection.GATE_UP],
                down=slab.weights[Projection.DOWN],
                input_norm_k=norms.input_k,
                post_norm_k=norms.post_attention_k,
                q_norm_d=norms.q_d,
                k_norm_d=norms.k_d,
                kv=kv,
            )
            for slab, norms, kv in zip(slabs, self._fixed.layers, self._cache.layers, strict=True)
        )
        return Decoder(
            layers=layers,
            lm_head=lm_head,
            final_norm_k=self._fixed.final_k,
            heads=self._heads,
            embedding=self._fixed.embedding if self._fixed.has_embedding_on_device else None,
            h_mk=self.h_mk,
            logits_mv=self.logits_mv,
        )

    def _submit_layer(
        self,
        layer: int,
        slab: Slab,
        state: SequenceState,
        num_rows: int,
        num_slots: int,
        num_wanted: int | None = None,
    ) -> None:
        backend, h, weights, eps = self._backend, self.h_mk, slab.weights, self._text.rms_norm_eps
        norms, kv = self._fixed.layers[layer], self._cache.layers[layer]
        qkv, gate_up = self._qkv_output, self._gate_up_output
        parts = [(weights[projection], column) for projection, column in qkv.parts]
        backend.norm_linear(h, norms.input_k, eps, self._hidden, parts, self._qkv, num_rows)
        if num_wanted == 0:
            backend.rope_store(self._qkv, norms.q_d, norms.k_d, self._heads, state, kv, self._q, num_rows)
            return
        backend.rope_attend(
            self._qkv, norms.q_d, norms.k_d, self._heads, state, kv, self._q, self._attended, num_rows, num_slots
        )
        attended = self._attended
        if num_wanted is not None:
            first = (num_rows - num_wanted) // ALIGNED_ROWS * ALIGNED_ROWS
            attended, h, num_rows = attended.rows_from(first), h[first:], num_rows - first
        backend.linear(attended, weights[Projection.O], h, num_rows, add=True)
        parts = [(weights[projection], column) for projection, column in gate_up.parts]
        backend.norm_gate_up(
            h,
            norms.post_attention_k,
            eps,
            self._hidden,
            parts,
            self._gate_up,
            gate_up.columns[Projection.UP],
            self._mlp,
            num_rows,
        )
        backend.linear(self._mlp, weights[Projection.DOWN], h, num_rows, add=True)

    def _replay_layer(self, layer: int, slab: Slab, state: SequenceState, num_rows: int, num_slots: int) -> None:
        if self._captured_shape != (num_rows, num_slots):
            # The driver keeps memory for each, and a longer context needs none of a shorter one's.
            self._backend.synchronize()
            self._captured.clear()
            self._captured_shape = (num_rows, num_slots)
        key = (layer, id(slab))
        captured = self._captured.get(key)
        if captured is not None:
            captured[1]()
            return

        def submit() -> None:
            self._submit_layer(layer, slab, state, num_rows, num_slots)

        submit()
        if len(self._captured) < MAX_CAPTURED_LAYERS:
            # The slab is held with its capture, so that its identity is not met again in another.
            self._captured[key] = (slab, self._backend.capture(submit))

    def forget_captures(self) -> None:
        """Drop every captured layer; to be called when the slabs they read are gone."""
        self._captured.clear()
        if self._whole_token is not None:
            self._whole_token.close()
            self._whole_token = None

    def logits(self, rows_mk: Any, num_rows: int) -> None:
        """Logits of up to LOGIT_ROWS residual rows, into the first rows of `logits_mv`."""
        self._submit_logits(self._store.lm_head(), rows_mk, num_rows)

    def _submit_logits(self, lm_head: DeviceWeight, rows_mk: Any, num_rows: int) -> None:
        self._backend.norm(rows_mk, self._fixed.final_k, self._text.rms_norm_eps, self._final, num_rows)
        self._backend.linear(self._final, lm_head, self.logits_mv, num_rows)
