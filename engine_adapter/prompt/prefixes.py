"""The length of the prefix that two runs of tokens, or two texts, share."""

from __future__ import annotations

from typing import TypeVar

from engine_adapter.types import TokenIds

_Run = TypeVar("_Run", "TokenIds[int]", str)


def common_prefix(a: _Run, b: _Run) -> int:
    """Number of leading items that two arrays or texts share. A binary search over slices: C compares the
    items."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
