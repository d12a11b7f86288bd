"""The command line in this process: over a stand-in engine, and with the real one on pictures."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kestrel_cli import program
from kestrel_cli import run as run_command
from kestrel_cuda.config import EngineConfig
from tests.cli.fake_engine import FakeEngine
from tests.cli.visual_runs import IMAGES, TINY, Ask, Conversation, Refuse, Run


@dataclass
class Ran:
    """What one command line left behind."""

    exit_code: int
    out: str
    err: str
    engine: FakeEngine | None

    @property
    def json(self) -> dict[str, Any]:
        """Standard output as the one JSON object it has to be."""
        assert self.out.count("\n") == 1
        parsed = json.loads(self.out)
        assert isinstance(parsed, dict)
        return parsed

    @property
    def token_ids(self) -> list[int]:
        """The ids of the last line."""
        last = self.out.splitlines()[-1]
        assert last.startswith("TOKIDS:")
        return [int(word) for word in last.split()[1:]]


@dataclass
class CommandLine:
    """Call it with arguments; fields of the stand-in engine and variables are keyword arguments."""

    capture: pytest.CaptureFixture[str]
    variables: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    engine: FakeEngine | None = None

    def open_engine(self, config: EngineConfig) -> FakeEngine:
        self.engine = FakeEngine(config, **self.fields)
        return self.engine

    def __call__(self, *arguments: str, variables: dict[str, str] | None = None, **fields: Any) -> Ran:
        self.engine, self.fields = None, fields
        self.capture.readouterr()
        exit_code = program.execute(arguments, variables or {})
        captured = self.capture.readouterr()
        return Ran(int(exit_code), captured.out, captured.err, self.engine)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Put bytes on standard input."""

    def put(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))

    return put


@pytest.fixture
def kestrel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stdin: Callable[[bytes], None]
) -> CommandLine:
    stdin(b"")
    command_line = CommandLine(capsys)
    monkeypatch.setattr(run_command, "open_engine", command_line.open_engine)
    return command_line


@pytest.fixture
def real_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run` on the CPU; exit code, standard output, standard error. Keyword arguments are variables."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))

    def call(*arguments: object, **variables: str) -> tuple[int, str, str]:
        capsys.readouterr()
        exit_code = program.execute(["run", *map(str, arguments)], {"VLLM_CUDA_INFER": "0", **variables})
        return (int(exit_code), *capsys.readouterr())

    return call


@pytest.fixture
def ask(real_run: Run) -> Ask:
    """The object of `run --json` on a tiny checkpoint, which must succeed."""

    def call(*arguments: object, model: Path = TINY, **variables: str) -> dict[str, Any]:
        exit_code, out, err = real_run("-m", model, "--json", "--ignore-eos", *arguments, **variables)
        assert exit_code == 0, err
        result = json.loads(out)
        assert isinstance(result, dict)
        return result

    return call


@pytest.fixture
def refuse(real_run: Run) -> Refuse:
    """The one line of a `run` that must end with 2 before weights are loaded."""

    def call(*arguments: object, model: Path = TINY, **variables: str) -> str:
        exit_code, out, err = real_run("-m", model, "--debug", *arguments, **variables)
        assert (exit_code, out) == (2, ""), err
        *before, line = err.splitlines()
        assert not any(text.startswith(("model ", "loaded in")) for text in before)
        assert "Traceback" not in err
        return line.removeprefix("kestrel-cuda: ")

    return call


@pytest.fixture
def conversation(tmp_path: Path) -> Conversation:
    """A file of messages beside the goldens' pictures."""
    shutil.copytree(IMAGES, tmp_path / "there")

    def write(messages: Any) -> Path:
        path = tmp_path / "there" / "messages.json"
        path.write_text(json.dumps(messages), encoding="utf-8")
        return path

    return write
