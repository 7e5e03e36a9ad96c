"""The interface of placement policies, and kvpin's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, TypeVar

from engine_adapter.types import Tier
from proxy.core.index.blocks import BlockHash, Chain
from proxy.core.placement.decision import Candidate, Placement
from proxy.core.placement.placer import PlacedRequest, Placer
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

    def placed(self, engine: int) -> PolicyChoice:
        """Counts the request as placed there."""
        self.in_flight[engine] += 1
        return PolicyChoice(engine)

    def finished(self, now: float, engine: int, request: TraceRequest) -> None:
        """One request less in flight."""
        self.in_flight[engine] -= 1


class Kvpin(Policy):
    """The proxy's `Placer` on the simulator's clock, with the information that the proxy has."""

    def __init__(self, fleet: SimFleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self._placer = Placer(fleet.tokens_per_block)
        self.names = [f"e{at}" for at in range(fleet.engines)]
        gpu, host = fleet.model.blocks(fleet.tokens_per_block)
        for name in self.names:
            self._placer.add(name, gpu_blocks=gpu, host_blocks=host)
        self._placed: dict[int, tuple[PlacedRequest, int]] = {}  # request → placed, tokens computed

    def choose(self, now: float, request: TraceRequest, engines: Sequence[SimEngine]) -> PolicyChoice:
        """The engine that costs least."""
        placer, chain = self._placer, request.chain
        matches = placer.match(chain)
        last = placer.last_engine(request.session)
        candidates = [
            placer.candidate(now, name, matches.get(name), is_last=name == last) for name in self.names
        ]
        placement = self.place(now, candidates, chain)
        placed = placer.begin(now, placement.engine, placement.work, chain, session=request.session)
        self._placed[request.id] = placed, placement.work.computed
        return PolicyChoice(self.names.index(placement.engine), placement.predicted_tokens)

    def place(self, now: float, candidates: list[Candidate], chain: Chain) -> Placement:
        """The decision."""
        return self._placer.place(now, candidates, chain)

    def first_token(self, now: float, engine: int, request: TraceRequest) -> None:
        """Its answer has begun."""
        self._placer.first_token(now, self._placed[request.id][0])

    def finished(self, now: float, engine: int, request: TraceRequest) -> None:
        """Its answer has ended."""
        placed, computed = self._placed.pop(request.id)
        self._placer.end(now, placed, computed)
        self._placer.settled(placed)

    def stored(self, engine: int, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Into the index."""
        self._placer.index.store(self.names[engine], tier, hashes)

    def removed(self, engine: int, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Out of the index."""
        self._placer.index.remove(self.names[engine], tier, hashes)
