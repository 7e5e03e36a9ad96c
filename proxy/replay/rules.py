"""The policies by the names users give them.

Those of other routers, and kvpin with a term left out, are in `benchmarks/other_routers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from proxy.replay.policy import Counting, Kvpin, Policy, PolicyChoice, SimFleet
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


# An upper bound: one cache that all engines share. It has hits and no times.
ORACLE = "oracle"

# Those with times, by their names.
POLICIES: dict[str, Callable[[SimFleet, int], Policy]] = {
    "kvpin": Kvpin,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "sticky": Sticky,
}


def resolve(names: Iterable[str]) -> tuple[str, ...]:
    """Names, each once, in the order given; `all` stands for all. Raises ValueError with
    all names if one is unknown."""
    every = (*POLICIES, ORACLE)
    resolved: dict[str, None] = {}
    for name in names:
        if name not in ("all", *every):
            raise ValueError(f"there is no policy {name!r}; there are all, {', '.join(every)}")
        resolved.update(dict.fromkeys(every if name == "all" else (name,)))
    return tuple(resolved)
