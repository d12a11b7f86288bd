"""The program as a process: signals, closed pipes, terminals, and what it costs to ask for help."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

from tests.cli.terminal import run_on_terminal

ROOT = Path(__file__).resolve().parents[2]
FAKE = str(ROOT / "tests" / "cli" / "fake_engine.py")
ENDLESS = {"endless": True, "pause_s": 0.01}


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "LC_ALL")}
    return {**kept, "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", **variables}


def command(*arguments: str, **fields: object) -> list[str]:
    return [sys.executable, "-X", "faulthandler", FAKE, json.dumps(fields), *arguments]


def start(*arguments: str, **fields: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments, **fields),
        env=environment(),
        text=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def shell(script: str, *arguments: str, **fields: object) -> subprocess.CompletedProcess[str]:
    """Run `script` with the command line as "$@" in it; bash, for its PIPESTATUS."""
    return subprocess.run(
        ["bash", "-c", script, "bash", *command(*arguments, **fields)],
        env=environment(),
        text=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )


def read_some(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.read(5)


HOW = {130: "interrupted", 143: "terminated"}


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_with_what_it_has(number: signal.Signals, exit_code: int) -> None:
    process = start("run", "hi", "-n", "100000", **ENDLESS)
    begun = read_some(process.stdout)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == exit_code
    text, token_ids = (begun + out).rsplit("\n", 2)[:2]
    assert text.startswith("Hello")
    assert text in "Hello, wörld" * 10000
    num_ids = len(token_ids.removeprefix("TOKIDS: ").split())
    assert num_ids == len(re.findall("Hello|, |wörld", text))
    assert "ended by interrupt" in err
    assert err.endswith(f"kestrel-cuda: {HOW[exit_code]}\n")
    assert "Traceback" not in err


def test_a_signal_leaves_json_whole() -> None:
    process = start("run", "hi", "-n", "100000", "--json", **ENDLESS)
    wait_for(process.stderr, "no GPU here")
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    result = json.loads(out)
    assert result["stop_reason"] == "interrupt"
    assert "Traceback" not in err


def test_a_signal_before_the_first_token_is_an_error_object(tmp_path: Path) -> None:
    fifo = tmp_path / "prompt"
    os.mkfifo(fifo)
    process = start("run", "--prompt-file", str(fifo), "--json")
    with fifo.open("w"):
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 143
    assert json.loads(out) == {"error": {"kind": "interrupt", "message": "terminated"}}
    assert err == "kestrel-cuda: terminated\n"


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("where", ["typer", "rich", "numpy", "tokenizers", "parser"])
def test_a_signal_while_it_starts_is_reported_like_any(where: str, number: signal.Signals, exit_code: int) -> None:
    """The signal comes in the middle of an import, or of Typer's parsing."""
    script = f"""
import os, sys
class Trap:
    def find_spec(self, name, path=None, target=None):
        if name == {where!r}:
            os.kill(os.getpid(), {int(number)})
sys.meta_path.insert(0, Trap())
if {where!r} == "parser":
    import typer.core
    def parse(*arguments):
        os.kill(os.getpid(), {int(number)})
        raise AssertionError
    typer.core.TyperCommand.make_parser = parse
sys.argv = ["kestrel-cuda", "run", "hi", "--json", "--quiet"]
from kestrel_cli.app import main
main()
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == exit_code
    assert ran.stderr == f"kestrel-cuda: {HOW[exit_code]}\n"
    assert json.loads(ran.stdout) == {"error": {"kind": "interrupt", "message": HOW[exit_code]}}


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("when", ["leaving", "left"])
def test_a_signal_after_all_has_been_said_is_no_fault(when: str, number: signal.Signals, exit_code: int) -> None:
    """It ends the process, between any two lines of it, without a traceback."""
    kill = f"os.kill(os.getpid(), {int(number)})"
    script = f"""
import os, sys
import kestrel_cli.program
from kestrel_cli import app, signals
hold, execute = signals.hold, kestrel_cli.program.execute
holds = []
def signalled_hold():
    holds.append(1)
    if {when == "left"} and len(holds) == 2:
        hold()
        {kill}
    hold()
def signalled_execute(arguments, variables):
    signals.release()
    if {when == "leaving"}:
        {kill}
    return 0
signals.hold, kestrel_cli.program.execute = signalled_hold, signalled_execute
app.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert done.returncode == (exit_code if when == "leaving" else 0)


def test_two_signals_at_once_are_one() -> None:
    """Whichever of them the program sees to first."""
    process = start("run", "hi", "--json", "--quiet", **ENDLESS)
    time.sleep(1.5)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, 143, -signal.SIGINT, -signal.SIGTERM)
    assert "Traceback" not in err
    assert "race" not in err


def test_the_way_to_the_handlers_is_short() -> None:
    script = (
        "import sys; before = set(sys.modules); import kestrel_cuda, kestrel_cli.app; print(*set(sys.modules) - before)"
    )
    ran = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    assert {name for name in ran.stdout.split() if name.startswith("kestrel")} == {
        *("kestrel_cuda", "kestrel_cli", "kestrel_cli.app", "kestrel_cli.signals")
    }
    assert not {"dataclasses", "pathlib", "inspect", "typing", "typer"} & set(ran.stdout.split())


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    # Nobody reads: winding down blocks on the full pipe.
    process = start("run", "hi", "-n", "1000000", endless=True, pieces=["x" * 4096])
    read_some(process.stdout)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == -signal.SIGINT
    process.communicate()


def test_an_ignored_interrupt_stays_ignored() -> None:
    ran = shell("trap '' INT; \"$@\" & sleep 1.5; kill -INT $!; wait $!", "run", "hi", pause_s=0.6)
    assert ran.returncode == 0
    assert ran.stdout.endswith("TOKIDS: 10 11 12 99\n")


@pytest.mark.parametrize("arguments", [("run", "hi"), ("run", "hi", "--json"), ("run", "--bad", "--json"), ("--help",)])
@pytest.mark.parametrize("script", ['(sleep 0.3; exec "$@") | true; exit ${PIPESTATUS[0]}', '"$@" >&-'])
def test_a_closed_standard_output_ends_it_silently(script: str, arguments: tuple[str, ...]) -> None:
    ran = shell(script, *arguments)
    assert ran.returncode == 141
    for noise in ("Exception ignored", "Traceback", "BrokenPipe", "Errno"):
        assert noise not in ran.stderr


def test_a_reader_that_has_seen_enough_ends_it() -> None:
    ran = shell('"$@" --quiet | head -c 5; exit ${PIPESTATUS[0]}', "run", "hi", "-n", "100000", **ENDLESS)
    assert (ran.returncode, ran.stdout, ran.stderr) == (141, "Hello", "")


def test_a_full_disk_is_the_users_to_mend() -> None:
    for arguments in (("run", "hi"), ("run", "hi", "--json")):
        ran = shell('"$@" --quiet > /dev/full', *arguments)
        assert ran.returncode == 2
        assert ran.stderr == "kestrel-cuda: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "PYTHONUNBUFFERED=1"])
@pytest.mark.parametrize("json", [(), ("--json",)])
def test_a_disk_that_fills_up_on_the_way(tmp_path: Path, unbuffered: str, json: tuple[str, ...]) -> None:
    """The last write is taken in part, which an unbuffered stream says nothing of."""
    file = tmp_path / "answer"
    script = f'ulimit -f 4; {unbuffered} "$@" --quiet > {file}'
    ran = shell(script, "run", "hi", *json, "-n", "3", pieces=["x" * 5000])
    assert ran.returncode == 2
    assert ran.stderr == "kestrel-cuda: standard output cannot be written: File too large\n"


@pytest.mark.parametrize("unbuffered", ["", "PYTHONUNBUFFERED=1"])
def test_a_pipe_that_does_not_block(unbuffered: str) -> None:
    make = "import os, sys; os.set_blocking(1, False); os.execvp(sys.argv[1], sys.argv[1:])"
    script = f"({unbuffered} {sys.executable} -c '{make}' \"$@\" --quiet; echo rc $? >&2) | (sleep 1; cat)"
    ran = shell(script, "run", "hi", "-n", "3", pieces=["x" * 100_000])
    assert ran.stderr.startswith("kestrel-cuda: standard output cannot be written: ")
    assert ran.stderr.endswith("\nrc 2\n")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (("run", "--keep", "x"), 2, "--keep holds 'x'; it takes "),
        (("run", "--bad"), 2, "No such option: --bad"),
        (("walk",), 2, "No such command 'walk'"),
        (("run", "hi", "--profile", "none"), 2, "no profile 'none'"),
    ],
)
def test_an_error_that_finds_a_full_disk_is_still_one_line(
    arguments: tuple[str, ...], exit_code: int, message: str
) -> None:
    ran = shell('"$@" --json --quiet > /dev/full', *arguments)
    assert ran.returncode == exit_code
    assert ran.stderr.startswith(f"kestrel-cuda: {message}")
    assert ran.stderr.endswith(" (standard output cannot be written: No space left on device)\n")
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ['"$@" 2>&-', '"$@" 2> >(true)', '"$@" 2>/dev/full'])
def test_a_closed_standard_error_changes_nothing(script: str) -> None:
    ran = shell(script, "run", "hi", pause_s=0.1)
    assert ran.returncode == 0
    assert ran.stdout == "Hello, wörld\nTOKIDS: 10 11 12 99\n"


@pytest.mark.parametrize("arguments", [("-",), ("--prompt-file", "-"), ("--messages", "-")])
def test_a_closed_standard_input_that_was_asked_for(arguments: tuple[str, ...]) -> None:
    ran = shell('"$@" <&-', "run", *arguments, "--quiet")
    assert ran.returncode == 2
    assert ran.stderr.startswith("kestrel-cuda: standard input is closed; pipe text into it")
    assert ran.stderr.count("\n") == 1


def test_a_closed_standard_input_asks_the_built_in_question() -> None:
    ran = shell('"$@" <&-', "run")
    assert ran.returncode == 0
    assert "no prompt given" in ran.stderr


@pytest.mark.parametrize("locale", ["C", "POSIX", "C.UTF-8"])
def test_text_of_any_script_is_written_in_any_locale(locale: str) -> None:
    ran = subprocess.run(
        command("run", "hi"),
        env=environment(LC_ALL=locale, PYTHONIOENCODING="ascii" if locale == "POSIX" else ""),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0
    assert ran.stdout.startswith(b"Hello, w\\xf6rld" if locale == "POSIX" else "Hello, wörld".encode())


def on_a_terminal(*arguments: str, fields: dict[str, object] | None = None, **variables: str) -> tuple[int, str]:
    """Run with all three streams on a terminal; its exit code and everything it wrote."""
    return run_on_terminal(command(*arguments, **(fields or {})), environment(**variables))


def test_a_terminal_gets_progress_and_colour() -> None:
    exit_code, written = on_a_terminal("run", TERM="xterm-256color")
    assert exit_code == 0
    assert "quantizing" in written
    assert "\x1b[" in written
    assert "no prompt given" in written
    assert "TOKIDS: 10 11 12 99\r\n" in written


def test_a_terminal_is_not_given_the_control_characters_of_a_model() -> None:
    pieces = ["\x1b]0;title\x07", "\r\b\x7f\x00", "\x9b2J", "é\t\n", "\u202e"]
    _, written = on_a_terminal("run", "hi", "--quiet", fields={"pieces": pieces}, TERM="xterm")
    shown = "\\x1b]0;title\\x07\\x0d\\x08\\x7f\\x00\\x9b2Jé\t\r\n\u202e\r\n"
    assert written == f"{shown}TOKIDS: 10 11 12 13 14 99\r\n"
    piped = subprocess.run(
        command("run", "hi", "--quiet", pieces=pieces), env=environment(), capture_output=True, check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert piped.stdout.decode().startswith("".join(pieces))


def test_a_message_breaks_between_words_on_a_terminal() -> None:
    note = "word " * 30 + "end"
    _, written = on_a_terminal("run", "hi", fields={"notes": [note]}, TERM="dumb", COLUMNS="50")
    lines = [line for line in written.split("\r\n") if "word" in line]
    assert len(lines) > 2
    assert max(map(len, lines)) <= 50
    assert " ".join(" ".join(lines).split()) == note


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"TERM": "xterm-256color", "NO_COLOR": "1"}])
def test_a_plain_terminal_gets_neither(variables: dict[str, str]) -> None:
    exit_code, written = on_a_terminal("run", "hi", **variables)
    assert exit_code == 0
    assert "quantizing" not in written
    assert "\x1b" not in written
    assert "Hello, wörld\r\nTOKIDS: 10 11 12 99\r\n" in written


@pytest.mark.parametrize("variables", [{"FORCE_COLOR": "1", "TERM": "xterm-256color"}, {"TTY_COMPATIBLE": "1"}])
def test_without_a_terminal_there_is_neither(variables: dict[str, str]) -> None:
    ran = subprocess.run(
        command("run", "hi"), env=environment(**variables), capture_output=True, text=True, timeout=60, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "quantizing" not in ran.stderr
    assert "\x1b" not in ran.stderr + ran.stdout


def test_help_waits_for_nothing_heavy() -> None:
    script = "import sys; from kestrel_cli.program import execute; execute(['run', '--help'], {}); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.splitlines()[-1].split())
    assert loaded.isdisjoint(
        {"cupy", "numpy", "PIL", "tokenizers", "rich", "jinja2", "safetensors", "kestrel_cuda.engine"}
    )


def wait_for(stream: IO[str] | None, text: str) -> None:
    assert stream is not None
    for line in stream:
        if text in line:
            return
    raise AssertionError(f"{text!r} was never written")


def test_the_module_is_the_program() -> None:
    ran: subprocess.CompletedProcess[Any] = subprocess.run(
        [sys.executable, "-m", "kestrel_cuda", "--version"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0
    assert ran.stdout.startswith("kestrel-cuda ")
