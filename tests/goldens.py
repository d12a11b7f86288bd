"""The reference's outputs in tests/data/oracle, by the name `CHECKPOINT/PROMPT`; its README.md explains the arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.config import Grid

ORACLE = Path(__file__).resolve().parent / "data" / "oracle"


def golden_names(*kinds: str) -> list[str]:
    """Names of all goldens whose prompt is of one of `kinds`: text, raw, img, vid."""
    paths = (path for kind in kinds for path in ORACLE.glob(f"golden/*/{kind}-*.npz"))
    return sorted(f"{path.parent.name}/{path.stem}" for path in paths)


def golden(name: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The arrays of a golden and what its JSON says."""
    path = ORACLE / "golden" / name
    with np.load(path.with_suffix(".npz")) as arrays:
        return dict(arrays), json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


def checkpoint(name: str) -> Path:
    """The checkpoint that a golden is of."""
    return ORACLE / "checkpoints" / name.split("/")[0]


def pixels_and_grids(arrays: dict[str, NDArray[Any]], kind: str) -> tuple[NDArray[np.float32], list[Grid]]:
    """Pixel rows and grids of a golden's images or of its video."""
    pixels_mk = arrays["pixel_values" if kind == "image" else "pixel_values_videos"]
    return pixels_mk, [(int(t), int(h), int(w)) for t, h, w in arrays[f"{kind}_grid_thw"]]
