"""Policies that do not look at caches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil

from xxhash import xxh3_64_intdigest

from proxy.replay.policy import Counting, Policy, PolicyChoice, SimFleet
from proxy.replay.simulated_engine import SimEngine
from proxy.replay.trace import TraceRequest


class RoundRobin(Policy):
    """Each engine in turn."""

    def __init__(self, fleet: SimFleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self._next = 0

    def choose(self, now: float, request: TraceRequest, engines: Sequence[SimEngine]) -> PolicyChoice:
        """The next one."""
        engine, self._next = self._next, (self._next + 1) % self.fleet.engines
        return PolicyChoice(engine)


class LeastLoaded(Counting):
    """The engine with the fewest requests in flight."""

    def choose(self, now: float, request: TraceRequest, engines: Sequence[SimEngine]) -> PolicyChoice:
        """The least busy one."""
        return self.placed(self.least(self.in_flight))


class Sticky(Counting):
    """A session stays where its first request went: to the engine with the fewest requests in flight, of
    several the one with the fewest sessions so far.

    If a trace names no sessions, requests with the same first blocks form one: see `affinity`.
    """

    def __init__(self, fleet: SimFleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self._homes: dict[str, int] = {}
        self._sessions = [0] * fleet.engines

    def choose(self, now: float, request: TraceRequest, engines: Sequence[SimEngine]) -> PolicyChoice:
        """The engine that has the session."""
        key = affinity(request, self.fleet)
        home = self._homes.get(key)
        if home is None:
            home = self._homes[key] = self.least(list(zip(self.in_flight, self._sessions, strict=True)))
            self._sessions[home] += 1
        return self.placed(home)


class BoundedHash(Counting):
    """Consistent hashing with bounded loads, CHWBL: an engine owns the prompts whose beginning hashes to its
    part of a ring. It passes on a request that would bring it over 1.25 times the mean of requests in flight.

    Mirrokni, Thorup, Zadimoghaddam 2016. The constants are KubeAI's defaults (meanLoadFactor 125, replication
    256). KubeAI hashes the beginning of the first user message, which all turns of a session share;
    `affinity` stands for that here.
    """

    LOAD_FACTOR = 1.25
    REPLICATION = 256

    def __init__(self, fleet: SimFleet, seed: int) -> None:
        super().__init__(fleet, seed)
        ring = sorted(
            (xxh3_64_intdigest(f"e{engine}/{copy}".encode(), seed=seed), engine)
            for engine in range(fleet.engines)
            for copy in range(self.REPLICATION)
        )
        self._points = [point for point, _ in ring]
        self._owners = [engine for _, engine in ring]

    def choose(self, now: float, request: TraceRequest, engines: Sequence[SimEngine]) -> PolicyChoice:
        """The first engine on the ring that is below its bound."""
        bound = ceil(self.LOAD_FACTOR * (sum(self.in_flight) + 1) / self.fleet.engines)
        key = affinity(request, self.fleet)
        at = bisect_left(self._points, xxh3_64_intdigest(key.encode()))
        owners = self._owners
        while self.in_flight[owners[at % len(owners)]] >= bound:
            at += 1
        return self.placed(owners[at % len(owners)])


def affinity(request: TraceRequest, fleet: SimFleet) -> str:
    """The key of a conversation: its session, or else the first block that not all requests share. A prompt
    without such a block is a conversation of its own.

    That block stands for the beginning of the first user message. A router knows the system prompt by its
    role; a trace of hashes only shows what all requests have in common.
    """
    if request.session is not None:
        return request.session
    hashes = request.chain.hashes
    if len(hashes) > fleet.common_blocks:
        return str(hashes[fleet.common_blocks])
    return f"request {request.id}"
