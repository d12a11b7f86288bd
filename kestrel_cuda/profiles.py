"""Profiles: named TOML files of settings. Finds and reads them; what a value means is for its reader to judge."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from kestrel_cuda.errors import SettingError
from kestrel_cuda.paths import shown_path

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
    "keep_tower",
    "vram",
    "cache_budget",
    "prefill_chunk",
    "min_pixels",
    "max_pixels",
    "image_tokens",
    "fps",
    "strip_cache",
    "host_keep",
    "backend",
    "device",
    "table",
)


MOST_PROFILE_BYTES = 1 << 20

_MOST = 10**18 - 1


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
    name = name_or_file
    if _is_path(name):
        name = shown_path(name_or_file)
        try:
            path = Path(name_or_file).expanduser()
        except RuntimeError as error:
            raise SettingError(f"profile {name}: there is no such user's home folder") from error
    else:
        folder = folder or profiles_folder()
        known = sorted(file.stem for file in folder.glob("*.toml"))
        if name not in known:
            listed = ", ".join(known) or "none"
            raise SettingError(f"no profile {name!r}; there are: {listed} (or give a file, like ./{name}.toml)")
        path = folder / f"{name}.toml"
    return Profile(name, _checked(name, _read(name, path)))


def _is_path(name: str) -> bool:
    return name.endswith(".toml") or Path(name).name != name or name == ".."


def _read(name: str, path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_PROFILE_BYTES + 1)
        if len(content) > MOST_PROFILE_BYTES:
            raise SettingError(f"profile {name}: more than {MOST_PROFILE_BYTES >> 20} MiB; give a .toml file")
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise SettingError(f"profile {name}: cannot be read: {error.strerror}; give a .toml file") from error
    except UnicodeDecodeError as error:
        raise SettingError(f"profile {name}: not UTF-8 at byte {error.start}; convert it to UTF-8") from error
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise SettingError(f"profile {name}: not TOML: nested too deeply; write lines like keep = 4") from error
    except ValueError as error:
        # Not only TOMLDecodeError: Python refuses to read a number of some thousand digits.
        raise SettingError(f"profile {name}: not TOML: {error}; write lines like keep = 4") from error


def _checked(name: str, table: Mapping[str, object]) -> dict[str, str | bool]:
    unknown = sorted(set(table) - set(KNOWN_KEYS))
    if unknown:
        raise SettingError(f"profile {name}: unknown {', '.join(unknown)}; a profile takes: {', '.join(KNOWN_KEYS)}")
    values: dict[str, str | bool] = {}
    for key, value in table.items():
        if isinstance(value, str | bool):
            values[key] = value
        elif isinstance(value, int) and abs(value) > _MOST:
            raise SettingError(f"profile {name}: {key} holds a number of more than {len(str(_MOST))} digits")
        elif isinstance(value, int | float):
            values[key] = str(value)
        else:
            kind = "a list" if isinstance(value, list) else "a table" if isinstance(value, dict) else "a date or a time"
            raise SettingError(f"profile {name}: {key} holds {kind}; it takes one word, number or switch")
    return values
