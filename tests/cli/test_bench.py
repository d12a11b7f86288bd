"""The command `bench` over a report from a list: its switches, and what it prints where."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

import kestrel_cuda.bench
from kestrel_cli import options, program
from kestrel_cli.bench_table import bench_text
from kestrel_cuda.bench import BenchReport, BenchRow
from kestrel_cuda.config import EngineConfig, Evict, Policy
from kestrel_cuda.errors import DeviceError, SettingError
from tests.cli.bench_reports import FREED, OFF, ONE, PINNED, REPORT

POLICY, EVICT = options.POLICY.default, options.EVICT.default


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
        exit_code = program.execute(["bench", *arguments], variables)
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
        assert (bench.asked["keeps"], bench.asked["keep_flag"]) == ((4,), "--keep")
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
        assert (bench.asked["keeps"], bench.asked["keep_flag"]) == ((0, 27, 1), "--keeps")
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

    @pytest.mark.parametrize(
        ("arguments", "variables", "note"),
        [
            (
                ("--keep", "2"),
                {"VLLM_VQF_STREAM": "3"},
                "VLLM_VQF_STREAM is not read: bench holds every layer in host memory",
            ),
            (
                ("--sweep-keep", "--keeps", "2"),
                {"VLLM_CUDA_STREAM": "4"},
                "VLLM_CUDA_STREAM is not read: a sweep takes its windows from --keeps",
            ),
            (
                ("--keep", "2"),
                {"KESTREL_CUDA_KEEPS": "zzz"},
                "KESTREL_CUDA_KEEPS is not read: it is for a sweep over windows (--sweep-keep)",
            ),
            ((), {"VLLM_VQF_STREAM": "0", "KESTREL_CUDA_POLICIES": ""}, None),
            (("--sweep-keep",), {"VLLM_CUDA_STREAM": " "}, None),
        ],
    )
    def test_what_it_does_not_read_is_said(
        self, bench: Bench, arguments: tuple[str, ...], variables: dict[str, str], note: str | None
    ) -> None:
        exit_code, out, _ = bench("--json", *arguments, **variables)
        assert exit_code == 0
        assert json.loads(out)["notes"] == [*([note] if note else []), *REPORT.notes]

    def test_rules_without_a_window_are_said_to_change_nothing(self, bench: Bench) -> None:
        bench.report = replace(REPORT, rows=(OFF,), notes=())
        _, out, _ = bench("--json", "--keep", "off", "--policy", "pinned")
        assert json.loads(out)["notes"] == [
            "--policy changed nothing: every weight is resident, there is no window",
        ]
        _, out, _ = bench("--json", "--sweep-keep", "--keeps", "off", "--policies", "pinned,both-sides")
        assert json.loads(out)["notes"] == [
            "--policies changed nothing: every weight is resident, there is no window",
        ]

    def test_what_it_does_not_read_of_a_profile_is_said(self, bench: Bench, tmp_path: Path) -> None:
        file = tmp_path / "p.toml"
        file.write_text("keep = 7\nhost_keep = 2\nlazy = true\n", encoding="utf-8")
        _, out, _ = bench("--json", "--sweep-keep", "--profile", str(file))
        assert json.loads(out)["notes"][:-1] == [
            f"profile {file}: host_keep is not read: bench holds every layer in host memory",
            f"profile {file}: lazy is not read: bench uploads what a window needs before it is timed",
            f"profile {file}: keep is not read: a sweep takes its windows from --keeps",
        ]
        _, out, _ = bench("--json", "--profile", "default")
        assert json.loads(out)["notes"] == list(REPORT.notes)

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
            *(
                "link_gb_per_s",
                "device_read_gb_per_s",
                "all_equal",
                "settings",
                "rows",
                "cost_lines",
                "notes",
                "warnings",
            ),
        ]
        assert (result["card"], result["rounds"], result["link_gb_per_s"]) == ("NVIDIA H200", 5, 55.1)
        assert result["settings"]["keep"] == {"value": "off", "source": "flag"}
        assert [list(row) for row in result["rows"]] == [[one.name for one in fields(BenchRow)]] * 2
        assert (result["rows"][0]["keep"], result["rows"][0]["link_share"]) == ("off", None)
        assert [result["rows"][0][key] for key in ("bytes_read_per_token", "read_gb_per_s", "read_share")] == [
            *(1_827_979_264, 2566.3, 0.5716),
        ]
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
