"""Where a prompt comes from, byte for byte (case D34, text only)."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from threading import Thread
from typing import BinaryIO

import pytest

import kestrel_cli.prompt
from kestrel_cli import options
from kestrel_cli.prompt import BUILT_IN_QUESTION, ChatPrompt, IdsPrompt, Prompt, RawPrompt, decode, read_prompt
from kestrel_cuda.errors import InputError


def said(flags: dict[str, str | bool], stdin: bytes | BinaryIO | None = None) -> tuple[Prompt, list[str]]:
    """The prompt, and everything that was said about it."""
    stream = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
    heard: list[str] = []
    return read_prompt(options.settle(options.RUN, flags, {}), stream, heard.append, heard.append), heard


def prompt(flags: dict[str, str | bool], stdin: bytes | BinaryIO | None = None) -> Prompt:
    return said(flags, stdin)[0]


def user(text: str) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": text}])


@pytest.mark.parametrize("flags", [{"prompt_file": "FILE"}, {"messages": "FILE"}, {"prompt_file": "-"}])
def test_more_than_any_context_holds_is_not_read(
    flags: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that never ends, say."""
    monkeypatch.setattr(kestrel_cli.prompt, "MOST_TEXT_BYTES", 1 << 20)
    endless = tmp_path / "endless"
    endless.symlink_to("/dev/zero")
    named = {name: str(endless) if value == "FILE" else value for name, value in flags.items()}
    with Path("/dev/zero").open("rb") as stdin, pytest.raises(InputError, match=r": more than 1 MiB, which no context"):
        prompt(named, stdin)


@pytest.mark.parametrize("text", ["", " ", "hi\n", "\ufeffhi", "你好 👍", "<|im_end|>"])
def test_the_argument_is_taken_as_typed(text: str) -> None:
    assert prompt({"prompt": text}, b"not read") == user(text)


def test_a_prompt_that_is_the_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a second picture after one --image is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.png").touch()
    asked, heard = said({"prompt": "b.png"})
    assert asked == user("b.png")
    assert heard == [
        "the prompt is b.png as text, though a file has that name; --image and --video take one file each time, "
        "--prompt-file reads one"
    ]
    for text in ("b.pn", " ", "x" * 5000, "a\0b"):
        assert said({"prompt": text}) == (user(text), [])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"hi", "hi"),
        (b"hi\n", "hi"),
        (b"hi\r\n", "hi"),
        (b"hi\n\n", "hi\n"),
        (b"hi\r\n\r\n", "hi\r\n"),
        (b"hi\r", "hi\r"),
        (b"\xef\xbb\xbfhi\n", "hi"),
        (b"\xef\xbb\xbf\xef\xbb\xbfhi", "\ufeffhi"),
        (b" hi \n", " hi "),
        ("é👍".encode(), "é👍"),
    ],
)
def test_a_byte_order_mark_and_one_line_end_are_dropped(data: bytes, text: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    assert prompt({}, data) == user(text)
    assert prompt({"prompt_file": str(file)}) == user(text)
    assert prompt({"prompt_file": str(file), "raw": True}) == RawPrompt(text)


@pytest.mark.parametrize(
    ("data", "offset"), [(b"\xff", 0), (b"ab\xe9 cd", 2), (b"\xef\xbb\xbfa\xff", 4), (b"ab\xe4\xbd", 2)]
)
def test_what_is_not_utf8_is_refused_by_its_offset(data: bytes, offset: int) -> None:
    with pytest.raises(InputError, match=f"^here: not UTF-8 at byte {offset}; convert it to UTF-8$"):
        decode(data, "here")
    with pytest.raises(InputError, match=f"^the prompt: not UTF-8 at byte {offset}; convert it to UTF-8$"):
        prompt({"prompt": os.fsdecode(data)})


@pytest.mark.parametrize("stdin", [None, b"", b"\n", b"\xef\xbb\xbf\r\n"])
@pytest.mark.parametrize("flags", [{}, {"raw": True}])
def test_without_a_prompt_a_question_is_asked_and_said(stdin: bytes | None, flags: dict[str, str | bool]) -> None:
    found, heard = said(flags, stdin)
    assert found == (RawPrompt(BUILT_IN_QUESTION) if flags else user(BUILT_IN_QUESTION))
    assert heard[-1] == f"no prompt given; asking: {BUILT_IN_QUESTION}"


def test_a_terminal_is_waited_for_only_when_it_was_asked_for() -> None:
    class Terminal(io.BytesIO):
        def isatty(self) -> bool:
            return True

    assert prompt({}, Terminal(b"typed")) == user(BUILT_IN_QUESTION)
    assert prompt({"prompt": "-"}, Terminal(b"typed\n")) == user("typed")


def test_only_waiting_is_talked_about() -> None:
    assert said({"prompt": "hi"}, b"not read")[1] == []
    assert said({}, b"hi")[1] == ["reading standard input"]
    assert said({}, None)[1] == [f"no prompt given; asking: {BUILT_IN_QUESTION}"]


@pytest.mark.parametrize("flags", [{}, {"prompt": "-"}])
def test_a_descriptor_that_does_not_block_is_read_to_its_end(flags: dict[str, str | bool]) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)

    def write_slowly() -> None:
        with os.fdopen(write_end, "wb") as pipe:
            for part in (b"How many ", b"layers?"):
                time.sleep(0.1)
                pipe.write(part)
                pipe.flush()

    writer = Thread(target=write_slowly)
    writer.start()
    with os.fdopen(read_end, "rb") as stdin:
        assert prompt(flags, stdin) == user("How many layers?")
    writer.join()


@pytest.mark.parametrize("flags", [{"prompt": "-"}, {"prompt_file": "-"}])
def test_a_dash_is_standard_input(flags: dict[str, str | bool]) -> None:
    assert prompt(flags, b"hi\n") == user("hi")
    assert prompt(flags, b"") == user("")
    assert prompt({"messages": "-"}, b'[{"role": "user", "content": "hi"}]') == user("hi")


@pytest.mark.parametrize("flags", [{"prompt": ""}, {"prompt": "-"}, {"prompt_file": os.devnull}])
def test_an_empty_prompt_needs_a_template(flags: dict[str, str | bool]) -> None:
    assert prompt(flags, b"") == user("")
    with pytest.raises(InputError, match="the prompt is empty; --raw needs at least one character"):
        prompt({**flags, "raw": True}, b"")


@pytest.mark.parametrize(
    ("encoding", "data", "text"),
    [
        ("ascii", b"h\xc3\xa9", "hé"),
        ("latin-1", b"h\xc3\xa9", "hé"),
        ("latin-1", b"h\xe9", "hé"),
        ("utf-8", b"hi", "hi"),
    ],
)
def test_an_argument_is_utf8_in_any_locale(
    encoding: str, data: bytes, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsencode", lambda name: name.encode(encoding, "surrogateescape"))
    argument = data.decode(encoding, "surrogateescape")
    assert prompt({"prompt": argument}) == user(text)
    assert prompt({"prompt": "hi", "system": argument}) == ChatPrompt(
        [{"role": "system", "content": text}, {"role": "user", "content": "hi"}]
    )


def test_token_ids_are_taken_as_they_are() -> None:
    assert prompt({"ids": "1,2"}, b"not read") == IdsPrompt([1, 2])


def test_a_system_message_comes_first() -> None:
    assert prompt({"prompt": "hi", "system": ""}) == ChatPrompt(
        [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    )
    with pytest.raises(InputError, match="the system message: not UTF-8 at byte 0"):
        prompt({"prompt": "hi", "system": "\udcff"})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name in ("prompt_file", "messages"):
        with pytest.raises(
            InputError, match=r"missing\.txt: cannot be read: No such file or directory; check the path$"
        ):
            prompt({name: str(tmp_path / "missing.txt")})
        with pytest.raises(InputError, match=r"cannot be read: Is a directory; give a file of text$"):
            prompt({name: str(tmp_path)})


def test_a_standard_input_that_cannot_be_read_is_refused() -> None:
    class Broken(io.BytesIO):
        def read(self, _size: int | None = -1) -> bytes:
            raise IsADirectoryError(21, "Is a directory")

    with pytest.raises(InputError, match="standard input cannot be read: Is a directory; pipe text into it"):
        prompt({}, Broken())
