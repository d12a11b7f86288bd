"""What bears the name of a checkpoint's file and is none: links, folders, pipes, files that may not be read."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrel_cuda.checkpoint.files import FileStamp, is_present, open_file, open_plain, printable
from kestrel_cuda.checkpoint.reader import open_checkpoint
from kestrel_cuda.errors import CheckpointError
from kestrel_cuda.inputs.template import ChatTemplate
from kestrel_cuda.inputs.tokenizer import Tokenizer
from tests import checkpoints

FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
]


@pytest.fixture
def directory(oracle: Path, tmp_path: Path) -> Path:
    """An editable copy of a checkpoint."""
    return checkpoints.copy(oracle / "checkpoints/tiny-dense-tied", tmp_path / "checkpoint")


def read_all(directory: Path) -> None:
    open_checkpoint(directory)
    Tokenizer.load(directory)
    ChatTemplate.load(directory)


def error_of(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_all(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert "[Errno" not in message
    return message


def link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "gone")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end, contextlib.chdir(path.parent):
        end.bind(path.name)  # the system takes short names only


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("put", "complaint"),
    [
        (link_to_nothing, "is a link to a file that does not exist; fetch it again"),
        (link_to_itself, "is a link that leads back to itself; fetch the file again"),
        (Path.mkdir, "is a directory, not a file; put the file of that name there"),
        (os.mkfifo, "is a named pipe, not a file; put the file of that name there"),
        (bind, "is a socket, not a file; put the file of that name there"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file; put the file of that name there"),
    ],
)
def test_what_is_no_file_is_named(directory: Path, name: str, put: Callable[[Path], object], complaint: str) -> None:
    (directory / name).unlink(missing_ok=True)
    put(directory / name)
    assert error_of(directory) == f"{directory / name} {complaint}"


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_the_older_tokenizer_files_too(directory: Path, name: str) -> None:
    (directory / "tokenizer.json").unlink()
    for file in ("vocab.json", "merges.txt"):
        (directory / file).write_text("{}")
    (directory / name).unlink()
    (directory / name).symlink_to("gone")
    assert f"{directory / name} is a link to a file that does not exist" in error_of(directory)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        (errno.EACCES, "Permission denied; allow this user to read it"),
        (errno.EIO, "Input/output error; check the disk"),
    ],
)
def test_what_cannot_be_read_is_named(
    directory: Path, name: str, code: int, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / name).touch()
    system_open = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(os.fsdecode(path)).name == name:
            raise OSError(code, os.strerror(code))
        return system_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    message = error_of(directory)
    assert message.startswith(f"cannot read {directory / name}: {complaint}")
    assert "fetch it again" not in message


def test_a_checkpoint_that_is_a_link(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "good").symlink_to(directory)
    read_all(tmp_path / "good")
    (tmp_path / "bad").symlink_to(tmp_path / "gone")
    assert f"{tmp_path / 'bad'} is a link to a directory that does not exist" in error_of(tmp_path / "bad")
    (tmp_path / "loop").symlink_to("loop")
    assert "loop is a link that leads back to itself" in error_of(tmp_path / "loop")
    assert "File name too long" in error_of(tmp_path / ("x" * 300))


def test_a_pipe_put_there_after_the_look_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    plain = (tmp_path / "file").stat()
    monkeypatch.setattr(os, "stat", lambda *_, **__: plain)
    with pytest.raises(OSError, match="is a named pipe, not a file"):
        open_plain(tmp_path / "pipe")


def test_a_file_is_read_and_stamped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    os.utime(path, ns=(5, 5))
    with open_file(path) as file:
        assert file.read() == b"abc"
    assert FileStamp.of(path) == (path, 3, 5)
    assert is_present(path)
    path.unlink()
    assert not is_present(path)
    with pytest.raises(CheckpointError, match="file does not exist; fetch it"):
        FileStamp.of(path)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain é", "plain é"), ("a\nb", r"a\nb"), ("\ud800", r"\ud800"), ("x" * 100, "x" * 77 + "...")],
)
def test_names_from_files_are_shown_on_one_line(text: str, shown: str) -> None:
    assert printable(text) == shown
