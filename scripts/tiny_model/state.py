"""A training run on disk: weights, optimizer and step, to go on from. PyTorch is imported when it is needed.

state.json names the rest: safetensors files of at most 15 MB each, so that a state passes where large files do not.
Weights are float32 and come back as they were; the optimizer's moments are kept in bfloat16. Nothing else is needed:
the data of a step depends on the seed and the items before it alone, and no layer draws random numbers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.tiny_model.optimizer import Optimizer

FILE_BYTES = 15_000_000
_NAME = "state.json"
_WEIGHT = "weight"


class StateError(Exception):
    """A state that cannot be gone on from; the message says why and what to do."""


@dataclass(frozen=True)
class Progress:
    """What a state holds beside tensors. A run goes on with the same seed, or items would come twice."""

    step: int
    seed: int
    num_items: int


def exists(folder: Path) -> bool:
    return (folder / _NAME).is_file()


def save(folder: Path, network: Any, optimizer: Optimizer, progress: Progress) -> None:
    """Write a state; the one before stays whole until state.json names the new files."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = {}
    for name, parameter in network.named_parameters():
        tensors[f"{_WEIGHT}/{name}"] = parameter.detach().cpu()
        for moment, values in optimizer.moments(parameter).items():
            tensors[f"{moment}/{name}"] = values.to("cpu", torch.bfloat16)
    files: list[str] = []
    part: dict[str, Any] = {}
    for name, tensor in [*tensors.items(), ("", None)]:
        size = sum(held.numel() * held.element_size() for held in part.values())
        if part and (tensor is None or size + tensor.numel() * tensor.element_size() > FILE_BYTES):
            files.append(f"state-{progress.step:07d}-{len(files)}.safetensors")
            save_file(part, folder / files[-1])
            part = {}
        if tensor is not None:
            part[name] = tensor
    content = json.dumps(asdict(progress) | {"files": files}, indent=2) + "\n"
    draft = folder / f"{_NAME}.part"
    draft.write_text(content, encoding="utf-8")
    draft.replace(folder / _NAME)
    for old in folder.glob("state-*.safetensors"):
        if old.name not in files:
            old.unlink()


def read_progress(folder: Path) -> tuple[Progress, list[str]]:
    """What state.json says, and its files. Raises StateError."""
    try:
        content = json.loads((folder / _NAME).read_text(encoding="utf-8"))
        files = content.pop("files")
        return Progress(**content), files
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{folder / _NAME} cannot be read ({error}); give the folder of an earlier run") from error


def load(folder: Path, network: Any, optimizer: Optimizer) -> Progress:
    """Fill the network and its optimizer, on whatever device they are. Raises StateError."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    progress, files = read_progress(folder)
    tensors: dict[str, Any] = {}
    try:
        for file in files:
            tensors |= load_file(folder / file)
    except (OSError, SafetensorError) as error:
        raise StateError(f"{folder} has a damaged or absent state file ({error}); fetch all of them again") from error
    for name, parameter in network.named_parameters():
        moments = optimizer.moment_names(parameter)
        kept = {kind: tensors.pop(f"{kind}/{name}", None) for kind in (_WEIGHT, *moments)}
        if any(tensor is None or tensor.shape != parameter.shape for tensor in kept.values()):
            raise StateError(f"{folder} has no fitting {name}: it is the state of another model; begin anew elsewhere")
        with torch.no_grad():
            parameter.copy_(kept[_WEIGHT])
        optimizer.resume(parameter, progress.step, {moment: kept[moment] for moment in moments})
    if tensors:
        raise StateError(f"{folder} holds {next(iter(tensors))}, which this model has not; begin anew elsewhere")
    return progress
