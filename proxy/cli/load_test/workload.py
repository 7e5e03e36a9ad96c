"""Prompts that share prefixes, and when each is sent. The same seed gives the same load."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

_WORDS = tuple(
    f"{first}{last}" for first in ("ba", "ko", "li", "mu", "ne", "ra") for last in ("d", "l", "n", "t")
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in random order over some prefixes, each with an end of its own.

    Attributes:
        num_prefixes: different prefixes. As many as requests: nothing is shared.
        prefix_len: words of a prefix.
        request_rate: requests a second, as a Poisson process; infinite: all at once.
        seed: of words, order and arrivals.
    """

    num_prompts: int
    num_prefixes: int
    prefix_len: int
    suffix_len: int
    request_rate: float
    seed: int

    def prompts(self, salt: str) -> list[str]:
        """The text of each request. Another salt gives other prefixes: no cache holds them yet."""
        chance = random.Random(self.seed)  # noqa: S311 - a load, no secret
        prefixes = [
            f"Document {salt}-{number}: {_text(chance, self.prefix_len)}"
            for number in range(self.num_prefixes)
        ]
        turns = [number % self.num_prefixes for number in range(self.num_prompts)]
        chance.shuffle(turns)
        return [f"{prefixes[turn]}\n\nQuestion: {_text(chance, self.suffix_len)}" for turn in turns]

    def arrivals(self) -> Iterator[float]:
        """Seconds from the start to each request."""
        chance, at = random.Random(self.seed), 0.0  # noqa: S311 - likewise
        for _ in range(self.num_prompts):
            yield at
            at += 0.0 if math.isinf(self.request_rate) else chance.expovariate(self.request_rate)


def _text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(_WORDS, k=words))
