"""`bench` with the real engine, the embedded checkpoint and the CPU backend; terminals, pipes and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kestrel_cli import program
from tests.cli.terminal import run_on_terminal

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("-n", "4", "--rounds", "1", "--prompt-tokens", "3")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`bench` of the embedded model on the CPU."""

    def call(*arguments: str, **variables: str) -> tuple[int, str, str]:
        sizes = () if "-n" in arguments else QUICK
        exit_code = program.execute(["bench", *sizes, *arguments], {"VLLM_CUDA_INFER": "0", **variables})
        return (int(exit_code), *capsys.readouterr())

    return call


class TestEmbeddedModel:
    """The real measurement, small."""

    def test_a_sweep(self, run: Run) -> None:
        exit_code, out, err = run("--sweep-keep", "--keeps", "off,4,1", "--policies", "past-only,both-sides", "--json")
        assert exit_code == 0, err
        result = json.loads(out)
        assert (result["backend"], result["all_equal"]) == ("cpu", True)
        rows = result["rows"]
        assert [(row["keep"], row["policy"]) for row in rows] == [
            ("off", "past-only"),
            *((keep, policy) for keep in (4, 1) for policy in ("past-only", "both-sides")),
        ]
        assert len({(row["ids_hash"], row["logits_sha256"]) for row in rows}) == 1
        assert [row["h2d_bytes_per_token"] // 208896 for row in rows] == [0, 8, 12, 11, 12]

    def test_one_window_of_what_fits(self, run: Run) -> None:
        exit_code, out, err = run("--quiet")
        assert (exit_code, err) == (0, "")
        assert out.startswith("model ")
        assert out.splitlines()[-3].startswith(" off ")
        assert out.splitlines()[-1] == "ids of every round: equal to the bit"

    def test_a_bound_chooses_a_window(self, run: Run) -> None:
        exit_code, out, err = run("--vram", "1650KiB", "--policy", "past-only", "--json")
        assert exit_code == 0
        (row,) = json.loads(out)["rows"]
        assert row["keep"] == 2
        assert row["peak_device_bytes"] <= 1650 << 10
        assert "a window of --keep 2 of 12 layers is used" in err

    def test_a_window_that_does_not_fit_is_refused_by_its_size(self, run: Run) -> None:
        exit_code, out, err = run(
            "--vram", "1650KiB", "--sweep-keep", "--keeps", "1,5", "--policy", "past-only", "--quiet"
        )
        assert (exit_code, out) == (2, "")
        assert err.startswith("kestrel-cuda: keeping 5 of 12 layers resident needs ")
        assert err.endswith("; --keeps 2 fits\n")

    def test_a_strip_cache_serves_a_bench(self, run: Run, tmp_path: Path) -> None:
        quick = ("--sweep-keep", "--keeps", "off,1", "--json")
        fresh, saved, found = (
            json.loads(run(*quick, *more)[1])["rows"] for more in ((), *[("--strip-cache", str(tmp_path))] * 2)
        )
        assert {row["logits_sha256"] for row in (*fresh, *saved, *found)} == {fresh[0]["logits_sha256"]}

    def test_more_tokens_than_positions_are_refused(self, run: Run) -> None:
        assert run("--prompt-tokens", "2048", "-n", "4", "--quiet") == (
            2,
            "",
            "kestrel-cuda: 2048 prompt tokens and 4 new ones are over the 2048 positions this model has; "
            "lower --prompt-tokens or --new-tokens\n",
        )


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    return {**kept, "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "VLLM_CUDA_INFER": "0", **variables}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kestrel_cuda", "bench", *arguments]


class TestProcess:
    """Terminals, pipes and signals."""

    def on_a_terminal(self, **variables: str) -> str:
        """Run with output and errors on a terminal; everything written."""
        exit_code, written = run_on_terminal(command(*QUICK), environment(**variables))
        assert exit_code == 0
        return written

    def test_a_terminal_gets_progress_and_bold_heads(self) -> None:
        written = self.on_a_terminal(TERM="xterm-256color")
        assert "bench" in written
        assert "\x1b[1mkeep" in written

    @pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"TERM": "xterm-256color", "NO_COLOR": "1"}])
    def test_a_plain_terminal_gets_neither(self, variables: dict[str, str]) -> None:
        written = self.on_a_terminal(**variables)
        assert "\x1b" not in written
        assert "keep  weights" in written

    def test_a_closed_pipe_ends_it_silently(self) -> None:
        shell = '"$@" --quiet | true; exit ${PIPESTATUS[0]}'
        ran = subprocess.run(
            ["bash", "-c", shell, "bash", *command(*QUICK)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (ran.returncode, ran.stderr) == (141, "")

    def test_an_interrupt_ends_it_with_one_line(self) -> None:
        process = subprocess.Popen(
            command("--rounds", "100000"), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        process.stderr.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (130, "")
        assert err.splitlines()[-1] == "kestrel-cuda: interrupted"
        assert "Traceback" not in err

    def test_help_waits_for_nothing_heavy(self) -> None:
        script = (
            "import sys; from kestrel_cli.program import execute\n"
            "execute(['bench', '--keeps', '1'], {}); print(*sys.modules)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True
        )
        assert "--keeps is for a sweep" in ran.stderr
        assert set(ran.stdout.split()).isdisjoint({"cupy", "numpy", "tokenizers", "kestrel_cuda.engine"})
