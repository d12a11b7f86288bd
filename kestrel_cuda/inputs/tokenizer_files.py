"""A checkpoint's tokenizer files to a `tokenizers.Tokenizer`. Encodes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TypeGuard

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kestrel_cuda.checkpoint.files import is_present, open_file, printable
from kestrel_cuda.checkpoint.json_file import JsonObject, read_json
from kestrel_cuda.errors import CheckpointError
from kestrel_cuda.paths import shown_path

# What transformers' Qwen tokenizer class splits by: vocab.json and merges.txt do not carry it.
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PROBE = "Ab, 1\n\té世👍"
_MAX_ID_DIGITS = 9
_SAMPLE = 512
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in tokenizer.json; without that file, the same one from vocab.json, merges.txt and the config.

    Raises CheckpointError when a file is absent or damaged, or the tokenizer is not a byte-level one.
    """
    path = directory / "tokenizer.json"
    if is_present(path):
        tokenizer = _from_json(path)
    else:
        path, tokenizer = directory / "vocab.json", _from_vocab(directory)
    # Limits saved in the file never cut a prompt; transformers lifts them on every call.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _check_byte_level(tokenizer, path)
    # A means of training: with it, one text is cut in many ways.
    tokenizer.model.dropout = None
    _check_merges(tokenizer, path)
    return tokenizer


def failed(error: BaseException) -> bool:
    """Whether the library failed: it raises plain Exception for everything, and what is none where it panics."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def named_tokens(tokenizer_config: JsonObject) -> dict[str, str]:
    """`eos_token` and its like, as tokenizer_config.json names them: text, or an object with `content`."""
    tokens: dict[str, str] = {}
    for key in _NAMED:
        value = tokenizer_config.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        if _is_token(content):
            tokens[key] = content
        elif value is not None:
            raise tokenizer_config.wrong(key, "a token's text")
    return tokens


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary: itself if printable, else from U+0100 on."""
    printables = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printables]
    return {chr(byte): byte for byte in printables} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _is_token(content: object) -> TypeGuard[str]:
    """Whether it is text that the library takes: not half a character, as JSON escapes can give."""
    return isinstance(content, str) and content.encode(errors="replace").decode() == content


def _check_byte_level(tokenizer: Tokenizer, path: Path) -> None:
    """Raise unless any text becomes tokens, and tokens are bytes."""
    needed = "a byte-level BPE tokenizer, as the original checkpoint has, is needed"
    # Text streams join bytes themselves, which is right for this decoder alone.
    for part, value, kind in (
        ("decoder", tokenizer.decoder, decoders.ByteLevel),
        ("model", tokenizer.model, models.BPE),
    ):
        if not isinstance(value, kind):
            found = f"no {part}" if value is None else f"a {type(value).__name__} {part}"
            raise CheckpointError(f"{shown_path(path)} has {found}; {needed}")
    alphabet = byte_alphabet()
    lacking = [byte for character, byte in alphabet.items() if tokenizer.model.token_to_id(character) is None]
    if lacking:
        raise CheckpointError(
            f"{shown_path(path)} has no token for byte {lacking[0]} ({len(lacking)} of 256 lack); {needed}"
        )
    try:
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(_PROBE) if tokenizer.pre_tokenizer else [(_PROBE, None)]
        Tokenizer(tokenizer.model).encode("".join(alphabet))
        tokenizer.encode(_PROBE)
    except BaseException as error:
        if not failed(error):
            raise
        raise CheckpointError(f"{shown_path(path)} cannot encode text: {printable(str(error))}; {needed}") from error
    if not all(character in alphabet for piece, _ in pieces for character in piece):
        raise CheckpointError(
            f"{shown_path(path)} does not take text apart into bytes (pre_tokenizer ByteLevel); {needed}"
        )


def _check_merges(tokenizer: Tokenizer, path: Path) -> None:
    """Raise where merges are missing. In a whole tokenizer a token's own text becomes that token; a few that do not are
    nothing unusual, and of all a sample is asked for."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    merged = [token for token in sorted(vocabulary, key=vocabulary.__getitem__) if len(token) > 1]
    sample = merged[:: max(1, len(merged) // _SAMPLE)]
    plain = Tokenizer(tokenizer.model)
    lost = [token for token, cut in zip(sample, plain.encode_batch(sample), strict=True) if len(cut.ids) != 1]
    if len(lost) > len(sample) // 16:
        raise CheckpointError(
            f"{shown_path(path)}: {len(lost)} of {len(sample)} tokens looked at are made by none of its merges, "
            f"{printable(repr(lost[0]))} for one; merges are missing: fetch it, or merges.txt beside it, again"
        )


def _from_json(path: Path) -> Tokenizer:
    with open_file(path) as file:
        content = file.read()
    try:
        return Tokenizer.from_buffer(content)
    except BaseException as error:
        if not failed(error):
            raise
        reason = printable(str(error), most=200)
        raise CheckpointError(
            f"cannot read {shown_path(path)} ({len(content)} bytes): {reason}; fetch it again"
        ) from error


def _from_vocab(directory: Path) -> Tokenizer:
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    missing = [path.name for path in (vocab, merges) if not is_present(path)]
    if missing:
        raise CheckpointError(
            f"{shown_path(directory)} lacks tokenizer.json, and {' and '.join(missing)} to build it from; fetch it"
        )
    for path in (vocab, merges):
        open_file(path).close()
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except BaseException as error:
        if not failed(error):
            raise
        reason = printable(str(error), most=200)
        raise CheckpointError(f"cannot read {vocab} or {merges}: {reason}; fetch them again") from error
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, read_json(directory / "tokenizer_config.json"))
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokenizer_config: JsonObject) -> None:
    """Add the tokens that vocab.json lacks, under the ids that tokenizer_config.json gives them."""
    listed = tokenizer_config.child("added_tokens_decoder")
    if listed is None:
        raise tokenizer_config.missing("added_tokens_decoder")
    for token_id in listed.values:
        if not (token_id.isascii() and token_id.isdecimal() and len(token_id) <= _MAX_ID_DIGITS):
            raise listed.wrong(token_id, "listed under a token id")
    for token_id in sorted(listed.values, key=int):
        entry = listed.child(token_id)
        content = entry and entry.get("content")
        if entry is None or not content or not _is_token(content):
            raise listed.wrong(token_id, "an object with content, which is a token's text")
        flags = {key: entry.boolean(key) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        tokenizer.add_tokens([AddedToken(content, **flags)])
        if tokenizer.token_to_id(content) != int(token_id):
            raise listed.wrong(token_id, f"the next free id, {tokenizer.token_to_id(content)}")
