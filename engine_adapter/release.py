"""Versions of engines, to compare."""

from __future__ import annotations

import re

_NUMBERS = re.compile(r"\d+(\.\d+)*")


def release_of(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, e.g. (0, 32, 0) of `0.32.0+cpu`; () where there are none."""
    numbers = _NUMBERS.match(version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
