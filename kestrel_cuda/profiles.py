"""Profiles: named TOML files of settings. Finds and reads them; what a value means is for its reader to judge."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from kestrel_cuda.errors import SettingError

KNOWN_KEYS = (
    "model",
    "max_new_tokens",
    "ignore_eos",
    "ctx",
    "quant",
    "kv",
    "keep",
    "policy",
    "prefetch",
    "evict",
    "lazy",
    "vram",
    "cache_budget",
    "prefill_chunk",
    "strip_cache",
    "host_keep",
    "backend",
    "device",
    "table",
)


@dataclass(frozen=True)
class Profile:
    """A profile as written: `name` is what messages call it, numbers are kept as text, as a flag would give them."""

    name: str
    values: Mapping[str, str | bool]


def profiles_folder() -> Path:
    """The shipped profiles: beside the modules in an installed wheel, else at the top of the checkout."""
    package = Path(str(files("kestrel_cuda")))
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def load_profile(name_or_file: str, folder: Path | None = None) -> Profile:
    """The profile `low-vram` of the shipped ones, or the one in a file: anything with a folder or `.toml` in it.

    Raises SettingError when there is none, when it is not TOML, or when it holds a key or a value no profile takes.
    """
    if name_or_file.endswith(".toml") or Path(name_or_file).name != name_or_file:
        path = Path(name_or_file).expanduser()
        name = name_or_file
    else:
        folder = folder or profiles_folder()
        path = folder / f"{name_or_file}.toml"
        name = name_or_file
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in folder.glob("*.toml"))) or "none"
            raise SettingError(f"no profile {name!r}; there are: {known} (or give a file, like ./{name}.toml)")
    return Profile(name, _checked(name, _read(name, path)))


def _read(name: str, path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingError(f"profile {name}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError(f"profile {name}: not UTF-8 at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"profile {name}: not TOML: {error}") from error


def _checked(name: str, table: Mapping[str, object]) -> dict[str, str | bool]:
    unknown = sorted(set(table) - set(KNOWN_KEYS))
    if unknown:
        raise SettingError(f"profile {name}: unknown {', '.join(unknown)}; a profile takes: {', '.join(KNOWN_KEYS)}")
    values: dict[str, str | bool] = {}
    for key, value in table.items():
        if isinstance(value, str | bool):
            values[key] = value
        elif isinstance(value, int | float):
            values[key] = str(value)
        else:
            raise SettingError(f"profile {name}: {key} holds {value!r}; it takes one word, number or switch")
    return values
