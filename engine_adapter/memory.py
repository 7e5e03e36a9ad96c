"""The memory that this process may still take."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int | None:
    """Memory that is free or easily freed, within the limits of this process's cgroups; None if nobody says.

    Linux says it, in `/proc` and `/sys`; `root` stands for `/`."""
    lines = _read(root / "proc/meminfo").splitlines()
    known = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if controllers == "memory":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top /= "memory"
        elif not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
        else:
            continue
        own = top / path.strip("/")  # in a container, only the top may be there
        known += [
            left
            for group in {own, *own.parents}
            if group.is_relative_to(top) and (left := _left(group, *names)) is not None
        ]
    return max(0, min(known)) if known else None


def _left(group: Path, limit: str, usage: str, cache: str) -> int | None:
    """Bytes that a cgroup's limit leaves; None without a limit. Cached files do not count as used."""
    most, used = _read(group / limit).strip(), _read(group / usage).strip()
    if not (most.isdigit() and used.isdigit()):
        return None
    stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
    return int(most) - int(used) + int(stat.get(cache, 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
