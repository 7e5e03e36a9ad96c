"""Dicts that grow in small steps.

A dict moves all its entries when it grows or has had many removals. For 350,000 entries that blocks the event
loop for 70 ms. Entries spread over many dicts, by the high bits of a key's hash, move a few at a time.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_BITS = 8
# `spread[key >> KEY_SHIFT]` for hashes of 64 bits, which need no more hashing.
KEY_SHIFT = 64 - _BITS
_HASH_SHIFT = 61 - _BITS  # hashes of integers have 61 bits
_MASK = (1 << _BITS) - 1

Spread = list[dict[K, V]]


def spread(parts: int = 1 << _BITS) -> Spread[K, V]:
    """So many empty dicts."""
    return [{} for _ in range(parts)]


def place(key: Hashable) -> int:
    """The number of the dict that holds the key."""
    return hash(key) >> _HASH_SHIFT & _MASK
