"""A conversation from outside, checked: which message is wrong, and how. Knows no template and no tokens."""

from __future__ import annotations

from kestrel_cuda.checkpoint.json_file import shown
from kestrel_cuda.errors import InputError

Message = dict[str, object]

ROLES = ("system", "user", "assistant", "tool")
_PICTURE_KEYS = ("image", "image_url", "video", "video_url", "input_image", "input_video", "images", "videos")


def check_messages(value: object, where: str = "the conversation") -> list[Message]:
    """The messages of a conversation as JSON holds it: a list of them, or an object with `messages`.

    Raises InputError naming the message (counted from 1) and what was found. Keys beside `role` and `content` are
    the chat template's to read. `where` is what to call the conversation: its file, say.
    """
    if isinstance(value, dict):
        if value.get("tools"):
            raise InputError(f"{where} gives tools; tools are not supported yet")
        value = value.get("messages")
    if not isinstance(value, list):
        raise InputError(f"{where} has {_kind(value)} for messages; a list is needed, or an object with messages")
    if not value:
        raise InputError(f"{where} holds no messages; at least one is needed")
    for number, message in enumerate(value, start=1):
        _check_message(message, f"{where}: message {number}")
    return value


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        raise InputError(f"{where} is {_kind(message)}; an object with role and content is needed")
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"{where} has role {shown(role)}; roles are {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        found = f"content that is {_kind(content)}" if "content" in message else "no content"
        raise InputError(f"{where} ({role}) has {found}; text or a list of text parts is needed")
    for number, part in enumerate(content, start=1):
        _check_part(part, f"{where} ({role}), part {number},")


def _check_part(part: object, where: str) -> None:
    if not isinstance(part, dict):
        raise InputError(f'{where} is {_kind(part)}; an object like {{"type": "text", "text": "..."}} is needed')
    kind = part.get("type", "text")
    pictures = [key for key in _PICTURE_KEYS if key in part or kind == key]
    if pictures:
        raise InputError(f"{where} is a picture or video ({pictures[0]}); pictures are not supported yet, only text")
    if kind != "text" or not isinstance(part.get("text"), str):
        found = f"type {shown(kind)} with text {_kind(part.get('text'))}"
        raise InputError(f'{where} has {found}; an object like {{"type": "text", "text": "..."}} is needed')


def _kind(value: object) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
