"""A conversation from outside, checked: which message is wrong, and how. Knows no template and no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kestrel_cuda.checkpoint.json_file import json_kind, shown
from kestrel_cuda.config import LEAST_FPS, MOST_FPS
from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.visual_source import VisualKind, VisualSource, is_url, refuse_ambiguous

Message = dict[str, object]

ROLES = ("system", "user", "assistant", "tool")
PART_KEYS = {
    "text": ("type", "text"),
    "image": ("type", "image", "min_pixels", "max_pixels"),
    "video": ("type", "video", "fps"),
}
"""What counts in a part of each type."""

_VISUAL_KINDS: tuple[VisualKind, ...] = ("image", "video")
_OTHER_FORMS = ("image_url", "video_url", "input_image", "input_video", "images", "videos")
_EXAMPLES = {
    "text": '{"type": "text", "text": "..."}',
    "image": '{"type": "image", "image": "a.png"}',
    "video": '{"type": "video", "video": "a.mp4"} (or a folder, or a list of frames)',
}


def check_messages(value: object, where: str = "the conversation") -> list[Message]:
    """The messages of a conversation as JSON holds it: a list of them, or an object with `messages`.

    Raises InputError naming the message (counted from 1) and what was found. Keys beside `role` and `content` are
    the chat template's to read. `where` is what to call the conversation: its file, say.
    """
    if isinstance(value, dict):
        if value.get("tools"):
            raise InputError(f"{where} gives tools; tools are not supported yet")
        if "messages" not in value:
            if "role" in value:
                raise InputError(f"{where} is one message; put it into a list")
            raise InputError(f"{where} is an object without messages; a list is needed, or an object with messages")
        value = value["messages"]
    if not isinstance(value, list):
        raise InputError(f"{where} has {json_kind(value)} for messages; a list is needed, or an object with messages")
    if not value:
        raise InputError(f"{where} holds no messages; at least one is needed")
    for number, message in enumerate(value, start=1):
        _check_message(message, f"{where}: message {number}")
    return value


def check_turns(messages: object) -> None:
    """Raises InputError unless it is a list of messages with a role and with content of text or parts, whose pictures
    may have been taken: of other things a template drops some in silence."""
    if not isinstance(messages, list) or not messages:
        raise InputError(f"the conversation is {shown(messages)}; a list of at least one message is needed")
    for number, message in enumerate(messages, start=1):
        _check_turn(message, f"the conversation: message {number}")


def take_visuals(messages: Sequence[Message], folder: Path) -> tuple[list[Message], tuple[VisualSource, ...]]:
    """Checked messages whose pictures and videos are bare parts, as a template needs them, and those in their order.

    Paths are taken from `folder` on. Raises InputError for a URL that may be a file's name too.
    """
    sources: list[VisualSource] = []

    def bare(part: dict[str, Any]) -> dict[str, Any]:
        kind = part_type(part)
        for visual in _VISUAL_KINDS:
            if kind == visual:
                sources.append(_source(visual, part, folder))
                return {"type": kind, kind: ""}
        return part

    taken: list[Message] = []
    for message in messages:
        content = message["content"]
        taken.append({**message, "content": [bare(part) for part in content]} if isinstance(content, list) else message)
    return taken, tuple(sources)


def part_type(part: dict[str, Any]) -> object:
    """What a part says it is, or what it holds."""
    return part.get("type", next((kind for kind in _VISUAL_KINDS if kind in part), "text"))


def _source(kind: VisualKind, part: dict[str, Any], folder: Path) -> VisualSource:
    def located(path: str) -> str:
        if is_url(path):
            refuse_ambiguous(path, folder)
            return path
        joined = str(folder / path)
        # What stood before such a name was a bare `./`.
        return f"./{joined}" if is_url(joined) else joined

    named = part[kind]
    path = located(named) if isinstance(named, str) else tuple(map(located, named))
    if kind == "video":
        return VisualSource(kind, path, fps=part.get("fps"))
    return VisualSource(kind, path, min_pixels=part.get("min_pixels"), max_pixels=part.get("max_pixels"))


def _check_message(message: object, where: str) -> None:
    role, content = _check_turn(message, where)
    if isinstance(content, list):
        for number, part in enumerate(content, start=1):
            _check_part(part, f"{where} ({role}), part {number},")


def _check_turn(message: object, where: str) -> tuple[str, str | list[object]]:
    """Its role and content, text or parts that are not looked at."""
    if not isinstance(message, dict):
        raise InputError(f"{where} is {json_kind(message)}; an object with role and content is needed")
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"{where} has role {shown(role)}; roles are {', '.join(ROLES)}")
    content = message.get("content")
    if not isinstance(content, str | list):
        found = f"content that is {json_kind(content)}" if "content" in message else "no content"
        raise InputError(f"{where} ({role}) has {found}; text or a list of parts is needed")
    return role, content


def _check_part(part: object, where: str) -> None:
    if not isinstance(part, dict):
        raise InputError(f"{where} is {json_kind(part)}; an object like {_EXAMPLES['text']} is needed")
    kind = part_type(part)
    others = [key for key in _OTHER_FORMS if key in part or kind == key]
    if others:
        form = "video" if "video" in others[0] else "image"
        raise InputError(f"{where} holds {others[0]}, which is not read; files are, as {_EXAMPLES[form]}")
    if kind not in ("text", *_VISUAL_KINDS):
        raise InputError(f"{where} has type {shown(kind)}; types are text, image and video")
    strays = [visual for visual in _VISUAL_KINDS if visual in part and visual != kind]
    if strays:
        raise InputError(
            f"{where} has type {shown(kind)} and holds {strays[0]}; a part is one of them, in its own object"
        )
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise InputError(f"{where} has text that is {json_kind(part.get('text'))}; {_EXAMPLES['text']} is needed")
        return
    named = part.get(kind)
    listed = named if kind == "video" and isinstance(named, list) and named else [named]
    if not all(isinstance(path, str) and path.strip() and "\0" not in path for path in listed):
        raise InputError(f"{where} has no path for {kind}; {_EXAMPLES[kind]} is needed")
    if kind == "video":
        _check_fps(part.get("fps"), where)
        return
    for key in ("min_pixels", "max_pixels"):
        limit = part.get(key)
        if limit is not None and not (isinstance(limit, int) and not isinstance(limit, bool) and limit > 0):
            raise InputError(f"{where} has {key} {shown(limit)}; a whole number of at least 1 is needed")


def _check_fps(fps: object, where: str) -> None:
    if fps is None:
        return
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not LEAST_FPS <= fps <= MOST_FPS:
        raise InputError(
            f"{where} has fps {shown(fps)}; a number from {LEAST_FPS} to {MOST_FPS} is needed, of frames a second"
        )
