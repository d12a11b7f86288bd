"""What a tokenizer gives against what the model has: its ids, and those that end an answer. Encodes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kestrel_cuda.checkpoint.files import printable
from kestrel_cuda.checkpoint.reader import Checkpoint
from kestrel_cuda.errors import CheckpointError, InputError
from kestrel_cuda.inputs.tokenizer import Tokenizer
from kestrel_cuda.paths import shown_path


def end_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end an answer: generation_config.json's, then config.json's, then the tokenizer's, each once."""
    return tuple(dict.fromkeys(checkpoint.generation_eos_ids + checkpoint.config.eos_ids + tokenizer.eos_ids))


def end_warnings(checkpoint: Checkpoint, ids: Sequence[int]) -> list[str]:
    """What is wrong with the ids that end an answer."""
    files = "generation_config.json, config.json and tokenizer_config.json"
    vocab_size = checkpoint.config.text.vocab_size
    if not ids:
        return [f"{files} name no id that ends an answer: it goes on for as many tokens as are asked for"]
    beyond = [end_id for end_id in ids if end_id >= vocab_size]
    return [f"end ids {beyond} are outside the vocabulary ({vocab_size} ids): {files} name them"] if beyond else []


def check_vocabulary(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError when ordinary text could become ids that the model has no embedding for.

    Added tokens may lie beyond, as in a model tuned without them: `check_encoded` refuses them where they are used.
    """
    vocab_size = checkpoint.config.text.vocab_size
    if tokenizer.base_size > vocab_size:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer has ids up to {tokenizer.base_size - 1}, the model up to "
            f"{vocab_size - 1} (vocab_size {vocab_size}); take the tokenizer files of the same checkpoint"
        )


def check_visual_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError where config.json and the tokenizer have different ids for the tokens of pictures."""
    named = {token: token_id for token_id, token in tokenizer.added_tokens.items()}
    config = checkpoint.config
    for key, token, found in (
        ("image_token_id", "<|image_pad|>", config.image_token_id),
        ("video_token_id", "<|video_pad|>", config.video_token_id),
        ("vision_start_token_id", "<|vision_start|>", config.vision_start_token_id),
        ("vision_end_token_id", "<|vision_end|>", config.vision_end_token_id),
    ):
        needed = named.get(token)
        if found is not None and needed is not None and found != needed:
            raise CheckpointError(
                f"{shown_path(checkpoint.path / 'config.json')}: {key} is {found}; it has to be {needed}, the id that "
                f"the tokenizer has for {token}: take config.json and the tokenizer files of the same checkpoint"
            )


def check_encoded(checkpoint: Checkpoint, tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """`ids` that the tokenizer gave. Raises InputError for an added token that the model has no embedding for."""
    vocab_size = checkpoint.config.text.vocab_size
    for token_id in ids:
        if token_id >= vocab_size:
            token = printable(tokenizer.added_tokens.get(token_id, "an unnamed token"))
            raise InputError(
                f"the prompt holds {token}, whose id {token_id} the model does not have (vocab_size {vocab_size}); "
                "leave it out, or take the tokenizer files of the same checkpoint"
            )
    return list(ids)
