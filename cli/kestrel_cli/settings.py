"""What was asked for, and by whom: flags over environment variables over the profile over defaults.

Pure functions over (flags, variables, profile); knows neither Typer nor the process's environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from kestrel_cuda.errors import SettingError, UserError
from kestrel_cuda.paths import shown_path
from kestrel_cuda.profiles import Profile
from kestrel_cuda.sizes import TooLarge

T = TypeVar("T")
Raw = str | bool | tuple[str, ...]
"""What a source holds for a setting, unread: a text, a switch, or the texts of a flag that may be repeated."""

_MOST_QUOTED = 100


@dataclass(frozen=True, eq=False)
class Setting(Generic[T]):
    """One setting. `parse` turns its text into a value or raises ValueError; `takes` says what that text may be.

    A setting without `parse` is a switch. `variable` is read when no flag was given, `parse_variable` where it speaks
    other words than the flag. An empty variable is no wish, with `blank_is_unset` a blank one neither. Where a flag may
    be repeated, `parse` gives a tuple, and the value is those of every flag joined. What is no option of its own (the
    prompt, say) is left out of reports.
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


_PROFILE = "profile "


@dataclass(frozen=True)
class _Given:
    """What one source holds for a setting, unread. `label` is how a message names it."""

    raw: Raw
    rank: _Rank
    source: str
    label: str


@dataclass(frozen=True)
class _Resolved:
    value: Any
    source: str
    label: str


class Settings:
    """Every setting of a command with its value and where that came from. Index it with a Setting.

    `notes` say what was given and not read, `warnings` what was set and means nothing.
    """

    def __init__(self, resolved: Mapping[Setting[Any], _Resolved], notes: Sequence[str] = ()) -> None:
        self._resolved = dict(resolved)
        self.notes = list(notes)
        self.warnings: list[str] = []

    def __contains__(self, setting: Setting[Any]) -> bool:
        return setting in self._resolved

    def __getitem__(self, setting: Setting[T]) -> T:
        return cast(T, self._resolved[setting].value)

    def source(self, setting: Setting[Any]) -> str:
        return self._resolved[setting].source

    def is_asked_for(self, setting: Setting[Any]) -> bool:
        """Whether a flag or a variable gives it: defaults and profiles are for every run."""
        source = self.source(setting)
        return source != "default" and not source.startswith(_PROFILE)

    def label(self, setting: Setting[Any]) -> str:
        """What a message calls a setting: its flag, or the variable or profile that it came from."""
        return self._resolved[setting].label

    def with_labels(self, text: str, *, by_path: bool = False) -> str:
        """A message of the engine, which knows flags alone: where each that nobody typed came from, is added.

        `by_path`: also of the one whose path, or a file in it, the message begins with.
        """
        begins = {setting: _length_of_path(resolved.value, text) for setting, resolved in self._resolved.items()}
        longest = max(begins.values(), default=0) if by_path else 0
        origins = [
            f"{setting.flag} comes from {resolved.label}"
            for setting, resolved in self._resolved.items()
            if resolved.source not in ("flag", "default")
            and resolved.label not in text
            and (re.search(rf"{setting.flag}(?![\w-])", text) or 0 < begins[setting] == longest)
        ]
        return f"{text} ({', '.join(origins)})" if origins else text

    @contextmanager
    def naming_sources(self) -> Iterator[None]:
        """The same for the errors of a block."""
        try:
            yield
        except UserError as error:
            error.args = (self.with_labels(str(error), by_path=True),)
            raise

    def as_json(self) -> dict[str, dict[str, object]]:
        """`{name: {value, source}}`, in the words a flag would take; null where nothing was chosen."""
        return {
            setting.name: {"value": _shown(setting, resolved.value), "source": resolved.source}
            for setting, resolved in self._resolved.items()
            if setting.is_option
        }


def _length_of_path(value: object, text: str) -> int:
    """Of the path in a setting's value that a message begins with; 0 for none. Flags that repeat hold paths as text."""
    values = [Path(one) for one in value if type(one) is str] if isinstance(value, tuple) else [value]
    shown = [shown_path(path) for path in values if isinstance(path, Path)]
    return max((len(path) for path in shown if re.match(rf"{re.escape(path)}(?=[/: ])", text)), default=0)


@dataclass(frozen=True)
class Conflict:
    """Two settings that cannot both be followed, and why."""

    one: Setting[Any]
    other: Setting[Any]
    reason: str


def resolve(
    known: Sequence[Setting[Any]],
    conflicts: Sequence[Conflict],
    flags: Mapping[str, Raw],
    variables: Mapping[str, str],
    profile: Profile | None,
    unread: Mapping[Setting[Any], str] = MappingProxyType({}),
) -> Settings:
    """Lay the sources over one another. Only what wins is parsed: a variable that a flag overrides may hold anything.

    Of two settings that contradict each other the one from the stronger source wins; from equally strong ones it is
    a SettingError. `unread` are settings that this command has no use for, and why: a note names those that are set.
    """
    notes = [
        f"{found.label} is not read: {why}"
        for setting, why in unread.items()
        if (found := _find(setting, flags, variables, profile)) is not None and not _is_default(setting, found)
    ]
    given = {s: found for s in known if (found := _find(s, flags, variables, profile)) is not None}
    for conflict in conflicts:
        one, other = given.get(conflict.one), given.get(conflict.other)
        if one is None or other is None:
            continue
        if one.rank == other.rank:
            raise SettingError(f"{one.label} and {other.label} contradict each other: {conflict.reason}")
        weaker, stronger = (one, other) if one.rank > other.rank else (other, one)
        notes.append(f"{weaker.label} is not read, since {stronger.label} is given: {conflict.reason}")
        del given[conflict.one if weaker is one else conflict.other]
    resolved = {s: _read(s, given[s]) if s in given else _Resolved(s.default, "default", s.flag) for s in known}
    return Settings(resolved, notes)


def _find(
    setting: Setting[Any], flags: Mapping[str, Raw], variables: Mapping[str, str], profile: Profile | None
) -> _Given | None:
    if setting.name in flags:
        return _Given(flags[setting.name], _Rank.FLAG, "flag", setting.flag)
    variable = setting.variable
    if variable is not None and _is_wish(setting, variables.get(variable, "")):
        return _Given(variables[variable], _Rank.VARIABLE, variable, variable)
    if profile is not None and setting.name in profile.values:
        source = f"{_PROFILE}{profile.name}"
        return _Given(profile.values[setting.name], _Rank.PROFILE, source, f"{source}: {setting.name}")
    return None


def _is_wish(setting: Setting[Any], text: str) -> bool:
    return bool(text.strip() if setting.blank_is_unset else text)


def _read(setting: Setting[Any], given: _Given) -> _Resolved:
    parse, takes = setting.parse, setting.takes
    if given.rank is _Rank.VARIABLE and setting.parse_variable is not None:
        parse, takes = setting.parse_variable, setting.variable_takes
    if parse is None and isinstance(given.raw, bool):
        return _Resolved(given.raw, given.source, given.label)

    def value_of(raw: str | bool) -> Any:
        try:
            if parse is None or isinstance(raw, bool):
                raise ValueError
            return parse(raw)
        except TooLarge as error:
            raise SettingError(f"{given.label} holds {_quoted(raw)}, {error}; it takes {takes}") from error
        except ValueError as error:
            raise SettingError(f"{given.label} holds {_quoted(raw)}; it takes {takes}") from error

    if isinstance(given.raw, tuple):
        return _Resolved(tuple(item for raw in given.raw for item in value_of(raw)), given.source, given.label)
    return _Resolved(value_of(given.raw), given.source, given.label)


def _is_default(setting: Setting[Any], given: _Given) -> bool:
    """Whether it asks for what would be without it; what cannot be read does not."""
    try:
        return bool(_read(setting, given).value == setting.default)
    except SettingError:
        return False


def _quoted(raw: str | bool) -> str:
    text = repr(raw)
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}... ({len(text) - 2} characters)"


def _shown(setting: Setting[Any], value: object) -> object:
    if setting.show is not None:
        return setting.show(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return value
