"""Prefill, then one id at a time, greedily. Knows no files, no flags and no terminal; text only as pieces it hands on.

A token is submitted to the device whole; the host learns its id afterwards. Where every weight stays where it is, the
token's launches are captured once for each number of attention splits and replayed, and the next token is submitted
before the id of the last is read, so that the device does not wait for the host.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import Array
from kestrel_cuda.checkpoint.reader import Checkpoint
from kestrel_cuda.errors import CheckpointError, UserError
from kestrel_cuda.inputs.tokenizer import TextStream
from kestrel_cuda.model.prompt_positions import VisualSpan, position_delta, prompt_positions
from kestrel_cuda.model.sequence import DeviceSequence
from kestrel_cuda.model.text import LOGIT_ROWS, Observer, TextModel
from kestrel_cuda.model.visual_rows import EncodedVisuals, visual_rows
from kestrel_cuda.quant.packed import round_up
from kestrel_cuda.report import ResidencyReport, RunReport, StopReason, TimingReport, Token
from kestrel_cuda.residency.store import WeightStore

LogitsWish = Literal["none", "hash", "keep"]
CAPTURE_SLOTS = 256
"""A captured token serves every position with the same number of attention splits of this many slots."""


@dataclass(frozen=True)
class _Submitted:
    """A token whose id has not been read: the cache slot that the id is for, the mark behind its steps, and whether its
    pass over the layers has been counted."""

    slot: int
    mark: Any
    is_counted: bool


class Generation:
    """One prompt's greedy continuation: iterate for tokens, then ask for the report.

    With `logits` "hash" the report holds a digest of every prompt and step logit, with "keep" they stay in
    `prompt_logits` [S, V] and `step_logits` [n, V] as float32.
    """

    def __init__(
        self,
        backend: Backend,
        model: TextModel,
        store: WeightStore,
        sequence: DeviceSequence,
        prompt_ids: list[int],
        *,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        num_ids: int,
        vocab_size: int,
        prefill_chunk: int,
        captures_layers: bool,
        read_on: Checkpoint | None,
        stream: TextStream,
        logits: LogitsWish = "none",
        load_ms: float = 0.0,
        embed_host_bytes: int = 0,
        device_read_gb_per_s: float | None = None,
        observe: Observer | None = None,
        encoded: EncodedVisuals | None = None,
        spans: Sequence[VisualSpan] = (),
    ) -> None:
        self._backend, self._model, self._store = backend, model, store
        self._sequence, self.state, self._turn = sequence, sequence.state, sequence.turn
        self._prompt_ids = prompt_ids
        self._max_new_tokens = max_new_tokens
        self._stop_ids = stop_ids
        self._num_ids, self._vocab_size = num_ids, vocab_size
        self._chunk = prefill_chunk
        self._captures_layers = captures_layers
        self._read_on = read_on
        self._stream = stream
        self._logits = logits
        self._load_ms, self._embed_host_bytes = load_ms, embed_host_bytes
        self._device_read_gb_per_s = device_read_gb_per_s
        self._observe = observe
        self._encoded, self._spans = encoded, spans

        self._ids: list[int] = []
        self._text: list[str] = []
        self._stop_reason: StopReason | None = None
        self._prefill_ms = self._ttft_ms = 0.0
        self._decode_ms: list[float] = []
        self._position = 0
        self._rope_delta = 0
        self._replays: dict[int, Callable[[], None]] = {}
        self._submitted: deque[_Submitted] = deque()
        self._hash = hashlib.sha256()
        self._kept_steps: list[NDArray[np.float32]] = []
        self._num_decode_passes = 0
        self.prompt_logits: NDArray[np.float32] | None = None

    @property
    def step_logits(self) -> NDArray[np.float32] | None:
        """Row i chose ids[i]; None unless logits are kept."""
        if self._logits != "keep":
            return None
        return np.stack(self._kept_steps) if self._kept_steps else np.zeros((0, self._vocab_size), np.float32)

    def __iter__(self) -> Iterator[Token]:
        """Tokens as they are chosen.

        Raises CheckpointError when no logit is a number, or when a file that is read for every token is not what it
        was. That is looked at before each: the system ends a process that reads where a mapped file is no more.

        What has been submitted when this ends, however it ends, is dropped: the next prompt is laid down behind it.
        Raises UserError when it is iterated a second time, or goes on after the engine has begun another answer,
        laid another window, loaded anew or been closed, and when it begins after the last three; InputError when its
        pictures' features were given back.
        """
        if self._position:
            raise UserError("an answer is iterated once; ask the engine for another")
        if self._stop_reason is not None:
            return
        before, hidden_sk = self._prefill()
        self._submit_ahead()
        chosen, now = self._read_chosen()
        self._ttft_ms = self._backend.elapsed_ms(before, now)
        first_step = self._step_logits_row()
        if hidden_sk is not None:
            self._collect_prompt_logits(hidden_sk)
        self._collect_step(first_step)
        yield self._take(chosen, self._ttft_ms)
        while self._stop_reason is None:
            if not self._submitted:
                self._check_source()
                if self._logits != "none":
                    # Reading and hashing the last logits is no part of the next token's time.
                    now = self._backend.mark()
                self._submit()
            self._submit_ahead()
            chosen, later = self._read_chosen()
            self._decode_ms.append(self._backend.elapsed_ms(now, later))
            now = later
            self._collect_step(self._step_logits_row())
            yield self._take(chosen, self._decode_ms[-1])
        self._check_source()

    def interrupt(self) -> None:
        """Stop here: the device finishes what it has been given, and the report says "interrupt"."""
        self._backend.synchronize()
        if self._stop_reason is None:
            self._stop_reason = "interrupt"

    def abandon(self) -> None:
        """Stop here after a failure, without waiting for a device that may have failed: the report says "error"."""
        if self._stop_reason is None:
            self._stop_reason = "error"

    def report(self) -> RunReport:
        """What the run did. Raises UserError while it is still going."""
        if self._stop_reason is None:
            raise UserError("a report was asked for before the run had stopped")
        tail = self._stream.finish()
        if tail:
            self._text.append(tail)
        steady = self._decode_ms[1:] or self._decode_ms
        tpot_ms = median(steady) if steady else None
        read_bytes = self._store.bytes_per_pass
        return RunReport(
            prompt_ids=tuple(self._prompt_ids),
            ids=tuple(self._ids),
            text="".join(self._text),
            stop_reason=self._stop_reason,
            residency=self._residency(),
            timing=TimingReport(self._load_ms, self._prefill_ms, self._ttft_ms, tuple(self._decode_ms), tpot_ms),
            bytes_read_per_token=read_bytes,
            read_gb_per_s=read_bytes / tpot_ms / 1e6 if tpot_ms else None,
            device_read_gb_per_s=self._device_read_gb_per_s,
            logits_sha256=None if self._logits == "none" else self._hash.hexdigest(),
            rope_delta=self._rope_delta,
        )

    def _prefill(self) -> tuple[Any, Array | None]:
        if self._sequence.turn != self._turn:
            raise UserError("an answer cannot begin: its engine laid another window, was loaded anew, or closed")
        backend, model, total = self._backend, self._model, len(self._prompt_ids)
        if self._encoded is not None:
            self._encoded.check_held(backend)
        hidden_sk = None
        self._store.reset_counters()
        if self._logits != "none":
            hidden_sk = backend.zeros((total, model.h_mk.shape[1]), np.float32)
        only_last = hidden_sk is None and self._observe is None and backend.rows_are_independent
        encoded = self._encoded
        positions_3s = prompt_positions(len(self._prompt_ids), self._spans) if encoded else None
        if positions_3s is not None:
            self._rope_delta = position_delta(positions_3s)
        self._sequence.start(self, self._prompt_ids, positions_3s)
        backend.synchronize()
        before = backend.mark()
        while self._position < total:
            rows = min(self._chunk, total - self._position)
            self._store.begin_pass()
            visuals = tuple(visual_rows(encoded.features, self._spans, self._position, rows)) if encoded else ()
            end = self._position + rows
            # Nothing reads a prompt's last layer but the next passes its keys and values, and its last row the logits.
            num_wanted = (1 if end == total else 0) if only_last else None
            model.forward(self.state, rows, end, self._observe, visual_rows=visuals, num_wanted=num_wanted)
            if hidden_sk is not None:
                backend.copy(hidden_sk[self._position : self._position + rows], model.h_mk[:rows])
            self._position += rows
            if self._position < total:
                backend.advance(self.state, rows)
        after = backend.mark()
        model.logits(model.h_mk[rows - 1 : rows], 1)
        backend.choose(model.logits_mv[0], self._num_ids, self.state, rows)
        self._submitted.append(_Submitted(total, backend.mark(), is_counted=True))
        self._prefill_ms = backend.elapsed_ms(before, after)
        return before, hidden_sk

    def _submit_ahead(self) -> None:
        """Submit the token after the one whose id is to be read next, where nothing has to come between."""
        if (
            self._backend.runs_ahead
            and self._store.is_static
            and self._logits == "none"
            and self._observe is None
            and len(self._ids) + 1 < self._max_new_tokens
            # Kernels may have to be compiled for a capture; an id that is known does not wait for that.
            and (not self._backend.can_capture or round_up(self._position + 1, CAPTURE_SLOTS) in self._replays)
        ):
            try:
                self._check_source()
            except CheckpointError:
                return  # it is raised behind the id that is on its way
            self._submit()

    def _submit(self) -> None:
        """Submit the next token. A pass over weights that stay is counted when its id is read: it may be dropped."""
        self._check_held()
        self._position += 1
        counts_later = self._store.is_static
        if counts_later:
            with self._store.uncounted():
                self._decode()
        else:
            self._begin_pass()
            self._decode()
        self._submitted.append(_Submitted(self._position, self._backend.mark(), is_counted=not counts_later))

    def _begin_pass(self) -> None:
        self._store.begin_pass()
        self._num_decode_passes += 1

    def _decode(self) -> None:
        if not self._backend.can_capture:
            self.submit_token(self._position)
            return
        num_slots = round_up(self._position, CAPTURE_SLOTS)
        replay = self._replays.get(num_slots)
        if not self._store.is_static:
            self.submit_token(num_slots, capture_layers=self._captures_layers)
        elif replay is not None:
            replay()
        else:
            # The first token of a split count runs plainly, which also loads every kernel the capture records.
            self.submit_token(num_slots)
            # One at a time: the driver keeps memory for each, and contexts only grow.
            self._replays = {num_slots: self._backend.capture(lambda: self.submit_token(num_slots))}

    def submit_token(self, num_slots: int, *, capture_layers: bool = False) -> None:
        """Submit one token: the row at the position through every layer, its logits, and the choice of the next id."""
        if self._store.is_static:
            self._model.token(self.state, num_slots)
        else:
            self._model.forward(self.state, 1, num_slots, capture_layers=capture_layers)
            self._model.logits(self._model.h_mk, 1)
        self._backend.choose(self._model.logits_mv[0], self._num_ids, self.state, 1)

    def _check_held(self) -> None:
        if not self._sequence.is_held_by(self):
            raise UserError("an answer cannot go on: its engine has begun another, was loaded anew, or closed")

    def _check_source(self) -> None:
        if self._read_on is not None:
            self._read_on.check_unchanged()

    def _read_chosen(self) -> tuple[int, Any]:
        """The id of the token submitted first, once it is there, and the mark behind it."""
        self._check_held()
        token = self._submitted.popleft()
        self._backend.wait(token.mark)
        if not token.is_counted:
            self._begin_pass()
            self._store.count_resident_pass()
        ids = self._backend.peek(self.state.chosen)
        chosen = int(ids[token.slot % len(ids)])
        if chosen < 0:
            if self._encoded is not None:
                self._encoded.check_finite()
            raise CheckpointError(
                f"no logit is a number at step {len(self._ids)}: the weights, or what is computed with them, are too "
                "large; fetch the checkpoint again, or use another one"
            )
        return chosen, token.mark

    def _take(self, chosen: int, time_ms: float) -> Token:
        self._ids.append(chosen)
        if chosen in self._stop_ids:
            self._stop_reason = "eos"
            piece = ""
        else:
            piece = self._stream.push(chosen)
            self._text.append(piece)
            if len(self._ids) >= self._max_new_tokens:
                self._stop_reason = "length"
        return Token(len(self._ids) - 1, chosen, piece, time_ms)

    def _step_logits_row(self) -> NDArray[np.float32] | None:
        if self._logits == "none":
            return None
        row: NDArray[np.float32] = self._backend.to_host(self._model.logits_mv[0])[: self._vocab_size]
        return row

    def _collect_step(self, row_v: NDArray[np.float32] | None) -> None:
        if row_v is None:
            return
        self._hash.update(row_v.tobytes())
        if self._logits == "keep":
            self._kept_steps.append(row_v)

    def _collect_prompt_logits(self, hidden_sk: Array) -> None:
        total = len(self._prompt_ids)
        kept = np.empty((total, self._vocab_size), np.float32) if self._logits == "keep" else None
        for first in range(0, total, LOGIT_ROWS):
            rows = min(LOGIT_ROWS, total - first)
            self._model.logits(hidden_sk[first : first + rows], rows)
            block = self._backend.to_host(self._model.logits_mv[:rows])[:, : self._vocab_size]
            self._hash.update(block.tobytes())
            if kept is not None:
                kept[first : first + rows] = block
        self.prompt_logits = kept
        self._backend.free(hidden_sk)

    def _residency(self) -> ResidencyReport:
        store, counters = self._store, self._store.counters
        cache, pool = store.cache, store.pool
        passes = self._num_decode_passes
        memory = self._backend.memory()
        other_pinned_bytes = self._embed_host_bytes + self.state.chosen.nbytes
        return ResidencyReport(
            weights_resident_end=store.weights_resident,
            layers_resident_end=store.layers_resident,
            prefetched_layers=store.prefetched_layers,
            peak_layers=counters.peak_layers,
            peak_weight_bytes=counters.peak_weight_bytes,
            uploads_per_token=sum(counters.pass_uploads[-passes:]) / passes if passes else 0.0,
            layer_uploads=tuple(counters.layer_uploads),
            h2d_bytes_per_token=sum(counters.pass_h2d_bytes[-passes:]) // passes if passes else 0,
            evictions=cache.num_evictions,
            cache_hits=cache.num_hits,
            cache_misses=cache.num_misses,
            pool_hits=pool.num_hits,
            pool_misses=pool.num_misses,
            host_pinned_bytes=max(0, self._backend.host_pinned_bytes() - other_pinned_bytes),
            embed_host_bytes=self._embed_host_bytes,
            peak_device_bytes=memory.peak_allocated_bytes,
        )
