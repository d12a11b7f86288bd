"""Conversations, text or ids to the prompt of one checkpoint, with its pictures and videos. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from kestrel_cuda.checkpoint.reader import Checkpoint
from kestrel_cuda.config import is_whole
from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.chat import chat_pieces, encode_pieces
from kestrel_cuda.inputs.messages import check_turns
from kestrel_cuda.inputs.placeholders import Piece, expand
from kestrel_cuda.inputs.template import ChatTemplate
from kestrel_cuda.inputs.tokenizer import Tokenizer
from kestrel_cuda.inputs.visual_source import VisualSource
from kestrel_cuda.inputs.visuals import OpenedVisual, VisualLimits, open_visuals
from kestrel_cuda.inputs.vocabulary import check_encoded, check_visual_tokens
from kestrel_cuda.model.prompt_positions import Visual, find_spans
from kestrel_cuda.paths import shown_path


@dataclass(frozen=True)
class PromptEncoder:
    """What a checkpoint makes of prompts. `chat` is None where it ships no template."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    chat: ChatTemplate | None

    def open_visuals(self, sources: Sequence[VisualSource], limits: VisualLimits) -> tuple[OpenedVisual, ...]:
        """Decode pictures and videos and work out their sizes.

        Raises InputError for a file that cannot be used and for a checkpoint that takes text only, CheckpointError for
        one whose config.json has other tokens for them than its tokenizer, SettingError for limits that leave no size.
        """
        if not sources:
            return ()
        self.checkpoint.tower()
        check_visual_tokens(self.checkpoint, self.tokenizer)
        return open_visuals(sources, limits, self.checkpoint.path, self.checkpoint.config)

    def encode_chat(self, messages: list[dict[str, Any]], visuals: Sequence[OpenedVisual]) -> list[int]:
        """Ids of a conversation. Raises InputError where the template refuses it, or leaves a picture out."""
        if self.chat is None:
            raise InputError(
                f"{shown_path(self.checkpoint.path)} has no chat template (chat_template.jinja, chat_template.json or "
                "tokenizer_config.json); use --raw to give the prompt as it is"
            )
        check_turns(messages)
        pieces = chat_pieces(self.chat, self.tokenizer, messages)
        advice = "pictures belong to the user's messages, and the template has to be that of the original checkpoint"
        return self._encode(pieces, visuals, f"the chat template ({self.chat.source})", advice)

    def encode_raw(self, text: str, visuals: Sequence[OpenedVisual]) -> list[int]:
        """Ids of text, added tokens included. Raises InputError unless it has a place for each picture and no more."""
        if not isinstance(text, str):
            raise InputError(f"the raw prompt is {text!r}; text is needed")
        advice = "write <|vision_start|><|image_pad|><|vision_end|> where a picture belongs (<|video_pad|> for a video)"
        return self._encode(self.tokenizer.split(text), visuals, "the raw prompt", advice)

    def check_ids(self, ids: Sequence[int], visuals: Sequence[OpenedVisual]) -> list[int]:
        """`ids` as they are. Raises InputError for one that the vocabulary does not have, and for picture tokens that
        are not those of `visuals`."""
        checked = whole_ids(ids)
        self.check_range(checked)
        return self._placed(checked, visuals)

    def check_range(self, ids: Sequence[int]) -> None:
        """Raises InputError for an id that the vocabulary does not have."""
        size = self.checkpoint.config.text.vocab_size
        for token_id in ids:
            if not 0 <= token_id < size:
                raise InputError(f"token id {token_id} is outside the vocabulary; ids run from 0 to {size - 1}")

    def check_room(self, ids: Sequence[int], ctx: int) -> None:
        """Raises InputError unless there are ids, all of the vocabulary, and `ctx` slots hold them and one more."""
        if not ids:
            raise InputError("the prompt is empty: there is no token to continue; give some text")
        if len(ids) >= ctx:
            raise InputError(f"the prompt has {len(ids)} tokens but --ctx is {ctx}; at least {len(ids) + 1} are needed")
        self.check_range(ids)

    def _encode(self, pieces: Sequence[Piece], visuals: Sequence[OpenedVisual], where: str, advice: str) -> list[int]:
        if visuals:
            placeholders = [visual.placeholder for visual in visuals]
            config_path = self.checkpoint.path / "config.json"
            pieces = expand(pieces, placeholders, self.checkpoint.config, where, advice, config_path)
        ids = encode_pieces(self.tokenizer, pieces)
        return self._placed(check_encoded(self.checkpoint, self.tokenizer, ids), visuals)

    def _placed(self, ids: list[int], visuals: Sequence[OpenedVisual]) -> list[int]:
        """`ids`, once it is clear that they hold the tokens of these pictures and no others."""
        config = self.checkpoint.config
        if visuals:
            find_spans(ids, grids_of(visuals), config)
            return ids
        for name, token_id in (("image", config.image_token_id), ("video", config.video_token_id)):
            if token_id is not None and token_id in ids:
                check_visual_tokens(self.checkpoint, self.tokenizer)
                raise InputError(
                    f"the prompt holds the {name} token ({token_id}) but no {name} comes with it; leave the token out, "
                    f"or give the {name} (--{name})"
                )
        return ids


def grids_of(visuals: Sequence[OpenedVisual]) -> list[Visual]:
    return [Visual(visual.kind, visual.size.grid_thw) for visual in visuals]


def whole_ids(ids: Iterable[int]) -> list[int]:
    """Ids as Python's own whole numbers, NumPy's too. Raises InputError for what is none."""
    found = list(ids)
    for token_id in found:
        if not is_whole(token_id):
            raise InputError(f"a token id is {token_id!r}; whole numbers are needed")
    return [index(token_id) for token_id in found]
