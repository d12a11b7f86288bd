"""A checkpoint ready to answer: builds the parts in order and owns them. Prints nothing, reads no environment."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from kestrel_cuda.backends import open_backend, open_best_backend
from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.vision import PixelCodes
from kestrel_cuda.checkpoint.names import EMBEDDING
from kestrel_cuda.checkpoint.reader import open_checkpoint
from kestrel_cuda.checkpoint.tensor_file import first_nonfinite_row
from kestrel_cuda.config import EngineConfig, Evict, Policy, Quant, is_whole
from kestrel_cuda.encode import VisualEncoder
from kestrel_cuda.errors import InputError, SettingError, UserError
from kestrel_cuda.generate import Generation, LogitsWish
from kestrel_cuda.inputs.template import ChatTemplate
from kestrel_cuda.inputs.tokenizer import TextStream, Tokenizer
from kestrel_cuda.inputs.visual_source import VisualSource
from kestrel_cuda.inputs.visuals import NO_LIMITS, OpenedVisual, VisualLimits, least_image_tokens
from kestrel_cuda.inputs.vocabulary import check_vocabulary, end_ids, end_warnings
from kestrel_cuda.load import (
    WeightLoader,
    host_copy_bytes,
    map_table,
    stored_element,
    too_little_host_memory,
    unquantized,
)
from kestrel_cuda.model.kv_cache import KvCache, check_kv_dtype, kv_cache_bytes
from kestrel_cuda.model.prompt_positions import Visual, find_spans
from kestrel_cuda.model.sequence import DeviceSequence
from kestrel_cuda.model.text import Observer, TextModel
from kestrel_cuda.model.visual_rows import EncodedVisuals
from kestrel_cuda.model.weights import DecoderWeights, plan_weights
from kestrel_cuda.plan import RUN_FLAGS, Flags, Plan, make_plan
from kestrel_cuda.plan_sizes import most_bytes
from kestrel_cuda.prompts import PromptEncoder, grids_of, whole_ids
from kestrel_cuda.report import LoadReport, PlanReport
from kestrel_cuda.residency.store import WeightStore
from kestrel_cuda.residency.window import ResidencyWindow, make_window
from kestrel_cuda.sizes import format_size

Progress = Callable[[str, int, int], None]


class Engine:
    """`open` reads headers and the tokenizer; `load` plans and loads weights; `generate` answers.

    One `load` at a time: loading again closes what was loaded before.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.checkpoint = open_checkpoint(config.model)
        check_kv_dtype(self.checkpoint.config.text, config.kv_dtype)
        self.tokenizer = Tokenizer.load(config.model)
        self.chat = ChatTemplate.load(config.model)
        check_vocabulary(self.checkpoint, self.tokenizer)
        self.end_ids = end_ids(self.checkpoint, self.tokenizer)
        self._prompts = PromptEncoder(self.checkpoint, self.tokenizer, self.chat)
        self.backend: Backend | None = None
        self._backend_warnings: list[str] = []
        self._encoder: VisualEncoder | None = None
        self.plan: Plan | None = None
        self._weights: DecoderWeights | None = None
        self._store: WeightStore | None = None
        self._model: TextModel | None = None
        self._sequence: DeviceSequence | None = None
        self._load_ms = 0.0
        self._embed_host_bytes = 0
        self._read_gb_per_s: float | None = None
        self._plan_for: Callable[..., Plan]

    @classmethod
    def open(cls, config: EngineConfig) -> Engine:
        """Check a checkpoint and its tokenizer; allocates nothing on a device.

        Raises CheckpointError, and SettingError for a cache that its heads do not fit.
        """
        return cls(config)

    # prompts: what these do and raise, prompts.py has

    def open_visuals(
        self, sources: Sequence[VisualSource], limits: VisualLimits = NO_LIMITS
    ) -> tuple[OpenedVisual, ...]:
        """Pictures and videos decoded, and sized by this checkpoint's rules within `limits`; loads no weights."""
        return self._prompts.open_visuals(sources, limits)

    def encode_chat(self, messages: list[dict[str, Any]], visuals: Sequence[OpenedVisual] = ()) -> list[int]:
        """Token ids of a conversation through the checkpoint's template, ready for the answer.

        `visuals` are the pictures and videos of the messages, in their order.
        """
        return self._prompts.encode_chat(messages, visuals)

    def encode_raw(self, text: str, visuals: Sequence[OpenedVisual] = ()) -> list[int]:
        """Token ids of text as it is, added tokens included; its image and video tokens stand for `visuals`."""
        return self._prompts.encode_raw(text, visuals)

    def check_ids(self, ids: Sequence[int], visuals: Sequence[OpenedVisual] = ()) -> list[int]:
        """Ids given by the user, as they are, `visuals` already at their full length in them."""
        return self._prompts.check_ids(ids, visuals)

    # loading

    def load(
        self,
        ctx: int,
        num_prompt: int | None = None,
        on_progress: Progress | None = None,
        *,
        on_plan: Callable[[PlanReport], None] | None = None,
        collects_logits: bool = False,
        lowers_prefetch: bool = True,
        flags: Flags = RUN_FLAGS,
    ) -> LoadReport:
        """Plan for `ctx` cache slots, then quantize and place the weights.

        `on_plan` is told what that will take before any weight is read. `collects_logits` plans the memory that
        `generate` needs when its `logits` are hashed or kept; `lowers_prefetch` lets fewer layers be fetched ahead
        where that makes the window fit; `flags` are how messages name the caller's settings.

        Raises SettingError for a context without slots, DeviceError when the plan does not fit, CheckpointError when a
        weight cannot be quantized.
        """
        for name, value, least in (("ctx", ctx, 1), ("num_prompt", 0 if num_prompt is None else num_prompt, 0)):
            if not is_whole(value) or value < least:
                raise SettingError(f"{name} is {value!r}; it takes a whole number of at least {least}")
        started = time.perf_counter()
        if self.plan is not None:
            self.unload()
        config, model = self.config, self.checkpoint.config
        notes, warnings = list(self.checkpoint.notes), list(self.checkpoint.warnings)
        if self.chat is not None:
            warnings += self.chat.warnings
        backend = self._opened_backend()
        warnings += self._backend_warnings + end_warnings(self.checkpoint, self.end_ids)
        backend.check_heads(model.text.head_dim, model.text.num_heads // model.text.num_kv_heads)
        quantized = config.quant is not Quant.NONE
        weights = plan_weights(model, config.quant, partial(stored_element, self.checkpoint))
        embedding = self.checkpoint.tensor(EMBEDDING)
        self._plan_for = partial(
            make_plan,
            model=model,
            weights=weights,
            memory=backend.memory(),
            ctx=ctx,
            num_prompt=num_prompt or ctx,
            embedding_bytes=embedding.data.nbytes,
            on_gpu=backend.name == "cuda",
            collects_logits=collects_logits,
            held=self._encoder.held() if self._encoder else (),
            flags=flags,
        )
        self.plan = self._plan_for(config, lowers_prefetch=lowers_prefetch)

        def plan_on_device() -> None:
            self.plan = self._plan_for(config, embeddings_on="device", lowers_prefetch=lowers_prefetch)

        mapped_table = None
        if self.plan.embeddings_on != "device":
            mapped_table, refused = map_table(backend, embedding.data, plan_on_device)
            warnings += refused
        self._embed_host_bytes = 0 if mapped_table is None else embedding.data.nbytes
        plan = self.plan
        notes += plan.notes
        warnings += plan.warnings
        if config.quant is Quant.G256:
            narrow = [name for name, kind in weights.quant_by_class.items() if kind != "g256"]
            if narrow:
                notes.append(f"groups stay at 32 where 256 does not divide the inputs: {', '.join(narrow)}")
        if config.vram_bytes is None:
            self._read_gb_per_s = backend.read_rate_gb_per_s()
        self._weights = weights

        window = make_window(config.policy, model.text.num_layers, plan.keep, plan.prefetch)
        report = self._plan_report(weights, window)
        warnings += report.warnings
        if on_plan is not None:
            on_plan(replace(report, notes=tuple(notes), warnings=tuple(warnings)))
        prepared = backend.prepare_steps(
            quantized=quantized,
            kv=config.kv_dtype,
            head_dim=model.text.head_dim,
            element=weights.element,
            token=weights.token_shape(model.text) if config.whole_token and window is None else None,
        )
        try:
            store = WeightStore(
                backend,
                weights.layers,
                weights.lm_head,
                window=window,
                preload=not config.lazy,
                budget_bytes=plan.weight_budget_bytes,
                evict=config.evict,
            )
            self._store, self._evict = store, config.evict
            on_layer = partial(on_progress, "weights") if on_progress else lambda _done, _total: None
            loader = WeightLoader(self.checkpoint, weights, config, notes, warnings, on_layer)
            with ThreadPoolExecutor(1) as beside:
                # A tied table is looked at when lm_head is packed from it.
                damaged_row = None if self.checkpoint.tied else beside.submit(first_nonfinite_row, embedding)
                loader.fill(store, backend, window)
            if refused_bytes := backend.host_unpinned_bytes():
                warnings.append(
                    f"the driver refused to pin {format_size(refused_bytes)} of host memory: copies from there are "
                    "slower than the link; free host memory, or raise the limit of locked memory"
                )
            if damaged_row is not None and damaged_row.result() is not None:
                raise self.checkpoint.not_finite(embedding.name, f" (row {damaged_row.result()})")

            table = backend.to_device(embedding.data) if mapped_table is None else mapped_table
            cache = KvCache(backend, model.text, ctx, config.kv_dtype)
            self._model = TextModel(
                backend,
                model.text,
                weights,
                store,
                unquantized(self.checkpoint, backend, table, on_device=mapped_table is None),
                cache,
                max_rows=plan.prefill_chunk,
                quantized=quantized,
                whole_token=config.whole_token,
            )
            self._sequence = DeviceSequence(backend, model.text, ctx)
            prepared.wait()
        finally:
            prepared.drop()
        backend.synchronize()
        self.checkpoint.check_unchanged()
        self._load_ms = (time.perf_counter() - started) * 1e3
        return LoadReport(
            **vars(report) | {"notes": tuple(notes), "warnings": tuple(warnings)},
            model=str(config.model),
            num_weights=store.num_weights,
            quant=weights.quant_by_class,
            dtypes=self.checkpoint.dtypes,
            tied=self.checkpoint.tied,
            eos_ids=self.end_ids,
            template_source=self.chat.source if self.chat else None,
            load_ms=self._load_ms,
        )

    def _plan_report(self, weights: DecoderWeights, window: ResidencyWindow | None) -> PlanReport:
        assert self.backend is not None
        assert self.plan is not None
        plan, text, config = self.plan, self.checkpoint.config.text, self.config
        copy_bytes = host_copy_bytes(config, weights, window)
        return PlanReport(
            backend=self.backend.name,
            device=self.backend.device_name,
            num_layers=text.num_layers,
            keep=plan.keep,
            ctx=plan.ctx,
            kv=config.kv_dtype.value,
            kv_bytes_per_slot=kv_cache_bytes(text, 1, config.kv_dtype),
            prefill_chunk=plan.prefill_chunk,
            embeddings_on=plan.embeddings_on,
            planned_device_bytes=max(plan.total_bytes, self._encoder.peak_bytes if self._encoder else 0),
            host_copy_bytes=copy_bytes,
            warnings=tuple(too_little_host_memory(config, copy_bytes)),
        )

    def set_window(self, keep: int, policy: Policy, prefetch: int, evict: Evict) -> None:
        """Lay another window over a checkpoint that was loaded with its host copy (`lazy`); 0 keeps everything.

        What was resident is given back to the driver first, so that the new window's peak is its own. Raises
        DeviceError when it does not fit.
        """
        if self._store is None or self._model is None or self.backend is None or self.plan is None:
            raise UserError("set_window() was called before load()")
        if self._sequence is not None:
            self._sequence.let_go()
        loaded = self.plan
        wished = replace(self.config, keep=keep, policy=policy, prefetch=prefetch, prefill_chunk=loaded.prefill_chunk)
        plan = self._plan_for(wished, embeddings_on=loaded.embeddings_on, lowers_prefetch=False)
        self._store.set_window(make_window(policy, self.checkpoint.config.text.num_layers, plan.keep, prefetch), evict)
        self._evict = evict
        self._model.forget_captures()
        self.backend.reset_peak()

    def encode_visuals(
        self, visuals: Sequence[Visual], pixels: Sequence[PixelCodes], least_tokens: int | None = 1
    ) -> EncodedVisuals:
        """Features of pictures and videos in the order of the prompt, with the pixels of each.

        `least_tokens` is the smallest --image-tokens to advise, None where it would change nothing.
        Before `load` they have the device to themselves, and `load` plans with what stays; a second `load` drops them.
        Raises InputError for a checkpoint without a vision tower, DeviceError when there is no room.
        """
        self.checkpoint.tower()
        backend = self._opened_backend()
        if self._encoder is None:
            exact = self.config.quant is Quant.NONE
            self._encoder = VisualEncoder(self.checkpoint, exact=exact, keeps_tower=self.config.keep_tower)
        memory, most = backend.memory(), self.config.vram_bytes
        if backend.name == "cuda":
            most = most_bytes(memory, memory.allocated_bytes, most)
        return self._encoder.encode(backend, visuals, pixels, most, least_tokens)

    def encode_opened(self, visuals: Sequence[OpenedVisual]) -> EncodedVisuals:
        """Features of at least one picture or video that `open_visuals` gave, in the order of the prompt."""
        pixels = [visual.pixels() for visual in visuals]
        return self.encode_visuals(grids_of(visuals), pixels, least_image_tokens(visuals))

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        ignore_eos: bool = False,
        logits: LogitsWish = "none",
        observe: Observer | None = None,
        encoded: EncodedVisuals | None = None,
    ) -> Generation:
        """A greedy continuation of `prompt_ids`, started when it is iterated.

        Raises UserError before `load()`, and InputError for fewer than one new token, an empty prompt, one that the
        loaded context cannot hold with an id after it, one with an id that the vocabulary does not have, one whose
        image and video tokens are not those of `encoded`, or `encoded` that was freed or that another load made.
        Without `encoded` such tokens are like others: an answer may hold them, and be continued.
        """
        if (
            self._model is None
            or self._store is None
            or self._sequence is None
            or self.backend is None
            or self.plan is None
        ):
            raise UserError("generate() was called before load()")
        ids = whole_ids(prompt_ids)
        if not is_whole(max_new_tokens) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens!r}; a whole number of at least 1 is needed")
        if logits not in get_args(LogitsWish):
            raise InputError(f"logits is {logits!r}; it takes {', '.join(get_args(LogitsWish))}")
        self._prompts.check_room(ids, self.plan.ctx)
        if encoded is not None:
            encoded.check_held(self.backend)
        return Generation(
            self.backend,
            self._model,
            self._store,
            self._sequence,
            ids,
            max_new_tokens=min(max_new_tokens, self.plan.ctx - len(ids)),
            stop_ids=frozenset() if ignore_eos else frozenset(self.end_ids),
            num_ids=min(self.tokenizer.size, self.checkpoint.config.text.vocab_size),
            vocab_size=self.checkpoint.config.text.vocab_size,
            prefill_chunk=self.plan.prefill_chunk,
            # The CPU backend reads the embedding table from its file for every token.
            read_on=self.checkpoint if self.backend.name == "cpu" else None,
            # Slabs that are freed are not met again.
            captures_layers=self._evict is Evict.POOL,
            stream=TextStream(self.tokenizer),
            logits=logits,
            load_ms=self._load_ms,
            embed_host_bytes=self._embed_host_bytes,
            device_read_gb_per_s=self._read_gb_per_s,
            observe=observe,
            encoded=encoded,
            spans=find_spans(ids, encoded.visuals, self.checkpoint.config) if encoded else (),
        )

    def unload(self) -> None:
        """Give back everything `load` took."""
        if self._sequence is not None:
            self._sequence.let_go()
        if self.backend is not None:
            self.backend.close()
        self.backend = self.plan = self._weights = self._store = self._model = self._sequence = self._encoder = None

    close = unload

    def flip_host_bit(self, layer: int) -> None:
        """Damage the host copy of a layer, so that a check can show that it notices."""
        if self._store is None:
            raise UserError("flip_host_bit() was called before load()")
        self._store.flip_host_bit(layer)

    def _opened_backend(self) -> Backend:
        if self.backend is None:
            self._backend_warnings = []
            if self.config.backend != "auto":
                self.backend = open_backend(self.config.backend, self.config.device)
            else:
                self.backend, reason = open_best_backend(self.config.device)
                if reason:
                    self._backend_warnings.append(f"running on the CPU: {reason}")
        return self.backend
