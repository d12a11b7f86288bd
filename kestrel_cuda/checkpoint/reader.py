"""A checkpoint: its headers checked against its config, its tensors by name. Knows no file layout, copies no tensor.

Everything that can be wrong with a checkpoint is said here, before anything is allocated for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from kestrel_cuda.checkpoint.config_json import read_config
from kestrel_cuda.checkpoint.files import FileStamp, printable, shortened
from kestrel_cuda.checkpoint.json_file import JsonObject, read_json_if_present, shown
from kestrel_cuda.checkpoint.locate import Location, StoredTensors, check_directory, locate_tensors
from kestrel_cuda.checkpoint.names import (
    EMBEDDING,
    LAYER_PREFIX,
    LM_HEAD_WEIGHT,
    VISION_BLOCK_PREFIX,
    VISION_MERGER_PREFIX,
    VISION_PREFIX,
    Shape,
    linear_name,
    linear_shape,
    stored_numbers,
    text_shapes,
    vision_shapes,
)
from kestrel_cuda.checkpoint.tensor_file import FLOAT_DTYPES, RawTensor
from kestrel_cuda.config import ModelConfig, VisionConfig
from kestrel_cuda.errors import CheckpointError, InputError
from kestrel_cuda.paths import shown_path
from kestrel_cuda.weight_keys import Projection, WeightKey

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_NEUTRAL_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint. Tensors may be read from several threads.

    `tied` says that lm_head is the embedding, `lm_head_name` which tensor it is; `text_only` that no vision tower
    is stored; `dtypes` how many tensors are stored in each dtype. `files` are those that the tensors are in, and the
    index, as they were when they were opened. `warnings` and `notes` are one line each.
    """

    path: Path
    config: ModelConfig
    tied: bool
    text_only: bool
    generation_eos_ids: tuple[int, ...]
    dtypes: dict[str, int]
    files: tuple[FileStamp, ...]
    warnings: list[str]
    notes: list[str]
    _locations: dict[str, Location] = field(repr=False)

    @property
    def lm_head_name(self) -> str:
        return EMBEDDING if self.tied else LM_HEAD_WEIGHT

    def tensor(self, name: str) -> RawTensor:
        """A view of the tensor of that name (as in `names.py`). Raises KeyError for one the model does not have."""
        location = self._locations[name]
        return location.file.view(location.stored_name, name)

    def tower(self) -> VisionConfig:
        """Its vision tower. Raises InputError where it has none."""
        if self.text_only or self.config.vision is None:
            raise InputError(f"{shown_path(self.path)} has no vision tower: it reads text only; leave the pictures out")
        return self.config.vision

    def path_of(self, name: str) -> Path:
        """The file that the tensor of that name is in."""
        return self._locations[name].file.path

    def not_finite(self, name: str, detail: str = "") -> CheckpointError:
        """The error that says so of a tensor's weights."""
        return CheckpointError(
            f"{shown_path(self.path_of(name))}: {name} holds weights that are not finite{detail}; the checkpoint is "
            "damaged, fetch it again"
        )

    def check_unchanged(self) -> None:
        """Raise CheckpointError when a file is another one than when it was opened, or gone: views would be of that."""
        for stamp in self.files:
            if FileStamp.of(stamp.path) != stamp:
                raise CheckpointError(
                    f"{shown_path(stamp.path)} changed while it was in use, so what was read of it may be of either; "
                    "run again"
                )

    def weight(self, key: WeightKey) -> RawTensor:
        """A view of one plain weight `[n, k]`; of the embedding for lm_head of a tied model."""
        return self.tensor(self.lm_head_name if key.projection is Projection.LM_HEAD else linear_name(key))


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in directory `path`, checked whole: files, sizes, names, shapes, dtypes.

    Raises CheckpointError with one line that says what was found, what is needed and what to do.
    """
    check_directory(path)
    config = read_config(path / "config.json")
    generation = read_json_if_present(path / "generation_config.json")
    warnings: list[str] = []
    notes = [f"config.json does not give a value; taken: {default}" for default in config.defaults_used]

    stored = locate_tensors(path, warnings)
    locations = stored.locations
    # Counted first: a number from a file is looped over only where as much is stored.
    _check_count(path, "num_hidden_layers", config.text.num_layers, LAYER_PREFIX, locations)
    needed = text_shapes(config.text)
    tied = LM_HEAD_WEIGHT not in locations
    if not tied:
        needed[LM_HEAD_WEIGHT] = linear_shape(config.text, Projection.LM_HEAD)
        if config.tie_word_embeddings:
            notes.append("lm_head.weight is stored though config.json ties it to the embedding; the stored one is used")
    elif not config.tie_word_embeddings:
        _check_listed(path, stored, [LM_HEAD_WEIGHT])
        raise CheckpointError(
            f"{shown_path(path)} lacks lm_head.weight and config.json does not tie it to the embedding; fetch it again"
        )
    text_only = not any(name.startswith(VISION_PREFIX) for name in locations)
    if text_only:
        notes.append("the checkpoint has no vision tower (model.visual.*): text only")
    else:
        vision = _vision_config(path, config)
        _check_count(path, "vision_config.depth", vision.depth, VISION_BLOCK_PREFIX, locations)
        num_mergers = len(vision.deepstack_blocks)
        _check_count(
            path, "vision_config.deepstack_visual_indexes, counted,", num_mergers, VISION_MERGER_PREFIX, locations
        )
        needed |= vision_shapes(vision)
    _check_tensors(path, stored, needed)

    unexpected = sorted(locations.keys() - needed.keys())
    if unexpected:
        warnings.append(
            f"tensors that the model does not have are left alone ({len(unexpected)}): {shortened(unexpected)}"
        )
    if stored.unlisted:
        warnings.append(
            f"tensors that the index leaves out are left alone ({len(stored.unlisted)}): "
            f"{shortened(sorted(stored.unlisted))}"
        )
    notes += _sampling_note(generation)
    return Checkpoint(
        path=path,
        config=config,
        tied=tied,
        text_only=text_only,
        generation_eos_ids=generation.ids("eos_token_id"),
        dtypes=dict(Counter(locations[name].stored.dtype for name in needed)),
        files=stored.files,
        warnings=warnings,
        notes=notes,
        _locations={name: locations[name] for name in needed},
    )


def _vision_config(path: Path, config: ModelConfig) -> VisionConfig:
    if config.vision is None:
        raise CheckpointError(
            f"{shown_path(path)} stores a vision tower (model.visual.*) but config.json lacks vision_config; take "
            "config.json from the original checkpoint"
        )
    return config.vision


def _check_count(path: Path, key: str, needed: int, prefix: str, names: Collection[str]) -> None:
    """Raise when config.json counts more or fewer than are stored under `prefix`.

    Single tensors lost from a plausible count are left to `_check_tensors`, which names them.
    """
    stored = stored_numbers(prefix, names)
    gapless = stored == set(map(str, range(len(stored))))
    if (gapless and needed != len(stored)) or needed > len(names):
        raise CheckpointError(
            f"{path / 'config.json'}: {key} is {needed}, but {len(stored)} are stored ({prefix}*); "
            "take config.json and the tensors from the same checkpoint"
        )


def _check_listed(path: Path, stored: StoredTensors, missing: list[str]) -> None:
    """Raise when tensors are missing only because the index leaves them out."""
    unlisted = [name for name in missing if name in stored.unlisted]
    if unlisted:
        raise CheckpointError(
            f"{shown_path(path)}: the index leaves out needed tensors ({len(unlisted)}): {shortened(unlisted)}, "
            "stored in "
            f"{stored.unlisted[unlisted[0]].name}; fetch the index again"
        )


def _check_tensors(path: Path, stored: StoredTensors, needed: dict[str, Shape]) -> None:
    """Raise when a needed tensor is absent, of a wrong shape, or stored in a dtype that is not read."""
    locations = stored.locations
    missing = [name for name in needed if name not in locations]
    if missing:
        _check_listed(path, stored, missing)
        raise CheckpointError(
            f"{shown_path(path)} lacks needed tensors ({len(missing)}): {shortened(missing)}; fetch it again"
        )
    for name, shape in needed.items():
        location = locations[name]
        if location.stored.shape != shape:
            found, right = list(location.stored.shape), list(shape)
            raise CheckpointError(
                f"{shown_path(location.file.path)}: {name} is {found}; config.json needs {right}: take both from the "
                "same checkpoint"
            )
    unread = [name for name in needed if locations[name].stored.dtype not in FLOAT_DTYPES]
    if unread:
        dtype = locations[unread[0]].stored.dtype
        raise CheckpointError(
            f"{shown_path(path)} stores tensors in {printable(dtype)} ({len(unread)}): {shortened(unread)}; "
            f"only {', '.join(FLOAT_DTYPES)} are read: use the original checkpoint"
        )


def _sampling_note(generation: JsonObject) -> list[str]:
    """What generation_config.json asks for and does not get, as one note or none."""
    samples = generation.get("do_sample") is True
    asked = [key for key in _SAMPLING if samples and key in generation]
    asked += [key for key, neutral in _NEUTRAL_PENALTIES.items() if generation.get(key) not in (None, neutral)]
    if not samples and not asked:
        return []
    values = ", ".join(f"{key} {shown(generation.get(key))}" for key in asked) or "default values"
    wish = f"sampling ({values})" if samples else values
    return [f"generation_config.json asks for {wish}; decoding here is greedy"]
