"""The command line over a stand-in engine, in this process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kestrel_cli import program
from kestrel_cli import run as run_command
from kestrel_cuda.config import EngineConfig
from tests.cli.fake_engine import FakeEngine


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
