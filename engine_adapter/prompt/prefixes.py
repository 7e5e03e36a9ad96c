"""The length of the prefix that two token runs share."""

from __future__ import annotations

from engine_adapter.types import TokenIds


def common_prefix(a: TokenIds[int], b: TokenIds[int]) -> int:
    """Number of leading items that two arrays share. A binary search over slices: C compares the items."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
