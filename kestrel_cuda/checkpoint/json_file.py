"""JSON files of a checkpoint, with complaints that name the file and the key. Knows no key of any of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kestrel_cuda.checkpoint.files import is_present, printable, read_text
from kestrel_cuda.errors import CheckpointError
from kestrel_cuda.paths import shown_path

MAX_INTEGER = 2**31 - 1
"""The largest whole number taken: far above any size or id there is, and safe to compute with."""

MAX_NUMBER = 3.4e38
"""The largest number taken: about what a float32 holds."""

MAX_DEPTH = 64
"""Levels of objects and lists: far above any real file, and far below what Python's own stack allows."""


class JsonObject:
    """The object at the top of a JSON file, or one nested in it; a key that holds null counts as absent.

    Every accessor raises CheckpointError, naming the file and the dotted key, when the value is absent or not
    of the kind asked for.
    """

    def __init__(self, values: Mapping[str, object], path: Path, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str) -> object:
        """The value of `key`, None when it is absent."""
        return self.values.get(key)

    def child(self, key: str) -> JsonObject | None:
        """The object that `key` holds, None when it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return JsonObject(value, self.path, f"{self.prefix}{printable(key)}.")

    def integer(self, key: str, least: int = 1) -> int:
        value = self._needed(key)
        if not _is_integer(value, least):
            raise self.wrong(key, f"a whole number of at least {least}{_no_more(value)}")
        assert isinstance(value, int)
        return value

    def number(self, key: str) -> float:
        """A number above zero that a float32 can hold."""
        value = self._needed(key)
        # Compared before it is converted: a whole number from a file may be larger than any float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
            raise self.wrong(key, f"a number above zero, at most {MAX_NUMBER}")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self._needed(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0."""
        value = self._needed(key)
        if not isinstance(value, list) or not all(_is_integer(item, 0) for item in value):
            raise self.wrong(key, f"a list of whole numbers{_no_more(value)}")
        return tuple(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as one number, a list or not at all; repeats are dropped."""
        value = self.values.get(key)
        if value is None:
            return ()
        listed = value if isinstance(value, list) else [value]
        if not all(_is_integer(item, 0) for item in listed):
            raise self.wrong(key, f"a token id or a list of them{_no_more(value)}")
        return tuple(dict.fromkeys(listed))

    def missing(self, key: str) -> CheckpointError:
        """The error that says `key` is needed and absent."""
        return CheckpointError(
            f"{shown_path(self.path)} lacks {self.prefix}{key}; take this file from the original checkpoint"
        )

    def wrong(self, key: str, needed: str) -> CheckpointError:
        """The error that says what `key` holds and what it has to hold."""
        name = self.prefix + printable(key)
        return CheckpointError(
            f"{shown_path(self.path)}: {name} is {shown(self.values.get(key))}; it has to be {needed}"
        )

    def _needed(self, key: str) -> object:
        value = self.values.get(key)
        if value is None:
            raise self.missing(key)
        return value


def shown(value: object) -> str:
    """A value from a JSON file as an error may show it: in JSON, on one line, not too long."""
    try:
        return printable(json.dumps(value, ensure_ascii=False))
    except (RecursionError, ValueError, TypeError):  # deeper, or longer a number, than Python writes
        return json_kind(value)


def json_kind(value: object) -> str:
    """What JSON calls a value; of Python's others, their type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    other = "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
    return names.get(type(value), other)


def parse_json(text: str | bytes) -> object:
    """The value that JSON text holds.

    Raises ValueError with a clause when it is not JSON, nests deeper than MAX_DEPTH, or gives a key two values.
    """
    try:
        value: object = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")


def read_json(path: Path) -> JsonObject:
    """The object in a JSON file. Raises CheckpointError when it cannot be read or holds something else."""
    try:
        values = parse_json(read_text(path, "utf-8-sig"))
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise CheckpointError(
            f"{shown_path(path)} is not JSON ({path.stat().st_size} bytes): {error}; fetch it again"
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{shown_path(path)} holds {json_kind(values)}; an object is needed: fetch it again")
    return JsonObject(values, path)


def read_json_if_present(path: Path) -> JsonObject:
    """As `read_json`; an empty object when nothing bears this name."""
    return read_json(path) if is_present(path) else JsonObject({}, path)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        for key, value in pairs:
            if values[key] != value:
                raise ValueError(f"it gives {shown(key)} two values, {shown(value)} and {shown(values[key])}")
    return values


def _is_integer(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= MAX_INTEGER


def _no_more(value: object) -> str:
    """What to add about the upper bound when that is what `value` breaks."""
    listed = value if isinstance(value, list) else [value]
    return f", at most {MAX_INTEGER}" if any(type(item) is int and item > MAX_INTEGER for item in listed) else ""
