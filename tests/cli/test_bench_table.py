"""The text of a bench report: what it says, and in how many columns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kestrel_cli.bench_table import bench_text
from kestrel_cuda.bench import BenchRow
from tests.cli.bench_reports import FREED, OFF, ONE, PINNED, REPORT


def test_a_sweep() -> None:
    assert bench_text(REPORT, fancy=False) == (
        "model        Qwen3-VL-2B-Instruct, q8_0\n"
        "card         NVIDIA H200 (cuda backend)\n"
        "sizes        prompt 16 tokens, answer 24 tokens, rounds 5\n"
        "window       policy past-only, evict pool, prefetch 2\n"
        "ceilings     link 55.1 GB/s, device memory 4490 GB/s\n"
        "read         1.828 GB a token: every weight once, nothing else\n"
        "columns      weights resident after a token; peak of device memory;\n"
        "             ms/token: median ± standard deviation of 105 tokens; link a token;\n"
        "             GB/s over that median, % of the ceiling above\n"
        "not timed    loading, prefill, a run that hashes logits, 3 first tokens a round\n"
        "\n"
        "                peak               read  read   link  link  link  logits  first\n"
        "keep  weights    GiB     ms/token  GB/s     %     GB  GB/s     %  sha256  ids\n"
        "----- -------- ------ ------------ ----- ----- ------ ----- ----- ------- ------\n"
        " off      197  2.701   0.71 ±0.00  2566  57.2      0     -     -  c0ffee  151643\n"
        "   1        8  0.652  26.31 ±0.04    69   1.5  1.440  54.7  99.3  c0ffee  151643\n"
        "\n"
        "ids and logits of 2 windows: equal to the bit\n"
    )


def swept(token_ms: dict[int, float], **rule: object) -> list[BenchRow]:
    """Windows that upload so many bytes a token, and what a token takes."""
    rows = [(ONE, num_bytes, ms) for num_bytes, ms in token_ms.items()]
    return [replace(row, h2d_bytes_per_token=b, ms_per_token_median=ms, **rule) for row, b, ms in rows]  # type: ignore[arg-type]


def test_what_uploads_cost_is_a_line() -> None:
    on_it = swept({0: 0.7, 500_000_000: 10.5, 1_000_000_000: 20.5, 1_500_000_000: 30.5})
    beside = swept({500_000_000: 10.0, 1_000_000_000: 23.0, 1_500_000_000: 30.0}, policy="pinned", evict="free")
    flat = swept({1_500_000_000: 30.0}, policy="both-sides")
    two = swept({500_000_000: 10.0, 1_000_000_000: 20.0}, prefetch=0)
    report = replace(REPORT, rows=(OFF, *on_it, *beside, *flat, *two))
    line, scattered = report.cost_lines
    assert (line.policy, line.evict, line.prefetch, line.num_windows) == ("past-only", "pool", 2, 3)
    assert (line.ms_without, line.gb_per_s, line.r_squared) == pytest.approx((0.5, 50, 1))
    assert (scattered.ms_without, scattered.gb_per_s) == pytest.approx((1.0, 50))
    assert scattered.r_squared == pytest.approx(1 - 6 / (200 + 6))
    assert (
        "past-only, pool, prefetch 2: a token takes 0.50 ms and what it uploads at 50 GB/s (R² 1.00000, 3 windows)\n"
        in bench_text(report, fancy=False)
    )
    assert not replace(report, link_gb_per_s=None).cost_lines, "copies within host memory say nothing of a link"


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
def test_what_varies_is_a_column(rows: tuple[BenchRow, ...], once: str, columns: list[str]) -> None:
    lines = bench_text(replace(REPORT, rows=rows), fancy=False).splitlines()
    assert f"window       {once}" in lines
    (heads,) = (line.split() for line in lines if line.startswith("keep"))
    assert heads[1 : heads.index("weights")] == columns
    assert max(map(len, lines)) <= 80


def test_without_a_window_there_is_no_policy() -> None:
    lines = bench_text(replace(REPORT, rows=(OFF, ONE, PINNED)), fancy=False).splitlines()
    (off,) = (line for line in lines if line.startswith(" off"))
    assert off.split()[:2] == ["off", "-"]


def test_one_timed_token_has_no_spread() -> None:
    text = bench_text(replace(REPORT, new_tokens=4, rounds=1, rows=(replace(OFF, ms_per_token_sd=None),)), fancy=False)
    assert "standard deviation of 1 token;" in text
    assert "0.7123 ±-  " in text


def test_everything_resident_is_no_window() -> None:
    text = bench_text(replace(REPORT, rows=(OFF,)), fancy=False)
    assert "window       none, everything resident\n" in text
    assert "past-only" not in text


def test_a_backend_without_a_link() -> None:
    rows = (replace(OFF, read_share=None), replace(ONE, read_share=None, link_share=None))
    text = bench_text(
        replace(REPORT, backend="cpu", link_gb_per_s=None, device_read_gb_per_s=None, rows=rows), fancy=False
    )
    assert "ceilings     no link: copies stay in host memory; read rate not measured\n" in text
    heads, _, off, one = text.splitlines()[-6:-2]
    assert heads.split() == ["keep", "weights", "GiB", "ms/token", "GB/s", "%", "GB", "GB/s", "sha256", "ids"]
    assert off.split()[5:9] == ["2566", "-", "0", "-"]
    assert one.split()[5:9] == ["69", "-", "1.440", "54.7"]


def test_a_read_rate_that_was_not_measured() -> None:
    rows = (replace(OFF, read_share=None), replace(ONE, read_share=None))
    text = bench_text(replace(REPORT, device_read_gb_per_s=None, rows=rows), fancy=False)
    assert "ceilings     link 55.1 GB/s, read rate not measured (--vram, or under 2 GiB free)\n" in text
    assert [line.split()[6] for line in text.splitlines()[-4:-2]] == ["-", "-"]


def test_what_has_no_room_and_is_the_same_in_every_row_is_said_once() -> None:
    lines = bench_text(replace(REPORT, rows=(OFF, ONE, FREED)), fancy=False).splitlines()
    said = lines.index("every row    first ids: 151643 9707 11 198 220 16")
    assert lines[said + 1] == "             logits sha256: c0ffee"
    assert not any(line.startswith("every row") for line in bench_text(REPORT, fancy=False).splitlines())


def test_what_differs_stays_in_the_table() -> None:
    rows = (OFF, ONE, replace(FREED, ids=(1, 2, 3), logits_sha256="dead123456"))
    text = bench_text(replace(REPORT, rows=rows, all_equal=False), fancy=False)
    assert "every row" not in text
    *_, last, _, verdict = text.splitlines()
    assert last.split()[-2:] == ["dead12", "1"]
    assert verdict == "ids and logits of 3 windows: NOT EQUAL"


def test_one_window_has_rounds_to_compare() -> None:
    text = bench_text(replace(REPORT, rows=(ONE,)), fancy=False)
    assert text.endswith("\nids of every round: equal to the bit\n")


def test_a_terminal_gets_bold_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = bench_text(REPORT, fancy=True)
    assert "\x1b[1m" in text
    assert "─" in text


def test_names_are_never_escapes() -> None:
    text = bench_text(replace(REPORT, rows=(replace(OFF, model="/m/\x1b[31m[b]x\n"),)), fancy=False)
    assert text.startswith("model        \\x1b[31m[b]x\\n, q8_0\n")
