"""Decides whether a prompt waits for another prompt that is computing the same prefix.

Some engines share a prompt's KV only once the whole prompt is computed. Two prompts with one prefix that run
side by side then compute it twice, each at half the speed. There the second prompt waits for the first token
of the first, unless running beside it is faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from proxy.core.index.blocks import BlockHash
from proxy.core.placement.load import Remaining

# Nobody waits longer than this many times the expected time of a first token.
LENIENCE = 2.0


class Underway(Protocol):
    """A prompt that has no first token yet."""

    @property
    def hashes(self) -> Sequence[BlockHash]:
        """Its full blocks."""

    @property
    def found(self) -> int:
        """Leading blocks that it expects in the engine's cache. It computes the others."""


Prompt = TypeVar("Prompt", bound=Underway)


def leader(prompts: Iterable[Prompt], hashes: Sequence[BlockHash], blocks: int) -> Prompt | None:
    """The running prompt that computes block number `blocks` of a chain; None if there is none."""
    for prompt in prompts:
        if prompt.found < blocks <= len(prompt.hashes) and prompt.hashes[blocks - 1] == hashes[blocks - 1]:
            return prompt
    return None


def patience_s(remaining: Remaining, shared_s: float) -> float | None:
    """The longest wait for a running prompt, in seconds; None if running beside it is faster. Its first token
    comes after `remaining`; computing what both share takes `shared_s`."""
    if remaining.own_s >= 2 * shared_s:
        return None
    expected_s = remaining.before_s + remaining.own_s
    return LENIENCE * expected_s if remaining.seen else expected_s
