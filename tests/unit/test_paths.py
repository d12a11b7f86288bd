"""Paths in messages: as they are, or in quotes where they would not be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrel_cuda.checkpoint.locate import check_directory
from kestrel_cuda.checkpoint.reader import open_checkpoint
from kestrel_cuda.errors import CheckpointError, SettingError
from kestrel_cuda.paths import shown_path
from kestrel_cuda.profiles import load_profile


@pytest.mark.parametrize("path", ["model", "/models/a b", "~/Modell für 8B", "模型"])
def test_a_usual_path_is_shown_as_it_is(path: str) -> None:
    assert shown_path(path) == shown_path(Path(path)) == path


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("", "''"),
        ("  ", "'  '"),
        (" model", "' model'"),
        ("model ", "'model '"),
        ("a\nb", r"'a\nb'"),
        ("a\x1b[0m", r"'a\x1b[0m'"),
        ("a\udcff", r"'a\udcff'"),
        ("\u00a0", r"'\xa0'"),
    ],
)
def test_an_odd_path_is_quoted(path: str, shown: str) -> None:
    assert shown_path(path) == shown


@pytest.mark.parametrize(("model", "is_name"), [("Qwen/Qwen3-VL-8B", True), ("Qwen", False), ("/no/where", False)])
def test_a_name_on_hugging_face_says_how_to_fetch_it(model: str, is_name: bool) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_directory(Path(model))
    assert (f"hf download {model} --local-dir DIR" in str(caught.value)) == is_name


def test_messages_show_odd_paths() -> None:
    with pytest.raises(CheckpointError, match=r"^'  ' does not exist; give a directory"):
        open_checkpoint(Path("  "))
    with pytest.raises(SettingError, match=r"^profile ' \./gone\.toml': cannot be read"):
        load_profile(" ./gone.toml")
