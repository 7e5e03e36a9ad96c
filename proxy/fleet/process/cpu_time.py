"""Finds out whether a process computes: Linux tells the CPU time that it has taken."""

from __future__ import annotations

import os
import time
from pathlib import Path

# Of a CPU. A server that waits takes less.
_SHARE = 0.02


class CpuTime:
    """The CPU time of a process, from look to look."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._last = self._now()

    def is_used(self) -> bool:
        """True if the process has taken CPU time since the last call; False where nobody knows."""
        (before_s, used_before_s), self._last = self._last, self._now()
        now_s, used_s = self._last
        return used_s - used_before_s > _SHARE * (now_s - before_s)

    def _now(self) -> tuple[float, float]:
        """The time, and the seconds that all threads of the process have taken; 0.0 for one that is gone."""
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
        except OSError:
            return time.monotonic(), 0.0
        return time.monotonic(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
