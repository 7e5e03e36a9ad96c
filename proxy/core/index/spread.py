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

# Dicts are halved when they have more entries: dividing that many takes 0.1 to 0.3 ms.
FULL = 1200
_FEW_BITS = 4

Spread = list[dict[K, V]]


def spread(bits: int = _BITS) -> Spread[K, V]:
    """Empty dicts, one for each value of `bits` bits."""
    return [{} for _ in range(1 << bits)]


def few(bits: int) -> Spread[K, V]:
    """Like `spread`, with few dicts until `halve` makes more: neighbouring places share one. Small dicts that
    are used often stay in the processor's caches, and many of them do not."""
    dicts: Spread[K, V] = spread(_FEW_BITS)
    return [part for part in dicts for _ in range(1 << bits - _FEW_BITS)]


def halve(parts: Spread[int, V], at: int) -> None:
    """Makes two dicts of the one at this place, unless no other place shares it. The places are those of
    keys with 64 bits, by their high bits."""
    part, start, end = parts[at], at, at + 1
    while start and parts[start - 1] is part:
        start -= 1
    while end < len(parts) and parts[end] is part:
        end += 1
    middle = (start + end) // 2
    if middle > start:
        first = middle << 65 - len(parts).bit_length()  # the smallest key of the upper half
        lower = {key: value for key, value in part.items() if key < first}
        upper = {key: value for key, value in part.items() if key >= first}
        parts[start:end] = [lower] * (middle - start) + [upper] * (end - middle)


def place(key: Hashable) -> int:
    """The number of the dict that holds the key."""
    return hash(key) >> _HASH_SHIFT & _MASK
