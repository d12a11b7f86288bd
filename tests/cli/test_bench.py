"""The command `bench`: its switches, its table and its object, on reports from a list and on the embedded model."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

import kestrel_cuda.bench
from kestrel_cli import app, options
from kestrel_cli.bench_table import bench_text
from kestrel_cuda.bench import BenchReport, BenchRow
from kestrel_cuda.config import EngineConfig, Evict, Policy
from kestrel_cuda.errors import DeviceError, SettingError

ROOT = Path(__file__).resolve().parents[2]
POLICY, EVICT = options.POLICY.default, options.EVICT.default
QUICK = ("-n", "4", "--rounds", "1", "--prompt-tokens", "3")

OFF = BenchRow(
    model="/models/Qwen3-VL-2B-Instruct",
    quant="q8_0",
    keep="off",
    policy="past-only",
    evict="pool",
    prefetch=2,
    weights_resident_end=197,
    peak_device_bytes=2_900_000_000,
    ms_per_token_median=0.7123,
    ms_per_token_sd=0.0041,
    h2d_bytes_per_token=0,
    h2d_gb_per_s=0.0,
    link_share=None,
    ids=(151643, 9707, 11, 198, 220, 16),
    ids_hash="9f",
    logits_sha256="c0ffee1234",
)
ONE = replace(
    OFF,
    keep=1,
    weights_resident_end=8,
    peak_device_bytes=700_000_000,
    ms_per_token_median=26.314,
    ms_per_token_sd=0.042,
    h2d_bytes_per_token=1_440_000_000,
    h2d_gb_per_s=54.72,
    link_share=0.9931,
)
PINNED = replace(ONE, policy="pinned")
FREED = replace(ONE, policy="both-sides", evict="free", ms_per_token_median=159.41, ms_per_token_sd=10.2)
REPORT = BenchReport(
    card="NVIDIA H200",
    backend="cuda",
    prompt_tokens=16,
    new_tokens=24,
    rounds=5,
    link_gb_per_s=55.1,
    device_read_gb_per_s=4490.2,
    all_equal=True,
    rows=(OFF, ONE),
    notes=("the embedding table stays in host memory",),
    warnings=("a stray file",),
)


@dataclass
class Bench:
    """Runs `bench` on a report from a list; `asked` is what the command wanted measured."""

    capture: pytest.CaptureFixture[str]
    report: BenchReport = REPORT
    failure: Exception | None = None
    asked: dict[str, Any] = field(default_factory=dict)

    def measure(
        self, config: EngineConfig, keeps: object, policies: object, evicts: object, **sizes: Any
    ) -> BenchReport:
        self.asked = {"config": config, "keeps": keeps, "policies": policies, "evicts": evicts, **sizes}
        if self.failure is not None:
            raise self.failure
        return self.report

    def __call__(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        self.asked = {}
        exit_code = app.execute(["bench", *arguments], variables)
        return (int(exit_code), *self.capture.readouterr())


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    stand_in = Bench(capsys)
    monkeypatch.setattr(kestrel_cuda.bench, "measure", stand_in.measure)
    return stand_in


class TestSwitches:
    """What is measured, and what is refused."""

    def test_by_default_one_window_of_what_fits(self, bench: Bench) -> None:
        assert bench()[0] == 0
        assert (bench.asked["keeps"], bench.asked["policies"], bench.asked["evicts"]) == (
            (None,),
            (POLICY,),
            (EVICT,),
        )
        assert [bench.asked[name] for name in ("prompt_tokens", "new_tokens", "rounds")] == [16, 24, 5]

    def test_one_window(self, bench: Bench) -> None:
        bench("--keep", "4", "--policy", "pinned", "--evict", "free", "--prefetch", "0", "-n", "9", "--rounds", "2")
        assert bench.asked["keeps"] == (4,)
        assert (bench.asked["policies"], bench.asked["evicts"]) == ((Policy.PINNED,), (Evict.FREE,))
        assert bench.asked["config"].prefetch == 0
        assert (bench.asked["new_tokens"], bench.asked["rounds"]) == (9, 2)

    def test_the_variable_of_the_window_is_for_one(self, bench: Bench) -> None:
        bench(VLLM_CUDA_STREAM="3")
        assert bench.asked["keeps"] == (3,)
        exit_code, out, _ = bench("--sweep-keep", "--json", VLLM_CUDA_STREAM="garbage")
        assert exit_code == 0
        assert bench.asked["keeps"] is None
        assert "keep" not in json.loads(out)["settings"]

    def test_a_sweep_chooses_its_windows(self, bench: Bench) -> None:
        bench("--sweep-keep")
        assert (bench.asked["keeps"], bench.asked["policies"], bench.asked["evicts"]) == (
            None,
            (POLICY,),
            (EVICT,),
        )

    def test_a_sweep_over_lists(self, bench: Bench) -> None:
        lists = ("--keeps", "off,27, 1,27,0", "--policies", "pinned,past-only,pinned", "--evicts", "free,pool")
        exit_code, out, _ = bench("--sweep-keep", "--json", *lists)
        assert exit_code == 0
        assert bench.asked["keeps"] == (0, 27, 1)
        assert bench.asked["policies"] == (Policy.PINNED, Policy.PAST_ONLY)
        assert bench.asked["evicts"] == (Evict.FREE, Evict.POOL)
        settings = json.loads(out)["settings"]
        assert settings["keeps"] == {"value": ["off", 27, 1], "source": "flag"}
        assert settings["policies"] == {"value": ["pinned", "past-only"], "source": "flag"}

    def test_a_sweep_with_another_policy(self, bench: Bench) -> None:
        bench("--sweep-keep", "--policy", "pinned", KESTREL_CUDA_EVICT="free")
        assert (bench.asked["policies"], bench.asked["evicts"]) == ((Policy.PINNED,), (Evict.FREE,))

    def test_a_list_overrides_a_weaker_single_one(self, bench: Bench) -> None:
        bench("--sweep-keep", "--policies", "pinned,both-sides", KESTREL_CUDA_POLICY="garbage")
        assert bench.asked["policies"] == (Policy.PINNED, Policy.BOTH_SIDES)

    def test_a_profile_gives_what_a_bench_knows(self, bench: Bench, tmp_path: Path) -> None:
        file = tmp_path / "p.toml"
        file.write_text('keep = 7\npolicy = "pinned"\nctx = 99\nquant = "q4_0"\n', encoding="utf-8")
        bench("--profile", str(file))
        assert (bench.asked["keeps"], bench.asked["policies"], bench.asked["config"].quant) == (
            (7,),
            ("pinned",),
            "q4_0",
        )

    @pytest.mark.parametrize(
        ("name", "text", "value"),
        [
            ("KEEPS", "off,3", (0, 3)),
            ("POLICIES", "both-sides", (Policy.BOTH_SIDES,)),
            ("EVICTS", "free", (Evict.FREE,)),
            ("PROMPT_TOKENS", "1", 1),
            ("NEW_TOKENS", "4", 4),
            ("ROUNDS", "1", 1),
            ("POLICY", "pinned", Policy.PINNED),
            ("PREFETCH", "0", 0),
            ("VRAM", "6GiB", 6 << 30),
            ("STRIP_CACHE", "/strips", Path("/strips")),
            ("PREFILL_CHUNK", "8", 8),
        ],
    )
    def test_every_option_with_a_value_has_its_variable(self, name: str, text: str, value: object) -> None:
        settings = options.settle_bench({"sweep_keep": True}, {f"KESTREL_CUDA_{name}": text})
        assert settings[getattr(options, name)] == value
        assert settings.source(getattr(options, name)) == f"KESTREL_CUDA_{name}"

    def test_the_variables_of_a_sweep_are_for_sweeps(self) -> None:
        variables = dict.fromkeys(("KESTREL_CUDA_KEEPS", "KESTREL_CUDA_POLICIES", "KESTREL_CUDA_EVICTS"), "garbage")
        settings = options.settle_bench({"keep": "2"}, variables)
        assert options.bench_windows(settings) == ((2,), (POLICY,), (EVICT,))
        with pytest.raises(SettingError, match="KESTREL_CUDA_KEEPS holds 'garbage'"):
            options.settle_bench({"sweep_keep": True}, variables)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--keeps", "1"), "--keeps is for a sweep over windows; add --sweep-keep"),
            (("--policies", "pinned"), "--policies is for a sweep over windows; add --sweep-keep"),
            (("--keep", "1", "--evicts", "free"), "--evicts is for a sweep over windows; add --sweep-keep"),
            (
                ("--sweep-keep", "--keep", "1"),
                "--sweep-keep and --keep contradict each other: a sweep takes its windows from --keeps",
            ),
            (
                ("--sweep-keep", "--policy", "pinned", "--policies", "pinned"),
                "--policy and --policies contradict each other: a sweep has one list of policies",
            ),
            (
                ("--sweep-keep", "--evict", "pool", "--evicts", "pool"),
                "--evict and --evicts contradict each other: a sweep has one list of ways to evict",
            ),
            (
                ("--sweep-keep", "--keeps", "1,auto"),
                "--keeps holds '1,auto'; it takes numbers of layers or off, separated by commas, like off,27,20,1",
            ),
            (("--new-tokens", "3"), "--new-tokens holds '3'; it takes a whole number of at least 4"),
            (("--rounds", "0"), "--rounds holds '0'; it takes a whole number of at least 1"),
            (("--prompt-tokens", "0"), "--prompt-tokens holds '0'; it takes a whole number of at least 1"),
            (("--backend", "cpu", "--device", "1"), "--device chooses a GPU, and --backend asks for the CPU backend"),
        ],
    )
    def test_what_contradicts_itself_is_refused_in_a_line(
        self, bench: Bench, arguments: tuple[str, ...], message: str
    ) -> None:
        assert bench(*arguments) == (2, "", f"kestrel-cuda: {message}\n")
        assert bench.asked == {}

    @pytest.mark.parametrize("text", ["", "1,", "-1", "1.5", "1;2", "all"])
    @pytest.mark.parametrize("flag", ["--keeps", "--policies", "--evicts"])
    def test_a_list_out_of_range_is_refused(self, bench: Bench, flag: str, text: str) -> None:
        exit_code, out, err = bench("--sweep-keep", flag, text)
        assert (exit_code, out) == (2, "")
        assert err.startswith(f"kestrel-cuda: {flag} holds {text!r}; it takes ")

    @pytest.mark.parametrize("argument", ["a prompt", "--ctx=64", "--lazy", "--table=all", "--max-new-tokens=4"])
    def test_what_it_has_no_use_for_is_refused(self, bench: Bench, argument: str) -> None:
        assert bench(argument)[0] == 2


class TestOutput:
    """The table, the object, and nothing else on standard output."""

    def test_the_table_is_standard_output(self, bench: Bench) -> None:
        exit_code, out, err = bench("--sweep-keep")
        assert exit_code == 0
        assert out == bench_text(REPORT, fancy=False)
        assert err.splitlines()[0].startswith("settings     flag: sweep_keep=on")
        assert err.splitlines()[-2:] == ["the embedding table stays in host memory", "warning: a stray file"]

    def test_quiet_says_nothing_else(self, bench: Bench) -> None:
        _, out, err = bench("--quiet")
        assert (out, err) == (bench_text(REPORT, fancy=False), "")

    def test_json_is_one_object(self, bench: Bench) -> None:
        exit_code, out, _ = bench("--json", "--keep", "off")
        assert exit_code == 0
        assert out.count("\n") == 1
        result = json.loads(out)
        assert list(result) == [
            *("version", "card", "backend", "prompt_tokens", "new_tokens", "rounds"),
            *("link_gb_per_s", "device_read_gb_per_s", "all_equal", "settings", "rows"),
        ]
        assert (result["card"], result["rounds"], result["link_gb_per_s"]) == ("NVIDIA H200", 5, 55.1)
        assert result["settings"]["keep"] == {"value": "off", "source": "flag"}
        assert [list(row) for row in result["rows"]] == [[one.name for one in fields(BenchRow)]] * 2
        assert (result["rows"][0]["keep"], result["rows"][0]["link_share"]) == ("off", None)
        assert (result["rows"][1]["keep"], result["rows"][1]["ids"]) == (1, list(ONE.ids))

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (
                (OFF, ONE, replace(PINNED, logits_sha256="dead")),
                "keep off (past-only, pool, prefetch 2) and keep 1 (pinned, pool, prefetch 2) differ in their logits",
            ),
            (
                (OFF, replace(FREED, ids=(1,), logits_sha256="dead")),
                "keep off (past-only, pool, prefetch 2) and keep 1 (both-sides, free, prefetch 2) differ in their ids",
            ),
            ((ONE,), "rounds of keep 1 (past-only, pool, prefetch 2) differ in their ids"),
        ],
    )
    def test_windows_that_differ_are_exit_code_1(self, bench: Bench, rows: tuple[BenchRow, ...], message: str) -> None:
        bench.report = replace(REPORT, rows=rows, all_equal=False)
        exit_code, out, err = bench("--quiet")
        assert (exit_code, err) == (1, f"kestrel-cuda: {message}\n")
        assert out.splitlines()[-1].endswith(": NOT EQUAL")
        exit_code, out, err = bench("--quiet", "--json")
        assert (exit_code, err) == (1, f"kestrel-cuda: {message}\n")
        assert out.count("\n") == 1
        result = json.loads(out)
        assert (result["all_equal"], len(result["rows"])) == (False, len(rows))
        assert result["error"] == {"kind": "check", "message": message}

    def test_what_does_not_fit_is_one_line(self, bench: Bench) -> None:
        bench.failure = DeviceError("keeping all of 28 layers resident needs 3 GiB")
        assert bench("--quiet") == (2, "", "kestrel-cuda: keeping all of 28 layers resident needs 3 GiB\n")
        _, out, _ = bench("--json", "--quiet")
        assert json.loads(out) == {"error": {"kind": "device", "message": str(bench.failure)}}


class TestTable:
    """What the text says, in how many columns."""

    def test_a_sweep(self) -> None:
        assert bench_text(REPORT, fancy=False) == (
            "model        /models/Qwen3-VL-2B-Instruct, q8_0\n"
            "card         NVIDIA H200 (cuda backend)\n"
            "sizes        prompt 16 tokens, answer 24 tokens, rounds 5\n"
            "window       policy past-only, evict pool, prefetch 2\n"
            "ceilings     link 55.1 GB/s, device memory 4490 GB/s\n"
            "columns      weights resident after a token; peak of device memory;\n"
            "             ms/token: median ± standard deviation of 105 tokens; link a token\n"
            "not timed    loading, prefill, a run that hashes logits, 3 first tokens a round\n"
            "\n"
            "                peak                link  link  link  logits  first\n"
            "keep  weights    GiB     ms/token     GB  GB/s     %  sha256  ids\n"
            "----- -------- ------ ------------ ------ ----- ----- ------- ------------------\n"
            " off      197  2.701   0.71 ±0.00      0     -     -  c0ffee  151643 9707 11 198\n"
            "   1        8  0.652  26.31 ±0.04  1.440  54.7  99.3  c0ffee  151643 9707 11 198\n"
            "\n"
            "ids and logits of 2 windows: equal to the bit\n"
        )

    @pytest.mark.parametrize(
        ("rows", "once", "columns"),
        [
            ((OFF, ONE), "policy past-only, evict pool, prefetch 2", []),
            ((OFF, PINNED), "policy pinned, evict pool, prefetch 2", []),
            ((OFF, ONE, PINNED), "evict pool, prefetch 2", ["policy"]),
            ((ONE, replace(ONE, evict="free")), "policy past-only, prefetch 2", ["evict"]),
            ((OFF, ONE, FREED), "prefetch 2", ["policy", "evict"]),
            ((ONE, replace(ONE, prefetch=0)), "policy past-only, evict pool", ["prefetch"]),
        ],
    )
    def test_what_varies_is_a_column(self, rows: tuple[BenchRow, ...], once: str, columns: list[str]) -> None:
        lines = bench_text(replace(REPORT, rows=rows), fancy=False).splitlines()
        assert f"window       {once}" in lines
        (heads,) = (line.split() for line in lines if line.startswith("keep"))
        assert heads[1 : heads.index("weights")] == columns
        assert max(map(len, lines)) <= 80

    def test_without_a_window_there_is_no_policy(self) -> None:
        lines = bench_text(replace(REPORT, rows=(OFF, ONE, PINNED)), fancy=False).splitlines()
        (off,) = (line for line in lines if line.startswith(" off"))
        assert off.split()[:2] == ["off", "-"]

    def test_everything_resident_is_no_window(self) -> None:
        text = bench_text(replace(REPORT, rows=(OFF,)), fancy=False)
        assert "window       none, everything resident\n" in text
        assert "past-only" not in text

    def test_a_backend_without_a_link(self) -> None:
        rows = (OFF, replace(ONE, link_share=None))
        text = bench_text(
            replace(REPORT, backend="cpu", link_gb_per_s=None, device_read_gb_per_s=None, rows=rows), fancy=False
        )
        assert "ceilings     no link: copies stay in host memory\n" in text
        assert "%" not in text

    def test_a_read_rate_that_was_not_measured(self) -> None:
        text = bench_text(replace(REPORT, device_read_gb_per_s=None), fancy=False)
        assert "ceilings     link 55.1 GB/s, read rate not measured under --vram\n" in text

    def test_one_window_has_rounds_to_compare(self) -> None:
        text = bench_text(replace(REPORT, rows=(ONE,)), fancy=False)
        assert text.endswith("\nids of every round: equal to the bit\n")

    def test_a_terminal_gets_bold_heads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        text = bench_text(REPORT, fancy=True)
        assert "\x1b[1m" in text
        assert "─" in text

    def test_names_are_never_escapes(self) -> None:
        text = bench_text(replace(REPORT, rows=(replace(OFF, model="/m/\x1b[31m[b]x\n"),)), fancy=False)
        assert text.startswith("model        /m/\\x1b[31m[b]x\\n, q8_0\n")


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`bench` of the embedded model on the CPU."""

    def call(*arguments: str, **variables: str) -> tuple[int, str, str]:
        exit_code = app.execute(["bench", *QUICK, *arguments], {"VLLM_CUDA_INFER": "0", **variables})
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
        assert [row["h2d_bytes_per_token"] // 65280 for row in rows] == [0, 8, 12, 11, 12]

    def test_one_window_of_what_fits(self, run: Run) -> None:
        exit_code, out, err = run("--quiet")
        assert (exit_code, err) == (0, "")
        assert out.startswith("model ")
        assert out.splitlines()[-3].startswith(" off ")
        assert out.splitlines()[-1] == "ids of every round: equal to the bit"

    def test_a_bound_chooses_a_window(self, run: Run) -> None:
        exit_code, out, err = run("--vram", "600KiB", "--policy", "past-only", "--json")
        assert exit_code == 0
        (row,) = json.loads(out)["rows"]
        assert row["keep"] == 2
        assert row["peak_device_bytes"] <= 600 << 10
        assert "a window of --keep 2 of 12 layers is used" in err

    def test_a_window_that_does_not_fit_is_refused_by_its_size(self, run: Run) -> None:
        exit_code, out, err = run(
            "--vram", "600KiB", "--sweep-keep", "--keeps", "1,5", "--policy", "past-only", "--quiet"
        )
        assert (exit_code, out) == (2, "")
        assert err.startswith("kestrel-cuda: keeping 5 of 12 layers resident needs ")
        assert err.endswith("; --keep 2 fits\n")

    def test_a_strip_cache_serves_a_bench(self, run: Run, tmp_path: Path) -> None:
        quick = ("--sweep-keep", "--keeps", "off,1", "--json")
        fresh, saved, found = (
            json.loads(run(*quick, *more)[1])["rows"] for more in ((), *[("--strip-cache", str(tmp_path))] * 2)
        )
        assert {row["logits_sha256"] for row in (*fresh, *saved, *found)} == {fresh[0]["logits_sha256"]}

    def test_more_tokens_than_positions_are_refused(self, run: Run) -> None:
        assert run("--prompt-tokens", "4096", "--quiet") == (
            2,
            "",
            "kestrel-cuda: 4096 prompt tokens and 4 new ones are over the 4096 positions this model has\n",
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
        parent, child = pty.openpty()
        process = subprocess.Popen(
            command(*QUICK),
            env=environment(**variables),
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
        )
        os.close(child)
        written = b""
        while True:
            try:
                written += os.read(parent, 65536)
            except OSError:
                # EIO is Linux's way to say that the other side is closed.
                break
        os.close(parent)
        assert process.wait(timeout=60) == 0
        return written.decode()

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
            "import sys; from kestrel_cli import app; app.execute(['bench', '--keeps', '1'], {}); print(*sys.modules)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True
        )
        assert "--keeps is for a sweep" in ran.stderr
        assert set(ran.stdout.split()).isdisjoint({"cupy", "numpy", "tokenizers", "kestrel_cuda.engine"})
