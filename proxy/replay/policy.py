"""The interface of placement policies, and state that several of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, TypeVar

from engine_adapter.types import Tier
from proxy.core.index.blocks import BlockHash, Chain, reusable_tokens
from proxy.core.index.match import Match
from proxy.core.index.prefix_index import PrefixIndex
from proxy.replay.simulated_engine import EngineModel, Listener, SimEngine
from proxy.replay.trace import TraceRequest

# A number, or two where the second decides among equals of the first.
Cost = TypeVar("Cost", float, tuple[int, int])


class PolicyChoice(NamedTuple):
    """The position of the engine that a request goes to, and its predicted cached tokens; None if the policy
    predicts none."""

    engine: int
    predicted_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SimFleet:
    """The engines of a run, which are all equal. `common_blocks`: leading blocks that all requests of the
    trace share."""

    engines: int
    model: EngineModel
    tokens_per_block: int
    common_blocks: int = 0


class Policy(Listener, ABC):
    """Chooses an engine for each request. Like a router, it gets the events that follow.

    Ties are broken at random, by the seed.
    """

    def __init__(self, fleet: SimFleet, seed: int) -> None:
        self.fleet = fleet
        self.random = Random(seed)  # noqa: S311 - a simulation

    @abstractmethod
    def choose(self, now: float, request: TraceRequest, engines: Sequence[SimEngine]) -> PolicyChoice:
        """Chooses the engine, and counts the request as placed there.

        `engines` know what a router does not: for policies that are a limit.
        """

    def least(self, costs: Sequence[Cost]) -> int:
        """The position of the lowest cost."""
        low = min(costs)
        ties = [at for at, cost in enumerate(costs) if cost == low]
        return ties[0] if len(ties) == 1 else self.random.choice(ties)


class Counting(Policy):
    """Counts the requests in flight of each engine."""

    def __init__(self, fleet: SimFleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self.in_flight = [0] * fleet.engines

    def placed(self, engine: int, predicted_tokens: int | None = None) -> PolicyChoice:
        """Counts the request as placed there."""
        self.in_flight[engine] += 1
        return PolicyChoice(engine, predicted_tokens)

    def finished(self, now: float, engine: int, request: TraceRequest) -> None:
        """One request less in flight."""
        self.in_flight[engine] -= 1


class Seeing(Policy):
    """Knows what each engine holds, by its KV events."""

    def __init__(self, fleet: SimFleet, seed: int) -> None:
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
        return [found.get(name, Match()) for name in self.names]


def cached_tokens(chain: Chain, match: Match) -> int:
    """Tokens of a chain that an engine with this match does not compute."""
    size = chain.tokens_per_block
    return min(match.blocks * size, reusable_tokens(chain.n_tokens, size))
