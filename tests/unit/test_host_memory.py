"""Host memory that is left, by files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

from kestrel_cuda.host_memory import available_bytes

MEMINFO = "MemTotal:       24000000 kB\nMemAvailable:    2000 kB\nHugePages_Total:       0\n"


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def group(root: Path, path: str, limit: str, used: int, cached: int = 0) -> None:
    folder = f"sys/fs/cgroup/{path}"
    write(root, f"{folder}/memory.max", f"{limit}\n")
    write(root, f"{folder}/memory.current", f"{used}\n")
    write(root, f"{folder}/memory.stat", f"anon 5\nfile {cached}\ninactive_file {cached}\nactive_file 1\n")


def test_nothing_is_known_where_nothing_is_said(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    write(tmp_path, "proc/meminfo", "MemTotal: many\n")
    write(tmp_path, "proc/self/cgroup", "12:cpu:/old\n")
    assert available_bytes(tmp_path) is None


def test_the_machine_alone(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", MEMINFO)
    assert available_bytes(tmp_path) == 2000 << 10
    write(tmp_path, "proc/self/cgroup", "0::/a\n")
    group(tmp_path, "a", "max", 1 << 30)
    assert available_bytes(tmp_path) == 2000 << 10


def test_the_tightest_group_around_the_process(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, "proc/self/cgroup", "1:name=systemd:/x\n0::/outer/inner\n")
    group(tmp_path, "outer/inner", "1500000", 300_000)
    assert available_bytes(tmp_path) == 1_200_001
    group(tmp_path, "outer", "1000000", 400_000, cached=100_000)
    assert available_bytes(tmp_path) == 700_001, "pages of files are given back"
    group(tmp_path, "outer", "1000000", 1_200_000)
    assert available_bytes(tmp_path) == 0, "never less"


def test_this_machine_has_some() -> None:
    found = available_bytes()
    assert found is None or found > 0
