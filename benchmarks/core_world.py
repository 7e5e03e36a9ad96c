"""The content of the engines of `core_speed.py`, and the prompts they are sent.

It uses the standard library only, because the peer runs in its own environment.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

TOKENS_PER_BLOCK = 16
SYSTEM_TOKENS = 2048
FILLER_TOKENS = 8192
# Shares of a prompt that one engine after the other holds.
SHARES = (0.9, 0.75, 0.5, 0.25)
# Requests in flight on each engine.
IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class World:
    """Full engines. All hold the system prompt. Of each requested prompt, one engine holds most and three
    others less; the rest of each cache is prompts that nobody requests.

    Attributes:
        name: for people.
        engines: how many.
        prompt_tokens: of each requested prompt.
        prompts: how many of those.
        engine_tokens: what each engine holds.
    """

    name: str
    engines: int
    prompt_tokens: int
    prompts: int
    engine_tokens: int = 524_288

    def prompt(self, at: int) -> array[int]:
        """A requested prompt."""
        return _tokens(("prompt", at), self.prompt_tokens)

    def request(self, at: int) -> array[int]:
        """A prompt in flight, of which no engine holds more than the system prompt."""
        return _tokens(("in flight", at), FILLER_TOKENS // 2)

    def holders(self, at: int) -> list[tuple[int, int]]:
        """Which engines hold how many tokens of a prompt, in whole blocks."""
        first = at * self.engines // self.prompts
        return [
            (
                (first + n) % self.engines,
                int(self.prompt_tokens * share) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK,
            )
            for n, share in enumerate(SHARES)
        ]

    def held(self) -> Iterator[tuple[int, array[int]]]:
        """Yields what the engines hold: an engine, and the leading tokens of a prompt."""
        used = Counter(dict.fromkeys(range(self.engines), SYSTEM_TOKENS))
        for at in range(self.prompts):
            prompt = self.prompt(at)
            for engine, tokens in self.holders(at):
                used[engine] += tokens - SYSTEM_TOKENS
                yield engine, prompt[:tokens]
        for engine in range(self.engines):
            at = 0
            while used[engine] + FILLER_TOKENS - SYSTEM_TOKENS <= self.engine_tokens:
                used[engine] += FILLER_TOKENS - SYSTEM_TOKENS
                yield engine, _tokens(("filler", engine, at), FILLER_TOKENS)
                at += 1


WORLDS = {
    "8k": World("8k tokens, 64 engines", engines=64, prompt_tokens=8192, prompts=128),
    "100k": World("100k tokens, 256 engines", engines=256, prompt_tokens=100_000, prompts=64),
}


def _tokens(seed: tuple[object, ...], tokens: int) -> array[int]:
    """The system prompt and random tokens."""
    return _random("system", SYSTEM_TOKENS) + _random(str(seed), tokens - SYSTEM_TOKENS)


def _random(seed: str, tokens: int) -> array[int]:
    draw = random.Random(seed)  # noqa: S311 - the same prompts each time
    return array("i", array("H", draw.randbytes(2 * tokens)))
