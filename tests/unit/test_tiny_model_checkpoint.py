"""The trained model's folder: its size, its tokenizer, its template, and that it opens and answers on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kestrel_cuda.checkpoint.processor_json import read_image_processor, read_video_processor
from kestrel_cuda.config import EngineConfig, Quant
from kestrel_cuda.engine import Engine
from kestrel_cuda.inputs.template import ChatTemplate
from kestrel_cuda.inputs.tokenizer import Tokenizer
from scripts.make_tiny_model import TinyModel
from scripts.tiny_model.checkpoint import (
    MODEL,
    MOST_BYTES,
    RULES,
    num_parameters,
    num_rows,
    random_tensors,
    the_tokenizer,
    write_checkpoint,
)
from scripts.tiny_model.tokenizer import train_tokenizer

SMALL = TinyModel(num_layers=2, num_positions=100, vision_depth=4, deepstack=(0, 1, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untrained one."""
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, random_tensors(SMALL, num_rows(the_tokenizer())), SMALL)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.open(EngineConfig(model=folder, backend="cpu", quant=Quant.NONE))


def test_the_whole_folder_stays_below_its_bound(tmp_path: Path) -> None:
    tensors = random_tensors(MODEL, num_rows(the_tokenizer()))
    size = write_checkpoint(tmp_path, tensors)
    assert size == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 2 * num_parameters(MODEL, num_rows(the_tokenizer())) < size < MOST_BYTES - 100_000  # a README comes with it
    assert MODEL.num_layers >= 12
    assert MODEL.tied


def test_sizes_suit_the_kernels() -> None:
    assert MODEL.head_dim in (32, 64, 128)
    for num_inputs in (MODEL.hidden_size, MODEL.num_heads * MODEL.head_dim, MODEL.intermediate_size):
        assert num_inputs % 128 == 0
    assert MODEL.vision_hidden_size % 8 == MODEL.vision_intermediate_size % 8 == 0
    assert len(MODEL.deepstack) == 3
    assert max(MODEL.deepstack) < MODEL.vision_depth


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors(SMALL, num_rows(the_tokenizer()))
    tensors.pop("model.language_model.norm.weight")
    with pytest.raises(ValueError, match=r"1 tensors .* model\.language_model\.norm\.weight"):
        write_checkpoint(tmp_path, tensors, SMALL)
    assert not list(tmp_path.iterdir())


def test_any_text_survives_the_tokenizer(engine: Engine) -> None:
    random = Random(0)
    texts = ["", "How many circles are there?", "图中有几个圆形？", "\x00\x7f \t\r\n  end", "🦅 naïve Ωμέγα עברית"]
    planes = [(0x20, 0x7F), (0xA0, 0x2FF), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF)]
    for _ in range(50):
        texts.append("".join(chr(random.randint(*random.choice(planes))) for _ in range(40)))
    for text in texts:
        assert engine.tokenizer.decode(engine.tokenizer.encode_plain(text), skip_special=False) == text


def test_the_tokenizer_is_the_same_each_time(folder: Path) -> None:
    assert train_tokenizer().to_str() == the_tokenizer().to_str()
    assert (folder / "tokenizer.json").read_text(encoding="utf-8") == the_tokenizer().to_str()


def test_all_of_qwens_added_tokens_are_there(engine: Engine, oracle: Path) -> None:
    reference = Tokenizer.load(oracle / "checkpoints" / "tiny-dense-tied")
    ours = engine.tokenizer.added_tokens
    assert list(ours.values()) == list(reference.added_tokens.values())
    assert min(ours) == engine.tokenizer.base_size
    assert [ours[token_id] for token_id in engine.end_ids] == ["<|im_end|>", "<|endoftext|>"]


def test_spelled_words_stay_letters(engine: Engine) -> None:
    """Common words that only occur as words to spell are not tokens."""
    for word in ("zebra", "velvet", "kite", "jumped"):
        assert len(engine.tokenizer.encode_plain(word)) > 1


def test_the_template_renders_as_the_reference(folder: Path, oracle: Path) -> None:
    templates = [ChatTemplate.load(path) for path in (folder, oracle / "checkpoints" / "tiny-dense-tied")]
    picture, video, text = {"type": "image"}, {"type": "video"}, {"type": "text", "text": "What is it?"}
    conversations: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [picture, text]}],
        [{"role": "user", "content": [picture, text, picture, video]}, {"role": "assistant", "content": [text]}],
    ]
    for messages in conversations:
        for adds in (True, False):
            ours, theirs = (template.render(messages, adds) for template in templates if template is not None)
            assert ours == theirs


def test_the_processors_say_what_training_saw(folder: Path) -> None:
    assert read_image_processor(folder) == RULES
    assert read_video_processor(folder).max_pixels == 8 * RULES.max_pixels


def test_the_written_configuration_is_the_models(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    assert content["text_config"]["vocab_size"] == num_rows(the_tokenizer())
    assert content["vision_config"]["deepstack_visual_indexes"] == list(SMALL.deepstack)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["do_sample"] is False
