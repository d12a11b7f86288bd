"""How much host memory a process may still take before the system swaps or ends it: Linux's own counts."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def available_bytes(root: Path = ROOT) -> int | None:
    """The least of what the machine and this process's control group (version 2) leave; None where neither says.

    Pages of files that were read count as available: they are dropped when memory is asked for.
    """
    found = [left for left in (_of_machine(root), *_of_groups(root)) if left is not None]
    return max(0, min(found)) if found else None


def _of_machine(root: Path) -> int | None:
    kibibytes = _fields(root / "proc/meminfo").get("MemAvailable:")
    return None if kibibytes is None else kibibytes << 10


def _of_groups(root: Path) -> list[int | None]:
    """The group's own limit, and those of the groups around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if path is None:
        return []
    top = root / "sys/fs/cgroup"
    group = top / path.lstrip("/")
    return [_of_group(folder) for folder in (group, *group.parents) if folder == top or top in folder.parents]


def _of_group(folder: Path) -> int | None:
    try:
        limit = int((folder / "memory.max").read_text(encoding="utf-8"))
        used = int((folder / "memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    statistics = _fields(folder / "memory.stat")
    return limit - used + statistics.get("inactive_file", 0) + statistics.get("active_file", 0)


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number; others are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    words = (line.split() for line in lines)
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}
