"""Text to token ids and back, at once or id by id. Knows no chat template and no model."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from kestrel_cuda.checkpoint.json_file import read_json_if_present
from kestrel_cuda.errors import CheckpointError, InputError
from kestrel_cuda.inputs.tokenizer_files import byte_alphabet, failed, load_tokenizer, named_tokens


class Tokenizer:
    """A byte-level BPE tokenizer with added tokens.

    `size` is one more than the largest id it knows, `base_size` than the largest that is no added token's; ids from
    `size` on are padding rows of the model. `added_tokens` gives each added token's text by id. `eos_ids` is what
    tokenizer_config.json alone calls the end. Encoding raises InputError for text that is not valid Unicode.
    """

    def __init__(self, full: tokenizers.Tokenizer, eos_ids: tuple[int, ...] = ()) -> None:
        self._full = full
        # The same model (shared, not copied) without the added tokens, to which text can only be text.
        self._plain = tokenizers.Tokenizer(full.model)
        self._plain.normalizer = full.normalizer
        self._plain.pre_tokenizer = full.pre_tokenizer
        added = full.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.base_size = 1 + max(full.get_vocab(with_added_tokens=False).values())
        self.size = 1 + max(full.get_vocab(with_added_tokens=True).values())
        self.eos_ids = eos_ids

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """The tokenizer of the checkpoint in `directory`. Raises CheckpointError naming the file at fault."""
        full = load_tokenizer(directory)
        config = read_json_if_present(directory / "tokenizer_config.json")
        end = named_tokens(config).get("eos_token")
        if end is None:
            return cls(full)
        end_id = full.token_to_id(end)
        if end_id is None:
            raise CheckpointError(f"{config.path}: eos_token {end!r} is not in the tokenizer; fetch both files again")
        return cls(full, (end_id,))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, added tokens in it taken as such: what Hugging Face gives."""
        return list(_cut(self._full, text).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` as text: no added token, special or not, is made from it."""
        return list(_cut(self._plain, text).ids)

    def split(self, text: str) -> list[int | str]:
        """`text` cut at its added tokens: their ids, and the text between.

        The pieces through `encode_plain`, joined, are what `encode` gives.
        """
        encoding = _cut(self._full, text, add_special_tokens=False)
        pieces: list[int | str] = []
        end = 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self.added_tokens:
                pieces += [text[end:start], token_id]
                end = stop
        pieces.append(text[end:])
        return [piece for piece in pieces if piece != ""]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids it does not know become nothing."""
        return str(self._full.decode(ids, skip_special_tokens=skip_special))

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """The bytes one id stands for: part of a character, perhaps; nothing for an id it does not know."""
        token = self._full.id_to_token(token_id)
        if token is None or (skip_special and token_id in self._special_ids):
            return b""
        if all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        return token.encode()  # an added token of characters outside the byte alphabet


class TextStream:
    """Text of ids given one at a time, never part of a character.

    What `push` and `finish` return, joined, equals `Tokenizer.decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" while a character is open."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, self._skip_special))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed, else ""."""
        return self._decoder.decode(b"", final=True)


def half_character(text: str) -> str | None:
    """The first surrogate in `text` and its place, None where UTF-8 can hold it all.

    Half a surrogate pair comes from JSON escapes and from bytes on a command line.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X} at position {error.start}"
    return None


def _cut(tokenizer: tokenizers.Tokenizer, text: str, **options: bool) -> tokenizers.Encoding:
    if found := half_character(text):
        raise InputError(f"the text is not valid Unicode ({found} is half a character); give it as UTF-8")
    try:
        return tokenizer.encode(text, **options)
    except BaseException as error:
        # The library gives up on runs of millions of blanks by what is no Exception, and says so on standard error.
        if not failed(error):
            raise
        raise InputError(f"{len(text)} characters cannot be cut into tokens ({error}); give less text") from error


_BYTES = byte_alphabet()
