"""JSON files of a checkpoint, with complaints that name the file and the key. Knows no key of any of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kestrel_cuda.errors import CheckpointError


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
        return JsonObject(value, self.path, f"{self.prefix}{key}.")

    def integer(self, key: str, least: int = 1) -> int:
        value = self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"a whole number of at least {least}")
        return value

    def number(self, key: str) -> float:
        """A number above zero."""
        value = self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(key, "a number above zero")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self._needed(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0."""
        value = self._needed(key)
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.wrong(key, "a list of whole numbers")
        return tuple(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as one number, a list or not at all; repeats are dropped."""
        value = self.values.get(key)
        if value is None:
            return ()
        listed = value if isinstance(value, list) else [value]
        if not all(type(item) is int and item >= 0 for item in listed):
            raise self.wrong(key, "a token id or a list of them")
        return tuple(dict.fromkeys(listed))

    def missing(self, key: str) -> CheckpointError:
        """The error that says `key` is needed and absent."""
        return CheckpointError(f"{self.path} lacks {self.prefix}{key}; take this file from the original checkpoint")

    def wrong(self, key: str, needed: str) -> CheckpointError:
        """The error that says what `key` holds and what it has to hold."""
        found = json.dumps(self.values.get(key), ensure_ascii=False)
        found = found if len(found) <= 80 else found[:77] + "..."
        return CheckpointError(f"{self.path}: {self.prefix}{key} is {found}; it has to be {needed}")

    def _needed(self, key: str) -> object:
        value = self.values.get(key)
        if value is None:
            raise self.missing(key)
        return value


def read_json(path: Path) -> JsonObject:
    """The object in a JSON file. Raises CheckpointError when it cannot be read or holds something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise CheckpointError(f"{path} is not JSON ({path.stat().st_size} bytes): {error}; fetch it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}; an object is needed")
    return JsonObject(values, path)


def read_json_if_present(path: Path) -> JsonObject:
    """As `read_json`; an empty object when there is no such file."""
    return read_json(path) if path.exists() else JsonObject({}, path)
