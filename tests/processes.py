"""Waits for programs that tests start."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from tests.forks import Forked

_Found = TypeVar("_Found")


def wait_until(
    look: Callable[[], _Found | None], process: subprocess.Popen[bytes] | Forked, log: Path, seconds: float
) -> _Found:
    """Returns what `look` finds. Fails the test if the process ends before that, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.02)
    why = "was not ready" if process.poll() is None else f"ended with {process.returncode}"
    pytest.fail(f"{process.args} {why}:\n{log.read_text(errors='replace')[-10_000:]}", pytrace=False)


def address_in(log: Path, pattern: str) -> str | None:
    """The address that the log names, None until then."""
    found = re.search(pattern, log.read_text(errors="replace"))
    return found[1] if found is not None else None


def answers(url: str) -> bool:
    """Whether a GET of `url` is answered with 200."""
    try:
        return httpx.get(url, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def is_alive(pid: int | str) -> bool:
    """Whether the process exists and has not ended (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
