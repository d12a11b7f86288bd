"""Profiles: the shipped ones are found and agree with the program, and what no profile takes is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kestrel_cli import options
from kestrel_cuda.errors import SettingError
from kestrel_cuda.profiles import KNOWN_KEYS, load_profile, profiles_folder

SHIPPED = sorted(file.stem for file in profiles_folder().glob("*.toml"))


def test_the_shipped_profiles_are_found() -> None:
    assert SHIPPED == ["default", "low-vram", "qwen3-vl-2b-int8", "qwen3-vl-8b-int4"]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_is_accepted_by_run(name: str) -> None:
    settings = options.settle(options.RUN, {"profile": name}, {})
    for key in load_profile(name).values:
        (setting,) = (one for one in options.RUN if one.name == key)
        assert settings.source(setting) == f"profile {name}"


def test_the_default_profile_holds_the_defaults() -> None:
    settings, defaults = options.settle(options.RUN, {"profile": "default"}, {}), options.settle(options.RUN, {}, {})
    for setting in options.RUN:
        if setting.name != "profile":
            assert settings[setting] == defaults[setting], setting.name


def test_the_default_profile_names_every_key() -> None:
    text = (profiles_folder() / "default.toml").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^(?:# )?(\w+) = ", text, re.MULTILINE)) == sorted([*KNOWN_KEYS])


def test_every_known_key_is_a_setting_of_run() -> None:
    assert set(KNOWN_KEYS) <= {setting.name for setting in options.RUN}


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"no profile 'lowvram'; there are: default, low-vram, .*\./lowvram\.toml"):
        load_profile("lowvram")


def test_a_file_is_read_from_where_it_lies(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(b'\xef\xbb\xbfkeep = 4\r\nquant = "q4_0"\r\nlazy = true\r\n')
    assert load_profile(str(file)).values == {"keep": "4", "quant": "q4_0", "lazy": True}


def test_a_file_that_never_ends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "endless.toml").symlink_to("/dev/zero")
    with pytest.raises(SettingError, match=r"endless\.toml: more than 1 MiB; give a \.toml file$"):
        load_profile(str(tmp_path / "endless.toml"))


def test_a_name_is_looked_up_in_its_folder_only(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("keep = 4", encoding="utf-8")
    assert load_profile("mine", tmp_path).values == {"keep": "4"}
    with pytest.raises(SettingError, match="no profile 'mine'"):
        load_profile("mine")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"kepe = 4\nvarm = 1\n", "unknown kepe, varm; a profile takes: model, max_new_tokens, "),
        (b"[run]\nkeep = 4\n", "unknown run; a profile takes: "),
        (b"keep = [4]\n", "keep holds a list"),
        (b"keep = {a = 4}\n", "keep holds a table"),
        (b"keep = [" + b"0x" + b"f" * 5000 + b"]\n", "keep holds a list"),
        (b"keep = " + b"9" * 5000, "not TOML: Exceeds the limit"),
        (b"keep = 0x" + b"f" * 5000, "keep holds a number of more than 18 digits"),
        (b"keep = -" + b"9" * 19, "keep holds a number of more than 18 digits"),
        (b"keep = " + b"[" * 5000, "not TOML: nested too deeply; write lines like keep = 4$"),
        (b"keep = 1979-05-27\n", "keep holds a date or a time"),
        (b"keep: 4\n", "not TOML: .*line 1"),
        (b'model = "\xff"\n', "not UTF-8 at byte 9; convert it to UTF-8$"),
    ],
)
def test_a_damaged_profile_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(SettingError, match=message) as raised:
        load_profile(str(file))
    assert str(raised.value).startswith(f"profile {file}: ")


@pytest.mark.parametrize("name", [".", "..", "/", "./"])
def test_a_folder_is_no_profile(name: str) -> None:
    with pytest.raises(SettingError, match=r"cannot be read: Is a directory; give a \.toml file$"):
        load_profile(name)


def test_a_home_that_nobody_has_is_refused() -> None:
    with pytest.raises(SettingError, match=r"profile ~nosuch/x\.toml: there is no such user's home folder"):
        load_profile("~nosuch/x.toml")


@pytest.mark.parametrize("name", ["", "~", "x" * 5000])
def test_what_can_be_no_name_is_unknown(name: str) -> None:
    with pytest.raises(SettingError, match=f"no profile '{name}'; there are: "):
        load_profile(name)


@pytest.mark.parametrize("name", ["./missing.toml", "missing.toml", "some/folder"])
def test_a_missing_file_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match=f"profile {name}: cannot be read: No such file"):
        load_profile(name)
