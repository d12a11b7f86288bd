"""The small byte-level BPE tokenizer of the trained model, in Qwen's form, and its two files. Knows no pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from scripts.make_tiny_model import read_reference, write_json
from scripts.tiny_model.split import Split
from scripts.tiny_model.stream import SHARES, item

NUM_TOKENS = 1280
"""The most tokens that are learned; the added ones come after them."""
_LONGEST_BYTES = 10
"""A token's length: an English word with its blank, or three Chinese characters, never a whole question."""

_ITEMS_A_TASK = 1500
_LEAST_COUNT = 8
_CORPUS_SEED = 1


def corpus() -> Iterator[str]:
    """Questions and answers of training, the words that are spelled out left aside: those are to stay letters."""
    for task in SHARES:
        for index in range(_ITEMS_A_TASK):
            one = item(_CORPUS_SEED, Split.TRAIN, index, task)
            yield one.question.replace(one.spelled, "") if one.spelled else one.question
            if not one.spelled:
                yield one.answer


def train_tokenizer() -> tokenizers.Tokenizer:
    """The same tokenizer each time: pre-tokenization, normalization and added tokens are those of Qwen's."""
    reference = read_reference("tokenizer.json")
    pattern = reference["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        min_frequency=_LEAST_COUNT,
        max_token_length=_LONGEST_BYTES,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    for token in sorted(reference["added_tokens"], key=lambda token: token["id"]):
        added = tokenizers.AddedToken(token["content"], normalized=False, special=token["special"])
        if token["special"]:
            tokenizer.add_special_tokens([added])
        else:
            tokenizer.add_tokens([added])
    return tokenizer


def write_tokenizer(tokenizer: tokenizers.Tokenizer, out_dir: Path) -> None:
    """tokenizer.json, and tokenizer_config.json with the ids of its added tokens."""
    tokenizer.save(str(out_dir / "tokenizer.json"), pretty=False)
    content: dict[str, Any] = read_reference("tokenizer_config.json")
    spelled = {token["content"]: token for token in content["added_tokens_decoder"].values()}
    content["added_tokens_decoder"] = {
        str(token_id): spelled[token.content] for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }
    write_json(out_dir / "tokenizer_config.json", content)
