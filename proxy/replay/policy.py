"""The interface of placement policies, and state that several of them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol, TypeVar

from engine_adapter.types import Tier
from proxy.core.index.blocks import BlockHash, Chain, reusable_tokens
from proxy.core.index.prefix_index import Match, PrefixIndex
from proxy.replay.engine import EngineModel
from proxy.replay.trace import Request

NOTHING = Match()
# A number, or two where the second decides among equals of the first.
Cost = TypeVar("Cost", float, tuple[int, int])


class Choice(NamedTuple):
    """The position of the engine that a request goes to, and its predicted cached tokens; None if the policy
    predicts none."""

    engine: int
    predicted_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of a run, which are all equal.

    Attributes:
        engines: how many.
        model: what each of them can do.
        tokens_per_block: of the trace.
        common_blocks: leading blocks that all requests of the trace share.
    """

    engines: int
    model: EngineModel
    tokens_per_block: int
    common_blocks: int = 0


class EngineTruth(Protocol):
    """Facts that only the engine itself knows. Real routers do not know them; a policy that is a limit may
    use them."""

    @property
    def held(self) -> int:
        """Blocks on its GPU."""
        ...

    def foresee(self, now: float, chain: Chain) -> tuple[float, int]:
        """Seconds until the first token of a prompt that came now, and the cached tokens it would find."""
        ...


class Policy(Protocol):
    """Chooses an engine for each request. Like a router, it gets the events that follow."""

    def choose(self, now: float, request: Request, engines: Sequence[EngineTruth]) -> Choice:
        """Chooses the engine, and counts the request as placed there."""
        ...

    def first_token(self, now: float, engine: int, request: Request) -> None:
        """Its answer has begun."""
        ...

    def finished(self, now: float, engine: int, request: Request) -> None:
        """Its answer has ended."""
        ...

    def stored(self, engine: int, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """KV event: these blocks lie on a tier of the engine."""
        ...

    def removed(self, engine: int, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """KV event: these blocks left a tier of the engine."""
        ...


class Blind:
    """A policy that ignores all events. Ties are broken at random, by the seed."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.random = Random(seed)  # noqa: S311 - a simulation

    def first_token(self, now: float, engine: int, request: Request) -> None:
        """Ignored."""

    def finished(self, now: float, engine: int, request: Request) -> None:
        """Ignored."""

    def stored(self, engine: int, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Ignored."""

    def removed(self, engine: int, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Ignored."""

    def least(self, costs: Sequence[Cost]) -> int:
        """The position of the lowest cost."""
        low = min(costs)
        ties = [at for at, cost in enumerate(costs) if cost == low]
        return ties[0] if len(ties) == 1 else self.random.choice(ties)


class Counting(Blind):
    """Counts the requests in flight of each engine."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self.in_flight = [0] * fleet.engines

    def placed(self, engine: int, predicted_tokens: int | None = None) -> Choice:
        """Counts the request as placed there."""
        self.in_flight[engine] += 1
        return Choice(engine, predicted_tokens)

    def finished(self, now: float, engine: int, request: Request) -> None:
        """One request less in flight."""
        self.in_flight[engine] -= 1


class Seeing(Blind):
    """Knows what each engine holds, by its KV events."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self.index = PrefixIndex()
        self.names = [f"e{at}" for at in range(fleet.engines)]
        for name in self.names:
            self.index.add_engine(name)

    def stored(self, engine: int, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Into the index."""
        self.index.store(self.names[engine], tier, hashes)

    def removed(self, engine: int, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Out of the index."""
        self.index.remove(self.names[engine], tier, hashes)

    def matches(self, chain: Chain) -> list[Match]:
        """The match of a prompt on each engine."""
        found = self.index.match(chain.hashes)
        return [found.get(name, NOTHING) for name in self.names]


def cached_tokens(chain: Chain, match: Match) -> int:
    """Tokens of a chain that an engine with this match does not compute."""
    size = chain.tokens_per_block
    return min(match.blocks * size, reusable_tokens(chain.n_tokens, size))
