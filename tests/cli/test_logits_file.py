"""The file of --logits: whole or not there, where it is put, and that the answer outlives what goes wrong with it."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kestrel_cli import logits_file
from kestrel_cli.signals import Interrupted
from kestrel_cuda.errors import DeviceError, SettingError
from tests.cli.conftest import CommandLine

ROOT = Path(__file__).resolve().parents[2]
IDS = [10, 11, 12, 99]


def test_logits_are_saved_whole_or_not_at_all(kestrel: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "logits.npz"
    file.write_bytes(b"an older file")
    ran = kestrel("run", "hi", "--logits", str(file), "--json")
    assert ran.exit_code == 0
    assert ran.engine is not None
    assert ran.engine.calls["generate"][3] == "keep"
    with np.load(file) as saved:
        assert sorted(saved) == ["prompt_logits", "step_logits"]
        assert saved["prompt_logits"].shape == (3, 128)
        assert saved["step_logits"].shape == (4, 128)
        assert saved["step_logits"].dtype == np.float32

    file.write_bytes(b"an older file")
    assert kestrel("run", "hi", "--logits", str(file), fail_at_step=1, failure=DeviceError("x")).exit_code == 2
    assert file.read_bytes() == b"an older file"
    assert list(tmp_path.iterdir()) == [file]


def test_a_disk_that_fills_up_leaves_no_file(
    kestrel: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    message = (
        f"--logits {tmp_path}/l.npz: cannot be written: No space left on device; make room, or give a path elsewhere"
    )
    ran = kestrel("run", "hi", "--quiet", "--logits", str(tmp_path / "l.npz"))
    assert ran.exit_code == 2
    assert ran.token_ids == IDS
    assert ran.err == f"kestrel-cuda: {message}\n"

    as_json = kestrel("run", "hi", "--json", "--logits", str(tmp_path / "l.npz"))
    assert as_json.exit_code == 2
    assert as_json.json["ids"] == IDS
    assert as_json.json["error"] == {"kind": "setting", "message": message}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "exit_code", "how"), [(2, 130, "interrupted"), (15, 143, "terminated")])
def test_a_signal_while_it_is_saved_leaves_the_answer(
    kestrel: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, exit_code: int, how: str
) -> None:
    def stopped(*_args: object, **_kwargs: object) -> None:
        raise Interrupted(number)

    monkeypatch.setattr(np, "savez", stopped)
    ran = kestrel("run", "hi", "--json", "--logits", str(tmp_path / "l.npz"))
    assert ran.exit_code == exit_code
    assert ran.json["ids"] == IDS
    assert ran.json["stop_reason"] == "eos"
    assert ran.json["error"] == {"kind": "interrupt", "message": how}
    assert ran.err.endswith(f"kestrel-cuda: {how}\n")
    assert list(tmp_path.iterdir()) == []
    assert kestrel("run", "hi", "--logits", str(tmp_path / "l.npz")).token_ids == IDS


def test_a_link_is_followed(kestrel: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "l.npz", tmp_path / "link.npz"
    link.symlink_to(target)
    for _ in range(2):
        assert kestrel("run", "hi", "--logits", str(link)).exit_code == 0
        assert link.is_symlink()
        with np.load(target) as saved:
            assert saved["step_logits"].shape == (4, 128)
        target.chmod(0o600)
    assert target.stat().st_mode & 0o777 == 0o600


def test_a_name_may_be_as_long_as_the_disk_takes(kestrel: CommandLine, tmp_path: Path) -> None:
    longest = tmp_path / ("x" * 255)
    assert kestrel("run", "hi", "--logits", str(longest)).exit_code == 0
    assert longest.is_file()


@pytest.mark.parametrize("name", ["readonly", "ring", "x" * 256, "folder", "missing/l.npz"])
def test_what_cannot_be_written_is_refused_before_the_run(kestrel: CommandLine, tmp_path: Path, name: str) -> None:
    readonly = tmp_path / "readonly"
    readonly.write_bytes(b"kept")
    readonly.chmod(0o400)
    (tmp_path / "ring").symlink_to(tmp_path / "ring")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    for arguments, variables in (
        (("--logits", str(tmp_path / name)), {}),
        ((), {"KESTREL_CUDA_LOGITS": str(tmp_path / name)}),
    ):
        ran = kestrel("run", "hi", "--quiet", *arguments, variables=variables)
        assert (ran.exit_code, ran.out, ran.engine) == (2, "", None)
        assert ran.err.startswith(f"kestrel-cuda: --logits {tmp_path / name}: ")
        assert ran.err.count("\n") == 1
        assert ("(--logits comes from KESTREL_CUDA_LOGITS)" in ran.err) is bool(variables)
    assert sorted(tmp_path.iterdir()) == before
    assert readonly.read_bytes() == b"kept"
    assert os.access(tmp_path, os.W_OK)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOENT, "No such file or directory; make its folder first, or give another path"),
        (errno.EROFS, "Read-only file system; give a path in a folder that can be written"),
        (errno.EFBIG, "File too large; raise the limit on the size of a file (ulimit -f)"),
        (errno.ENAMETOOLONG, "File name too long; give another path"),
    ],
)
def test_each_failure_has_its_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(SettingError) as raised:
        logits_file.check_writable(tmp_path / "l.npz")
    assert str(raised.value) == f"--logits {tmp_path}/l.npz: cannot be written: {advice}"


def test_no_file_that_the_run_reads_is_written_over(
    kestrel: CommandLine, tmp_path: Path, stdin: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.png", "a.mp4", "prompt.txt", "piped.txt", "in/b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"kept")
    parts = [{"type": "image", "image": "in/b.png"}]
    (tmp_path / "m.json").write_text(json.dumps([{"role": "user", "content": parts}]))
    (tmp_path / "p.toml").write_text("max_new_tokens = 2\n")
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "1.png").write_bytes(b"kept")
    (tmp_path / "model" / "shards").mkdir(parents=True)
    for name in ("config.json", "shards/1.safetensors"):
        (tmp_path / "model" / name).write_bytes(b"kept")
    (tmp_path / "blob").write_bytes(b"kept")
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "blob")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "link.npz").symlink_to(tmp_path / "a.png")
    os.link(tmp_path / "a.png", tmp_path / "hard.npz")

    monkeypatch.chdir(tmp_path)
    for target, label, arguments in (
        ("a.png", "--image", ["--image", "./a.png", "hi"]),
        ("link.npz", "--image", ["--image", "a.png", "hi"]),
        ("hard.npz", "--image", ["--image", "a.png", "hi"]),
        ("a.mp4", "--video", ["--video", "a.mp4", "hi"]),
        ("frames/1.png", "--video", ["--video", "frames", "hi"]),
        ("prompt.txt", "--prompt-file", ["--prompt-file", "prompt.txt"]),
        ("m.json", "--messages", ["--messages", "m.json"]),
        ("in/b.png", "--messages", ["--messages", "m.json"]),
        ("p.toml", "--profile", ["--profile", "p.toml", "hi"]),
        ("model/config.json", "--model", ["-m", "model", "hi"]),
        ("model/shards/1.safetensors", "--model", ["-m", "model", "hi"]),
        ("blob", "--model", ["-m", "model", "hi"]),
        ("blob", "--strip-cache", ["--strip-cache", "model", "hi"]),
    ):
        ran = kestrel("run", "--quiet", "--logits", target, *arguments)
        assert (ran.exit_code, ran.out, ran.engine) == (2, "", None), target
        assert ran.err == (
            f"kestrel-cuda: --logits {target}: the file is part of what the run reads ({label}); give another path\n"
        )
    with (tmp_path / "piped.txt").open("rb") as piped:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(piped))
        ran = kestrel("run", "--quiet", "--logits", "piped.txt")
        assert ran.exit_code == 2
        assert "what the run reads (standard input)" in ran.err
    assert {path: path.read_bytes() for path in before} == before

    stdin(b"")
    for _ in range(2):
        assert kestrel("run", "hi", "--image", "a.png", "-m", "model", "--logits", "model/l.npz").exit_code == 0


def test_nothing_is_put_among_packed_weights(tmp_path: Path) -> None:
    """A folder of them that holds anything else is not built anew."""
    kept = tmp_path / "strips" / "model-q8_0-1"
    kept.mkdir(parents=True)
    with pytest.raises(SettingError, match="among packed weights"):
        logits_file.check_writable(kept / "new.npz", (), tmp_path / "strips")
    for elsewhere in (tmp_path / "strips" / "l.npz", tmp_path / "l.npz"):
        logits_file.check_writable(elsewhere, (), tmp_path / "strips")
    logits_file.check_writable(kept / "new.npz")
    assert not list(kept.iterdir())


def test_a_variable_that_names_the_picture(kestrel: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"kept")
    variables = {"KESTREL_CUDA_IMAGE": str(tmp_path / "a.png")}
    ran = kestrel("run", "hi", "--quiet", "--logits", str(tmp_path / "a.png"), variables=variables)
    assert ran.exit_code == 2
    assert "what the run reads (KESTREL_CUDA_IMAGE)" in ran.err


def test_the_answer_is_not_written_over(tmp_path: Path) -> None:
    """Standard output is a file, and --logits names it."""
    file = tmp_path / "answer.txt"
    command = [sys.executable, "-m", "kestrel_cuda", "run", "hi", "--backend", "cpu", "--logits", str(file)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"}
    with file.open("wb") as out:
        ran = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, env=environment, timeout=60, check=False)
    assert ran.returncode == 2
    (line,) = ran.stderr.decode().splitlines()
    assert line.endswith("the answer and the report are written there; give another path")
    assert "TOKIDS" not in line
    assert list(tmp_path.iterdir()) == [file]
