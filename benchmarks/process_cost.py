"""The cost of a process and its descendants, by the kernel's count (Linux)."""

from __future__ import annotations

import time
from pathlib import Path

_KB = 1024


def tree(pid: int) -> list[int]:
    """A process and its descendants, as of now."""
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        for task in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            try:
                waiting += map(int, task.read_text(encoding="ascii").split())
            except OSError:  # the thread has ended
                continue
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its descendants, to the nanosecond; of those that ended, nothing."""
    seconds = 0.0
    for member in tree(pid):
        try:
            seconds += time.clock_gettime(_cpu_clock(member))
        except OSError:  # it has ended
            continue
    return seconds


def rss_mb(pid: int) -> float:
    """Resident memory of a process and its descendants in MB; pages they share count for each."""
    kilobytes = 0
    for member in tree(pid):
        try:
            lines = Path(f"/proc/{member}/status").read_text(encoding="ascii").splitlines()
        except OSError:  # it has ended
            continue
        kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return kilobytes * _KB / 1e6


def _cpu_clock(pid: int) -> int:
    """The id of the clock of a process's CPU time, as clock_getcpuclockid(3) makes it."""
    return (~pid << 3) | 2
