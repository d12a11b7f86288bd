"""The file that --messages names: JSON to messages that the chat template takes. Knows no template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.messages import PART_KEYS, Message, check_messages, part_type, take_visuals
from kestrel_cuda.inputs.visual_source import VisualSource

_VISUAL_KEYS = ("image", "images", "image_url", "video", "videos", "video_url", "audio")

Say = Callable[[str], None]


def read_conversation(
    text: str, source: str, folder: Path, warn: Say
) -> tuple[list[Message], tuple[VisualSource, ...]]:
    """The messages, the content of each as one text where it is text, and their pictures and videos.

    Paths are taken from `folder` on; `warn` hears of what is in the file and goes unused. Raises InputError for what is
    not JSON, holds one key twice, or is no conversation.
    """
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{source}: not JSON: {error or 'nested too deeply'}; "
            "a list of messages is needed, or an object with messages"
        ) from error
    for piece in _strings(document):
        check_characters(piece, source)
    messages = check_messages(document, source)
    if isinstance(document, dict):
        _say_unused(document, ("messages",), source, warn)
    for number, message in enumerate(messages, start=1):
        _look_through(message, f"{source}: message {number}", warn)
    bare, visuals = take_visuals(messages, folder)
    return [_one_text(message) for message in bare], visuals


def check_characters(text: str, source: str) -> None:
    """Raise InputError for half a surrogate pair, which JSON can write and no text can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InputError(
            f"{source}: \\u{code:04x} is half of a surrogate pair and no character of its own; write the whole pair"
        ) from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object. Of two values under one key, a parser takes either: refuse."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise InputError(f"the key {json.dumps(key)} stands twice in one object; which one counts?")
        found[key] = value
    return found


def _strings(value: object) -> Iterator[str]:
    """Every text in a JSON value, keys too."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                yield text
            case list() as items:
                waiting += items
            case dict() as table:
                waiting += [*table.keys(), *table.values()]


def _look_through(message: Message, where: str, warn: Say) -> None:
    """Say what of a message goes unused. Raises InputError where that is a picture."""
    visuals = [key for key in _VISUAL_KEYS if key in message]
    if visuals:
        raise InputError(
            f"{where} holds {visuals[0]} beside its content; pictures belong in it, as parts like "
            '{"type": "image", "image": "a.png"}'
        )
    others = sorted(set(message) - {"role", "content"})
    if others:
        warn(f"{where}: {', '.join(others)} counts only where the checkpoint's chat template reads it")
    content = message["content"]
    for number, part in enumerate(content if isinstance(content, list) else (), start=1):
        _say_unused(part, PART_KEYS[str(part_type(part))], f"{where}, part {number}", warn)


def _one_text(message: Message) -> Message:
    """A message with its text parts joined, as the model's own template would, unless there are others among them."""
    content = message["content"]
    if not isinstance(content, list) or any(part_type(part) != "text" for part in content):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _say_unused(table: dict[str, object], used: tuple[str, ...], where: str, warn: Say) -> None:
    unused = sorted(set(table) - set(used))
    if unused:
        listed = " and ".join(filter(None, (", ".join(used[:-1]), used[-1])))
        verb = "are" if len(used) > 1 else "is"
        warn(f"{where}: only {listed} {verb} used, not {', '.join(unused)}")
