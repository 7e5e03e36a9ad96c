"""The interface of placement policies, state that several of them share, and kvpin's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from engine_adapter.types import Attention, KvGroup, Tier
from proxy.core.index.blocks import BlockHash, Chain, reusable_tokens
from proxy.core.index.match import Match
from proxy.core.index.prefix_index import PrefixIndex
from proxy.core.placement.decision import Candidate, Placement
from proxy.core.placement.placer import PlacedRequest, Placer
from proxy.core.placement.scores import place
from proxy.replay.simulated_engine import EngineModel, Listener, SimEngine
from proxy.replay.trace import TraceRequest

# --- the interface of placement policies, and state that several of them share --------------------------

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


# --- kvpin ----------------------------------------------------------------------------------------------
# kvpin's own placement: the functions that the proxy runs, with the information that the proxy has.
#
# An ablation leaves one term out of the comparison of candidates. Everything else, ledgers and learned rates
# included, follows the full rule for the engine that the ablation chose.


def _without_restore(candidate: Candidate) -> Candidate:
    """Blocks on lower tiers count as on the GPU."""
    match = candidate.match
    if not match.host and not match.disk:
        return candidate
    return replace(candidate, match=Match(match.gpu + match.host + match.disk, pending=match.pending))


# Term → the candidate without it.
_CANDIDATES: Mapping[str, Callable[[Candidate], Candidate]] = {
    "queue": lambda candidate: replace(candidate, load=replace(candidate.load, queue_s=0.0)),
    "room": lambda candidate: replace(candidate, in_use=None),
    "restore": _without_restore,
    "interference": lambda candidate: replace(candidate, load=replace(candidate.load, decoding=0)),
    "lost": lambda candidate: replace(candidate, residents=None, on_gpu=None),
    "later": lambda candidate: replace(candidate, busy=0.0),
    "again": lambda candidate: replace(candidate, match=replace(candidate.match, cut=0)),
}
# Terms that can be left out. `congestion` is the division by 1 - utilisation; `pending` are the blocks that
# requests in flight will leave.
TERMS = (*_CANDIDATES, "congestion", "pending")


class Kvpin(Seeing):
    """The proxy's `Placer` on the simulator's clock."""

    def __init__(self, fleet: SimFleet, seed: int, *, without: str | None = None) -> None:
        """`without` is one of `TERMS`."""
        super().__init__(fleet, seed)
        self._placer = Placer(fleet.tokens_per_block)
        self.index = self._placer.index
        model, size = fleet.model, fleet.tokens_per_block
        self._groups = [
            KvGroup(1 + at, Attention.WINDOW, model.window_tokens) for at in range(model.window_groups)
        ]
        for name in self.names:
            gpu_blocks = model.gpu_tokens // size * (1 + model.window_groups)
            self._placer.add(name, gpu_blocks=gpu_blocks, host_blocks=model.host_tokens // size)
            for group in self._groups:
                self.index.add_group(name, group, size, size)
        self._without = without
        self._alter = _CANDIDATES.get(without or "")
        self._placed: dict[int, tuple[PlacedRequest, int]] = {}  # request → placed, tokens computed

    def choose(self, now: float, request: TraceRequest, engines: Sequence[SimEngine]) -> PolicyChoice:
        """The engine that costs least."""
        placer, chain = self._placer, request.chain
        matches = placer.match(chain)
        last = placer.last_engine(request.session)
        candidates = [
            placer.candidate(now, name, matches.get(name), is_last=name == last) for name in self.names
        ]
        placement = self._place(now, candidates, chain)
        at = self.names.index(placement.engine)
        placed = placer.begin(now, placement.engine, placement.work, chain, session=request.session)
        if self._without == "pending":
            placer.settled(placed)
        self._placed[request.id] = placed, placement.work.computed
        return PolicyChoice(at, placement.predicted_tokens)

    def first_token(self, now: float, engine: int, request: TraceRequest) -> None:
        """Its answer has begun."""
        self._placer.first_token(now, self._placed[request.id][0])

    def finished(self, now: float, engine: int, request: TraceRequest) -> None:
        """Its answer has ended."""
        placed, computed = self._placed.pop(request.id)
        self._placer.end(now, placed, computed)
        if self._without != "pending":
            self._placer.settled(placed)

    def window_stored(self, engine: int, hashes: Sequence[BlockHash]) -> None:
        """Into the index."""
        for group in self._groups:
            self.index.store_group(self.names[engine], group, tuple(hashes))

    def window_removed(self, engine: int, hashes: Sequence[BlockHash]) -> None:
        """Out of the index."""
        for group in self._groups:
            self.index.remove_group(self.names[engine], group, tuple(hashes))

    def _place(self, now: float, candidates: list[Candidate], chain: Chain) -> Placement:
        """The decision. An ablation chooses without its term; the full rule then prices the engine it
        chose."""
        placer = self._placer
        if self._without == "congestion":
            calm = replace(placer.outlook(now), strain=1.0)
            altered = place(candidates, chain, calm)
        elif self._alter is not None:
            altered = placer.place(now, [self._alter(candidate) for candidate in candidates], chain)
        else:
            return placer.place(now, candidates, chain)
        return placer.place(now, [each for each in candidates if each.engine == altered.engine], chain)
