"""Whether a prompt waits for another one that is computing what both begin with.

Engines that can use a prompt's KV for others only once all of it is computed compute what two prompts share
twice when these come side by side, each at half the speed. There the second one waits until the first has its
first token, unless it would be faster to go beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from proxy.core.index.blocks import BlockHash
from proxy.core.placement.load import Remaining

# How much later than expected a first token may come before nobody waits for it any longer.
LENIENCE = 2.0


class Underway(Protocol):
    """A prompt whose first token is yet to come."""

    @property
    def hashes(self) -> Sequence[BlockHash]:
        """Its full blocks."""

    @property
    def found(self) -> int:
        """How many of the leading ones it leaves to the engine to find; it computes the others."""


Prompt = TypeVar("Prompt", bound=Underway)


def leader(prompts: Iterable[Prompt], hashes: Sequence[BlockHash], blocks: int) -> Prompt | None:
    """Of the prompts under way, the one that computes the last of so many leading blocks of a chain."""
    for prompt in prompts:
        if prompt.found < blocks <= len(prompt.hashes) and prompt.hashes[blocks - 1] == hashes[blocks - 1]:
            return prompt
    return None


def patience_s(remaining: Remaining, shared_s: float) -> float | None:
    """How long to wait at most for a prompt that takes as long as `remaining`, and computes what would take
    `shared_s` alone; None where it is faster to go beside it."""
    if remaining.own_s >= 2 * shared_s:
        return None
    expected_s = remaining.before_s + remaining.own_s
    return LENIENCE * expected_s if remaining.seen else expected_s
