"""What was asked for, and by whom: flags over environment variables over the profile over defaults.

Pure functions over (flags, variables, profile); knows neither Typer nor the process's environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from kestrel_cuda.errors import SettingError
from kestrel_cuda.profiles import Profile

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Setting(Generic[T]):
    """One setting. `parse` turns its text into a value or raises ValueError; `takes` says what that text may be.

    A setting without `parse` is a switch. `variable` is read when no flag was given, `parse_variable` where it speaks
    other words than the flag. An empty variable is no wish, with `blank_is_unset` a blank one neither. What is no
    option of its own (the prompt, say) is left out of reports.
    """

    name: str
    default: T
    takes: str = "true or false"
    parse: Callable[[str], T] | None = None
    variable: str | None = None
    parse_variable: Callable[[str], T] | None = None
    variable_takes: str = ""
    blank_is_unset: bool = False
    show: Callable[[T], object] | None = None
    is_option: bool = True

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-") if self.is_option else self.name.upper()


class _Rank(IntEnum):
    FLAG = 0
    VARIABLE = 1
    PROFILE = 2


@dataclass(frozen=True)
class _Given:
    """What one source holds for a setting, unread. `label` is how a message names it."""

    raw: str | bool
    rank: _Rank
    source: str
    label: str


@dataclass(frozen=True)
class _Resolved:
    value: Any
    source: str


class Settings:
    """Every setting of a command with its value and where that came from. Index it with a Setting."""

    def __init__(self, resolved: Mapping[Setting[Any], _Resolved]) -> None:
        self._resolved = dict(resolved)

    def __getitem__(self, setting: Setting[T]) -> T:
        return cast(T, self._resolved[setting].value)

    def source(self, setting: Setting[Any]) -> str:
        return self._resolved[setting].source

    def as_json(self) -> dict[str, dict[str, object]]:
        """`{name: {value, source}}`, in the words a flag would take; null where nothing was chosen."""
        return {
            setting.name: {"value": _shown(setting, resolved.value), "source": resolved.source}
            for setting, resolved in self._resolved.items()
            if setting.is_option
        }


@dataclass(frozen=True)
class Conflict:
    """Two settings that cannot both be followed, and why."""

    one: Setting[Any]
    other: Setting[Any]
    reason: str


def resolve(
    known: Sequence[Setting[Any]],
    conflicts: Sequence[Conflict],
    flags: Mapping[str, str | bool],
    variables: Mapping[str, str],
    profile: Profile | None,
) -> Settings:
    """Lay the sources over one another. Only what wins is parsed: a variable that a flag overrides may hold anything.

    Of two settings that contradict each other the one from the stronger source wins; from equally strong ones it is
    a SettingError.
    """
    given = {s: found for s in known if (found := _find(s, flags, variables, profile)) is not None}
    for conflict in conflicts:
        one, other = given.get(conflict.one), given.get(conflict.other)
        if one is None or other is None:
            continue
        if one.rank == other.rank:
            raise SettingError(f"{one.label} and {other.label} contradict each other: {conflict.reason}")
        del given[conflict.one if one.rank > other.rank else conflict.other]
    return Settings({s: _read(s, given[s]) if s in given else _Resolved(s.default, "default") for s in known})


def _find(
    setting: Setting[Any], flags: Mapping[str, str | bool], variables: Mapping[str, str], profile: Profile | None
) -> _Given | None:
    if setting.name in flags:
        return _Given(flags[setting.name], _Rank.FLAG, "flag", setting.flag)
    variable = setting.variable
    if variable is not None and _is_wish(setting, variables.get(variable, "")):
        return _Given(variables[variable], _Rank.VARIABLE, variable, variable)
    if profile is not None and setting.name in profile.values:
        source = f"profile {profile.name}"
        return _Given(profile.values[setting.name], _Rank.PROFILE, source, f"{source}: {setting.name}")
    return None


def _is_wish(setting: Setting[Any], text: str) -> bool:
    return bool(text.strip() if setting.blank_is_unset else text)


def _read(setting: Setting[Any], given: _Given) -> _Resolved:
    parse, takes = setting.parse, setting.takes
    if given.rank is _Rank.VARIABLE and setting.parse_variable is not None:
        parse, takes = setting.parse_variable, setting.variable_takes
    if parse is None and isinstance(given.raw, bool):
        return _Resolved(given.raw, given.source)
    try:
        if parse is None or isinstance(given.raw, bool):
            raise ValueError
        return _Resolved(parse(given.raw), given.source)
    except ValueError as error:
        raise SettingError(f"{given.label} holds {given.raw!r}; it takes {takes}") from error


def _shown(setting: Setting[Any], value: object) -> object:
    if setting.show is not None:
        return setting.show(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return value
