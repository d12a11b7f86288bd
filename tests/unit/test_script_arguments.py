"""What scripts take on the command line: values, and refusals in words that leave nothing behind."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from kestrel_cuda.config import Quant
from kestrel_cuda.errors import DeviceError
from scripts import arguments as kinds
from scripts.build_cubins import architecture


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (kinds.whole(0), "0", 0),
        (kinds.whole(1), "12", 12),
        (kinds.number(0, math.inf, "a number"), "0.5", 0.5),
        (kinds.number(0, math.inf, "a number"), "inf", math.inf),
        (kinds.quant, "q4_0", Quant.Q4_0),
        (kinds.size, "1600MiB", 1600 << 20),
        (kinds.lengths, "64,8192", [64, 8192]),
        (architecture, "120", 120),
    ],
)
def test_values(kind: Callable[[str], object], text: str, value: object) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (kinds.whole(1), "0", "'0' is not a whole number of at least 1"),
        (kinds.whole(0), "-1", "'-1' is not a whole number of at least 0"),
        (kinds.whole(0), "²", "'²' is not a whole number of at least 0"),
        (kinds.whole(0), "9" * 5000, "is not a whole number of at least 0"),
        (kinds.number(0, math.inf, "a number of minutes"), "nan", "'nan' is not a number of minutes"),
        (kinds.number(0, math.inf, "a number of minutes"), "-1", "'-1' is not a number of minutes"),
        (kinds.number(0, math.inf, "a number of minutes"), "x", "'x' is not a number of minutes"),
        (kinds.number(0.5, 1, "a share"), "1.01", "'1.01' is not a share"),
        (kinds.quant, "Q8", "'Q8' is none of q8_0, q4_0, g256, none"),
        (kinds.lengths, "64,,8", "'' is not a whole number of at least 1"),
        (architecture, "91", "'91' is none of 80, 86, 89, 90, 120"),
        (kinds.size, "foo", "'foo' is not a size; write a number with a unit, like 6GiB or 500MB"),
        (kinds.size, "9999999TiB", "'9999999TiB' is a size which is over 8 EiB"),
    ],
)
def test_refusals(kind: Callable[[str], object], text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        kind(text)
    assert str(caught.value).endswith(message)


def test_files_to_write(tmp_path: Path) -> None:
    """Only looked at: one that exists keeps what it holds."""
    held = tmp_path / "held"
    held.write_text("kept")
    assert kinds.out_file(str(held)) == held
    assert kinds.out_file(str(tmp_path / "new")) == tmp_path / "new"
    assert kinds.out_file("/dev/null") == Path("/dev/null")
    for path, reason in (
        (tmp_path, "is a folder; give the path of a file"),
        (tmp_path / "no" / "new", "cannot be written (No such file or directory); give another path"),
        (held / "new", "cannot be written (Not a directory); give another path"),
    ):
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            kinds.out_file(str(path))
        assert str(caught.value) == f"{path} {reason}"
    assert list(tmp_path.iterdir()) == [held]
    assert held.read_text() == "kept"


def test_folders_to_write(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.write_text("kept")
    for path in (tmp_path, tmp_path / "a" / "b"):
        assert kinds.out_folder(str(path)) == path
    for path in (held, held / "a" / "b"):
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            kinds.out_folder(str(path))
        assert str(caught.value) == f"{path} cannot be written (Not a directory); give another path"
    assert list(tmp_path.iterdir()) == [held]


def test_a_link_to_nowhere_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(argparse.ArgumentTypeError, match="link cannot be written"):
        kinds.out_folder(str(tmp_path / "link"))


def test_a_parser_says_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = kinds.Parser(prog="script")
    parser.add_argument("--items", type=kinds.whole(1))
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--items", "none"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "argument --items: 'none' is not a whole number of at least 1\n"


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (1, 1)])
def test_the_exit_status_is_what_the_work_returns(returned: int | None, status: int) -> None:
    assert kinds.finish(lambda _: returned, argparse.Namespace()) == status


def test_a_refusal_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_: argparse.Namespace) -> None:
        raise DeviceError("no GPU was found")

    assert kinds.finish(refuse, argparse.Namespace()) == 2
    assert capsys.readouterr() == ("", "no GPU was found\n")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "torch is not installed, and this takes it: "),
        (
            OSError(27, "File too large", "/tmp/a.bin"),
            "/tmp/a.bin: File too large; make room, allow it or give another",
        ),
        (OSError("odd"), "odd; make room"),
    ],
)
def test_what_a_machine_lacks_is_one_line_too(capsys: pytest.CaptureFixture[str], error: Exception, line: str) -> None:
    def fail(_: argparse.Namespace) -> None:
        raise error

    assert kinds.finish(fail, argparse.Namespace()) == 2
    said = capsys.readouterr().err
    assert said.startswith(line)
    assert said.count("\n") == 1


def test_a_blank_folder_is_refused() -> None:
    for text in ("", " "):
        with pytest.raises(argparse.ArgumentTypeError, match="blank"):
            kinds.out_folder(text)
