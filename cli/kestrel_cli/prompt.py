"""Where a prompt comes from: the argument, a file, a conversation, token ids or standard input. Knows no tokenizer."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import BinaryIO

from kestrel_cli import options
from kestrel_cli.conversation import Say, read_conversation
from kestrel_cli.settings import Settings
from kestrel_cli.visuals import sources_of
from kestrel_cuda.errors import InputError
from kestrel_cuda.inputs.messages import Message
from kestrel_cuda.inputs.visual_source import VisualSource
from kestrel_cuda.paths import shown_path

BUILT_IN_QUESTION = "What is a residency window, in one sentence?"
BUILT_IN_VISUAL_QUESTION = "What does this show?"
_STDIN = Path("-")

MOST_TEXT_BYTES = 64 << 20
"""More than any context holds: 262,144 tokens of blanks are half of it."""


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation for the chat template, and the pictures and videos of its messages."""

    messages: list[Message]
    visuals: tuple[VisualSource, ...] = ()


@dataclass(frozen=True)
class RawPrompt:
    """Text that goes to the tokenizer as it is, and what its image and video tokens stand for."""

    text: str
    visuals: tuple[VisualSource, ...] = ()


@dataclass(frozen=True)
class IdsPrompt:
    """Token ids that go to the model as they are, and the pictures and videos that are in them at full length."""

    ids: list[int]
    visuals: tuple[VisualSource, ...] = ()


Prompt = ChatPrompt | RawPrompt | IdsPrompt


def standard_input() -> BinaryIO | None:
    """Standard input as bytes; None when it is closed."""
    return None if sys.stdin is None or sys.stdin.closed else sys.stdin.buffer


def read_prompt(settings: Settings, stdin: BinaryIO | None, say: Say, warn: Say) -> Prompt:
    """The prompt that the settings name; `say` hears where it comes from, `warn` what of it goes unused.

    Raises InputError when a source cannot be read, is not UTF-8, or is empty with --raw.
    """
    visuals = sources_of(settings)
    ids = settings[options.IDS]
    if ids is not None:
        return IdsPrompt(list(ids), visuals)
    messages_file = settings[options.MESSAGES]
    if messages_file is not None:
        text = _file_text(messages_file, stdin, say)
        return ChatPrompt(*read_conversation(text, shown_path(messages_file), messages_file.parent, warn))
    text = _text(settings, stdin, say, BUILT_IN_VISUAL_QUESTION if visuals else BUILT_IN_QUESTION)
    if settings[options.RAW]:
        if not text:
            raise InputError("the prompt is empty; --raw needs at least one character")
        return RawPrompt(text, visuals)
    system = settings[options.SYSTEM]
    messages = [] if system is None else [_message("system", _unicode(system, "the system message"))]
    return ChatPrompt([*messages, _question(text, visuals)], visuals)


def _question(text: str, visuals: Sequence[VisualSource]) -> Message:
    if not visuals:
        return _message("user", text)
    # No paths: a template needs none, and a path may be no valid Unicode.
    parts: list[dict[str, str]] = [{"type": visual.kind, visual.kind: ""} for visual in visuals]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _text(settings: Settings, stdin: BinaryIO | None, say: Say, question: str) -> str:
    argument, file = settings[options.PROMPT], settings[options.PROMPT_FILE]
    if argument is not None and argument != "-":
        if _names_something(argument):
            say(
                f"the prompt is {shown_path(argument)} as text, though a file has that name; --image and --video take "
                "one file each time, --prompt-file reads one"
            )
        return _unicode(argument, "the prompt")
    if argument == "-":
        file = _STDIN
    if file is not None:
        return _file_text(file, stdin, say)
    text = _stdin_text(stdin, say) if stdin is not None and not stdin.isatty() else ""
    if text:
        return text
    say(f"no prompt given; asking: {question}")
    return question


def _names_something(text: str) -> bool:
    try:
        return bool(text.strip()) and Path(text).exists()
    except (OSError, ValueError):
        return False


def _file_text(file: Path, stdin: BinaryIO | None, say: Say) -> str:
    """A file's text; `-` is standard input, which may then be a terminal."""
    if file == _STDIN:
        if stdin is None:
            raise InputError("standard input is closed; pipe text into it, or give the text as an argument or a file")
        return _stdin_text(stdin, say)
    try:
        with file.open("rb") as opened:
            return decode(opened.read(MOST_TEXT_BYTES + 1), shown_path(file))
    except OSError as error:
        raise InputError(f"{shown_path(file)}: cannot be read: {error.strerror}; {_advice(error)}") from error


def _stdin_text(stdin: BinaryIO, say: Say) -> str:
    # A pipe that nobody closes is waited for, and whoever waits should know what for.
    say("reading standard input")
    try:
        return decode(_all_of(stdin, MOST_TEXT_BYTES + 1), "standard input")
    except OSError as error:
        raise InputError(
            f"standard input cannot be read: {error.strerror or error}; pipe text into it, or give the prompt in quotes"
        ) from error


def _all_of(stream: BinaryIO, most: int) -> bytes:
    """Up to `most` bytes, to the end: of a descriptor that does not block too, which gives what has come, or None."""
    data = bytearray()
    while len(data) < most:
        part: bytes | None = stream.read(most - len(data))
        if part is None:
            select([stream], [], [])
        elif not part:
            break
        else:
            data += part
    return bytes(data)


def decode(data: bytes, source: str) -> str:
    """UTF-8 bytes as text, without a byte order mark and one final line end.

    Raises InputError naming the offset of the first byte that is not UTF-8, and for more than MOST_TEXT_BYTES.
    """
    if len(data) > MOST_TEXT_BYTES:
        raise InputError(f"{source}: more than {MOST_TEXT_BYTES >> 20} MiB, which no context holds; give a text")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(source, error) from error
    text = text.removeprefix("\ufeff")
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def _advice(error: OSError) -> str:
    """What to do where a file cannot be read."""
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return "check the path"
        case errno.EACCES | errno.EPERM:
            return "allow this user to read it"
        case _:
            return "give a file of text"


def _not_utf8(source: str, error: UnicodeDecodeError) -> InputError:
    return InputError(f"{source}: not UTF-8 at byte {error.start}; convert it to UTF-8")


def _unicode(text: str, source: str) -> str:
    """Text from the command line or a variable, which are UTF-8 also where the locale says otherwise."""
    try:
        # What the locale could not decode came as surrogates, and what it decoded may have meant something else.
        return os.fsencode(text).decode("utf-8")
    except UnicodeEncodeError:
        # Characters that the locale lacks did not come through it.
        return text
    except UnicodeDecodeError as error:
        if not any("\udc80" <= character <= "\udcff" for character in text):
            return text
        raise _not_utf8(source, error) from error


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
