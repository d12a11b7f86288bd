"""A checkpoint's tokenizer files to a `tokenizers.Tokenizer`. Encodes nothing."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kestrel_cuda.checkpoint.json_file import JsonObject, read_json
from kestrel_cuda.errors import CheckpointError

# What transformers' Qwen tokenizer class splits by: vocab.json and merges.txt do not carry it.
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in tokenizer.json; without that file, the same one from vocab.json, merges.txt and the config.

    Raises CheckpointError when a file is absent or damaged, or the tokenizer is not a byte-level one.
    """
    path = directory / "tokenizer.json"
    tokenizer = _from_json(path) if path.exists() else _from_vocab(directory)
    # Text streams join bytes themselves, which is right for this decoder alone.
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        found = "no decoder" if tokenizer.decoder is None else f"a {type(tokenizer.decoder).__name__} decoder"
        raise CheckpointError(f"{path} has {found}; a byte-level tokenizer (decoder ByteLevel) is needed")
    # Limits saved in the file never cut a prompt; transformers lifts them on every call.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def named_tokens(tokenizer_config: JsonObject) -> dict[str, str]:
    """`eos_token` and its like, as tokenizer_config.json names them: text, or an object with `content`."""
    tokens: dict[str, str] = {}
    for key in _NAMED:
        value = tokenizer_config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[key] = value
        elif value is not None:
            raise tokenizer_config.wrong(key, "a token's text")
    return tokens


def _from_json(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for everything
        raise CheckpointError(f"cannot read {path} ({path.stat().st_size} bytes): {error}; fetch it again") from error


def _from_vocab(directory: Path) -> Tokenizer:
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    missing = [path.name for path in (vocab, merges) if not path.exists()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks tokenizer.json, and {' and '.join(missing)} to build it from; fetch it"
        )
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # as above
        raise CheckpointError(f"cannot read {vocab} or {merges}: {error}; fetch them again") from error
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
    for token_id in sorted(listed.values, key=int):
        entry = listed.child(token_id)
        content = entry and entry.get("content")
        if entry is None or not isinstance(content, str):
            raise listed.wrong(token_id, "an object with content")
        flags = {key: entry.boolean(key) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        tokenizer.add_tokens([AddedToken(content, **flags)])
        if tokenizer.token_to_id(content) != int(token_id):
            raise listed.wrong(token_id, f"the next free id, {tokenizer.token_to_id(content)}")
