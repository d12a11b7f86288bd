"""Settings that hold a path, where it is blank."""

from __future__ import annotations

from pathlib import Path

import pytest

from kestrel_cli import options, values
from kestrel_cuda.errors import SettingError

PATHS = ("model", "strip_cache", "prompt_file", "messages", "logits", "profile")


@pytest.mark.parametrize("text", [" ", "   ", "\t", "\n"])
@pytest.mark.parametrize("name", PATHS)
def test_a_blank_path_is_refused_wherever_it_comes_from(name: str, text: str, tmp_path: Path) -> None:
    for flags, variables, label in (
        ({name: text}, {}, f"--{name.replace('_', '-')}"),
        ({}, {f"KESTREL_CUDA_{name.upper()}": text}, f"KESTREL_CUDA_{name.upper()}"),
    ):
        with pytest.raises(SettingError) as raised:
            options.settle(options.RUN, flags, variables)
        assert str(raised.value).startswith(f"{label} holds {text!r}; it takes ")
    file = tmp_path / "blank.toml"
    file.write_text("strip_cache = '  '", encoding="utf-8")
    with pytest.raises(SettingError, match="strip_cache holds '  '; it takes a folder"):
        options.settle(options.RUN, {"profile": str(file)}, {})


def test_every_setting_that_holds_a_path_is_among_them() -> None:
    holds_path = {one.name for one in options.RUN if one.parse in (values.path, values.file, values.named_file)}
    assert {*holds_path, "profile"} == set(PATHS)
