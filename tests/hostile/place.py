"""Where attackers and innocent clients find kvpin, and as whom they ask."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GOOD, BAD, LIMITED, ADMIN = "key-good", "key-bad", "key-limited", "key-admin"
"""Keys. The tenant `good` is innocent; `bad` may send 32 requests at a time, `limited` one."""
WELL, BROKEN, TINY = "well", "broken", "kvpin-tiny"
"""Models: of a mock engine that is well, of one that obeys its prompts, and of the embedded engine."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an attack finds what it attacks. Goes to other processes.

    Attributes:
        port, pid: kvpin's.
        has_keys: clients need keys.
        state_dir, tmp: directories of its own.
        valkey: address of its exchange; empty without one.
        clock: the file that sets its clock; None where the clock cannot be set.
    """

    port: int
    pid: int
    has_keys: bool
    state_dir: Path
    tmp: Path
    valkey: str
    clock: Path | None
