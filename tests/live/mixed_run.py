"""What the mixed loads on real servers share: the conversations' texts, and what came of each request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from engine_adapter.events.fields import KeyReader
from tests.live.server_world import ServerWorld, count_evictions

LONGEST = 700  # a conversation with more prompt tokens is replaced by a new one
SYSTEMS = (
    "You are a harbour pilot. " + "Answer briefly, and name the light you steer by. " * 6,
    "You keep the log of a lighthouse. " + "Write what you see, never what you think. " * 6,
    "Jesteś latarnikiem. 灯台守。 " + "Pisz krótko: zażółć gęślą jaźń 🙂. " * 5,
)
WORDS = ("tide", "light", "chart", "wind", "knot", "sail", "anchor", "rope", "fog", "keel", "żagiel", "港")


@dataclass(frozen=True, slots=True)
class Seen:
    """One request and what came of it; counts in tokens.

    Attributes:
        stage: part of the run.
        kind: kind of request, in words.
        at_once: requests sent together, itself included.
        reported: by the engine, from the usage if the client asked for it, else as kvpin read it.
        why: kvpin's explanation.
        broken: why it broke off; then nothing is reported.
    """

    number: int
    stage: str
    kind: str
    stream: bool
    at_once: int = 1
    engine: str = ""
    prompt: int = 0
    predicted: int = 0
    reported: int | None = None
    why: str = ""
    broken: str = ""


@dataclass(slots=True)
class Report:
    """The result of the run. `within`: an engine with small pages may reuse so many tokens more."""

    within: int = 1
    seen: list[Seen] = field(default_factory=list)
    evicted: int = 0

    def answered(self, *, alone: bool | None = None) -> list[Seen]:
        """Answered requests; with `alone`, only those sent alone or only the others."""
        return [s for s in self.seen if not s.broken and alone in (None, s.at_once == 1)]

    def misses(self, *, alone: bool | None = None) -> list[Seen]:
        """Requests that did not reuse what was predicted, or less than `within` tokens more."""
        return [seen for seen in self.answered(alone=alone) if not self._is_exact(seen)]

    def lines(self) -> Iterator[str]:
        """The report for people."""
        answered, missed = Counter[str](), Counter[str]()
        for seen in self.answered():
            sent = "streams" if seen.stream else "whole"
            for key in (f"{seen.at_once} at a time", seen.kind, sent, seen.engine, seen.stage):
                answered[key] += 1
                missed[key] += not self._is_exact(seen)
        total, misses = len(self.answered()), len(self.misses())
        reused = sum(seen.reported or 0 for seen in self.answered())
        prompts = sum(seen.prompt for seen in self.answered())
        less = sum(seen.predicted > (seen.reported or 0) for seen in self.misses())
        yield f"exact: {total - misses} of {total}; tokens reused: {reused} of {prompts}"
        yield f"reused less than predicted: {less}; more: {misses - less}"
        yield f"blocks evicted: {self.evicted}"
        yield from (f"  {key}: {count - missed[key]} of {count}" for key, count in answered.items())
        yield f"broken off: {dict(Counter((s.stage, s.broken[:80]) for s in self.seen if s.broken))}"
        yield from (f"missed: {seen}" for seen in self.misses())

    @asynccontextmanager
    async def counting_evictions(self, world: ServerWorld, read_keys: KeyReader) -> AsyncIterator[None]:
        """Counts the blocks that the servers evict meanwhile."""
        ports = [s.event_port + rank for s in world.servers for rank in range(len(world.engines[0]))]
        counters = [asyncio.create_task(count_evictions(port, read_keys, self._evict)) for port in ports]
        try:
            yield
        finally:
            for counter in counters:
                counter.cancel()
            await asyncio.gather(*counters, return_exceptions=True)

    def _evict(self, blocks: int) -> None:
        self.evicted += blocks

    def _is_exact(self, seen: Seen) -> bool:
        return seen.reported is not None and 0 <= seen.reported - seen.predicted < self.within
