"""A conversation to token ids through a chat template, so that what a user types stays text. Reads no files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.placeholders import Piece
from kestrel_cuda.inputs.template import ChatTemplate
from kestrel_cuda.inputs.tokenizer import Tokenizer, half_character
from kestrel_cuda.inputs.vocabulary import check_encoded, check_vocabulary, end_ids

__all__ = [
    "ChatTemplate",
    "chat_pieces",
    "check_encoded",
    "check_vocabulary",
    "encode_chat",
    "encode_pieces",
    "end_ids",
]

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    add_generation_prompt: bool = True,
    tools: Sequence[object] | None = None,
    **flags: object,
) -> list[int]:
    """Ids of the rendered conversation; no added token is made from a string of `messages` or `tools`.

    A picture or a video is the one token that the template gives it. Raises InputError as `chat_pieces` does.
    """
    return encode_pieces(tokenizer, chat_pieces(template, tokenizer, messages, add_generation_prompt, tools, **flags))


def encode_pieces(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> list[int]:
    """Ids of a prompt in pieces, whose texts are text and nothing else."""
    ids: list[int] = []
    for piece in pieces:
        ids += [piece] if isinstance(piece, int) else tokenizer.encode_plain(piece)
    return ids


def chat_pieces(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    add_generation_prompt: bool = True,
    tools: Sequence[object] | None = None,
    **flags: object,
) -> list[Piece]:
    """The rendered conversation as ids of added tokens and the texts between them.

    Added tokens come from the template alone. Everything between two of them is encoded together, so that the ids
    of ordinary text are Hugging Face's. A template that searches a message for an added token (as the Thinking
    models' searches earlier answers for `</think>`) does not find it. Raises InputError as `render` does, and where
    the template leaves out a text.
    """
    try:
        given = json.dumps([messages, tools, flags], ensure_ascii=False, default=str)
        if found := half_character(given):
            raise InputError(f"the conversation is not valid Unicode ({found} is half a character); give it as UTF-8")
        mask = _Mask(tokenizer.added_tokens.values(), unavailable=template.text + given)
        hidden, hidden_tools = mask.hide(messages, "role", "type"), mask.hide(tools, "type") if tools else None
    except RecursionError as error:
        raise InputError("the conversation nests too deeply; give its contents as plain texts") from error
    rendered = template.render(hidden, add_generation_prompt, hidden_tools, **flags)
    if found := half_character(rendered):
        raise InputError(
            f"the chat template ({template.source}) gives text that is not valid Unicode ({found} is half a "
            "character); take the template of the original checkpoint"
        )
    _check_nothing_left_out(hidden, rendered, template.source)
    return [piece if isinstance(piece, int) else mask.restore(piece) for piece in tokenizer.split(rendered)]


def _check_nothing_left_out(messages: Sequence[Mapping[str, object]], rendered: str, source: str) -> None:
    """Raise InputError where a text is not in the prompt. Blanks at its ends need not be, nor need earlier answers, of
    which templates leave out what was thought."""
    for number, message in enumerate(messages, start=1):
        role = message.get("role")
        if role == "assistant" or all(text.strip() in rendered for text in _texts(message.get("content"))):
            continue
        last = "; it may take one as the first message alone" if role == "system" and number > 1 else ""
        raise InputError(
            f"the chat template ({source}) leaves out the text of message {number} ({role}){last}; change the "
            "conversation, or take the template of the original checkpoint"
        )


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text


class _Mask:
    """Hides added tokens in text: replaces one end of each by a character that occurs nowhere else, and back.

    `unavailable` is all the text around, so that the characters can be chosen outside it.
    """

    def __init__(self, tokens: Iterable[str], unavailable: str) -> None:
        self._tokens = [token for token in tokens if token]
        self._beginnings = {token[:n] for token in self._tokens for n in range(1, len(token))}
        self._endings = {token[n:] for token in self._tokens for n in range(1, len(token))}
        self._longest = max(map(len, self._tokens), default=0)
        taken = set(unavailable)
        free = (chr(code) for code in chain(*_PRIVATE_USE) if chr(code) not in taken)
        outer = dict.fromkeys(character for token in self._tokens for character in (token[0], token[-1]))
        self._marker = dict(zip(outer, free, strict=False))
        if len(self._marker) < len(outer):
            raise InputError(
                "the conversation uses up Unicode's private-use characters, of which some are needed to keep text "
                "apart from the template's tokens; give it in parts"
            )
        self._original = str.maketrans({marker: character for character, marker in self._marker.items()})

    def hide(self, value: Any, *verbatim: str) -> Any:
        """`value` with its strings masked, keys too.

        In the outer objects, which the template takes apart, keys stay as they are, and so does what they hold under
        one key: `verbatim` names it for each depth.
        """
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            if not verbatim:
                return {self._hide_whole(key): self.hide(item) for key, item in value.items()}
            kept, *deeper = verbatim
            return {key: item if key == kept else self.hide(item, *deeper) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item, *verbatim) for item in value]
        return value

    def restore(self, text: str) -> str:
        """The text as it was before `hide`."""
        return text.translate(self._original)

    def _hide_whole(self, text: str) -> str:
        """Mask the tokens that lie wholly in `text`: enough for a key, which stands between quotes."""
        return self._replace(text, self._starts(text))

    def _hide_text(self, text: str) -> str:
        """Mask also the parts of tokens at either end, which the text that a template puts there could complete."""
        positions = self._starts(text)
        for n in range(1, min(self._longest, len(text) + 1)):
            if text[-n:] in self._beginnings:
                positions.add(len(text) - n)
            if text[:n] in self._endings:
                positions.add(n - 1)
        return self._replace(text, positions)

    def _starts(self, text: str) -> set[int]:
        """Where tokens start in `text`; overlapping ones count each."""
        positions: set[int] = set()
        for token in self._tokens:
            start = text.find(token)
            while start >= 0:
                positions.add(start)
                start = text.find(token, start + 1)
        return positions

    def _replace(self, text: str, positions: set[int]) -> str:
        characters = list(text)
        for position in positions:
            characters[position] = self._marker[characters[position]]
        return "".join(characters)
