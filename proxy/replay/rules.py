"""The policies by the names users give them: simple ones, and the rules of other routers."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import ceil

from xxhash import xxh3_64_intdigest

from proxy.core.index.blocks import BlockHash, Chain
from proxy.core.index.match import Match
from proxy.replay.policy import TERMS, Counting, Kvpin, Policy, PolicyChoice, Seeing, SimFleet, cached_tokens
from proxy.replay.simulated_engine import SimEngine
from proxy.replay.trace import TraceRequest

# --- policies that do not look at caches ----------------------------------------------------------------


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


# --- other routers --------------------------------------------------------------------------------------
# The rules of other routers with their published constants, as far as a trace of hashes can show them.
# All of them count their own requests in flight at once, without the delays between several replicas of a
# router. If a rule needs a rate, it gets the true one.


class SglangCacheAware(Counting):
    """SGLang's router (sglang-router, SMG): policy `cache_aware`.

    If requests in flight differ by more than 64 and 1.5 times, it chooses the least loaded engine. Otherwise
    it chooses an engine that was sent the longest match of its tree of prompts, if that is more than 0.3 of
    the prompt, else the least loaded. The tree knows what was sent where, but does not see evictions.
    Each engine's part of it is cut to 2^26 characters every 120 s, least recently used first.

    If its description and its code differ, or leave a choice, the better reading is played. In release 0.3.2,
    a prompt that matches too little goes to the smallest tree by the description, and by the code to the
    first of the least loaded; here it goes to the least loaded, of several to the smallest tree. Of the
    engines that were sent the longest match, the code takes the first; here one is drawn.
    """

    CACHE_THRESHOLD = 0.3
    BALANCE_ABS = 64
    BALANCE_REL = 1.5
    MAX_TREE_CHARS = 1 << 26
    EVICTION_INTERVAL_S = 120.0
    CHARS_PER_TOKEN = 4

    def __init__(self, fleet: SimFleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self._trees = [OrderedDict[BlockHash, None]() for _ in range(fleet.engines)]
        self._holders: dict[BlockHash, set[int]] = {}  # block → in whose trees it is
        self._max_blocks = self.MAX_TREE_CHARS // (self.CHARS_PER_TOKEN * fleet.tokens_per_block)
        self._evict_at = self.EVICTION_INTERVAL_S

    def choose(self, now: float, request: TraceRequest, engines: Sequence[SimEngine]) -> PolicyChoice:
        """Chooses by load or by its tree of prompts."""
        if now >= self._evict_at:
            self._evict(now)
        most, fewest = max(self.in_flight), min(self.in_flight)
        engine = None
        if not (most - fewest > self.BALANCE_ABS and most > self.BALANCE_REL * fewest):
            engine = self._holder(request)
        if engine is None:
            sizes = (len(tree) for tree in self._trees)
            engine = self.least(list(zip(self.in_flight, sizes, strict=True)))
        self._insert(engine, request.chain.hashes)
        return self.placed(engine)

    def _holder(self, request: TraceRequest) -> int | None:
        """An engine that was sent the deepest matching node of the tree; None if the match is too short."""
        hashes, holders = request.chain.hashes, self._holders
        matched = bisect_left(range(len(hashes)), True, key=lambda at: hashes[at] not in holders)
        if matched * request.chain.tokens_per_block <= self.CACHE_THRESHOLD * request.n_tokens:
            return None
        return self.random.choice(sorted(holders[hashes[matched - 1]]))

    def _insert(self, engine: int, hashes: Sequence[BlockHash]) -> None:
        tree, holders = self._trees[engine], self._holders
        for block in reversed(hashes):
            tree[block] = None
            tree.move_to_end(block)
            holders.setdefault(block, set()).add(engine)

    def _evict(self, now: float) -> None:
        self._evict_at = now + self.EVICTION_INTERVAL_S
        for engine, tree in enumerate(self._trees):
            for _ in range(len(tree) - self._max_blocks):
                block, _ = tree.popitem(last=False)
                holders = self._holders[block]
                holders.remove(engine)
                if not holders:
                    del self._holders[block]


class LlmdDefault(Seeing):
    """llm-d's router: `prefix-cache-affinity-filter`, then `token-load-scorer`.

    It keeps engines whose match scores at least 0.8 of the prompt, unless their tokens in flight take 18 s
    longer than those of the best other engine. Of those kept, it chooses the one with the fewest uncached
    tokens in flight, this prompt's included. A token on the GPU scores 1, a token in host memory 0.8. Here it
    gets the exact index with placements in flight, which is more than its defaults know.
    """

    HOST_WEIGHT = 0.8
    MIN_MATCH = 0.8
    MAX_TTFT_PENALTY_S = 18.0

    def __init__(self, fleet: SimFleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self._tokens = [0.0] * fleet.engines
        self._placed: dict[int, float] = {}

    def choose(self, now: float, request: TraceRequest, engines: Sequence[SimEngine]) -> PolicyChoice:
        """The least loaded of those kept."""
        chain = request.chain
        matches = self.matches(chain)
        scores = [self._score(chain, match) for match in matches]
        uncached = [chain.n_tokens - score for score in scores]
        kept = [at for at, score in enumerate(scores) if score >= self.MIN_MATCH * chain.n_tokens]
        others = [at for at in range(self.fleet.engines) if at not in kept]
        if kept and others:
            apart = min(self._tokens[at] for at in kept) - min(self._tokens[at] for at in others)
            if apart > self.MAX_TTFT_PENALTY_S * self.fleet.model.prefill_tok_s:
                kept = []
        among = kept or range(self.fleet.engines)
        engine = among[self.least([self._tokens[at] + uncached[at] for at in among])]
        self._tokens[engine] += uncached[engine]
        self._placed[request.id] = uncached[engine]
        self.index.add_pending(self.names[engine], chain.hashes)
        return PolicyChoice(engine, cached_tokens(chain, matches[engine]))

    def first_token(self, now: float, engine: int, request: TraceRequest) -> None:
        """Its prompt is computed."""
        self._tokens[engine] -= self._placed.pop(request.id)
        self.index.end_pending(self.names[engine], request.chain.hashes)

    def _score(self, chain: Chain, match: Match) -> float:
        """Cached tokens, with their weight for those in host memory."""
        cached = cached_tokens(chain, match)
        below = min((match.host + match.disk) * chain.tokens_per_block, cached)
        return cached - (1 - self.HOST_WEIGHT) * below


class DynamoLike(Seeing):
    """Dynamo's KV router: the lowest sum of blocks to prefill, in flight and uncached of this prompt, and
    blocks of KV in use. Credits are 1 for blocks on the GPU, 0.75 in host memory, 0.25 on disk; the
    temperature is 0."""

    HOST_CREDIT = 0.75
    DISK_CREDIT = 0.25

    def __init__(self, fleet: SimFleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self._prefill = [0.0] * fleet.engines  # tokens
        self._placed: dict[int, float] = {}
        self._active: list[dict[BlockHash, int]] = [{} for _ in range(fleet.engines)]  # block → users

    def choose(self, now: float, request: TraceRequest, engines: Sequence[SimEngine]) -> PolicyChoice:
        """The lowest sum of blocks."""
        chain = request.chain
        matches = self.matches(chain)
        prefill = [
            max(tokens + chain.n_tokens - self._credit(match) * chain.tokens_per_block, 0.0)
            for tokens, match in zip(self._prefill, matches, strict=True)
        ]
        engine = self.least(
            [
                tokens / chain.tokens_per_block + self._in_use(at, chain.hashes)
                for at, tokens in enumerate(prefill)
            ]
        )
        own = prefill[engine] - self._prefill[engine]
        self._prefill[engine] += own
        self._placed[request.id] = own
        active = self._active[engine]
        for block in chain.hashes:
            active[block] = active.get(block, 0) + 1
        return PolicyChoice(engine, cached_tokens(chain, matches[engine]))

    def first_token(self, now: float, engine: int, request: TraceRequest) -> None:
        """Its prompt is computed."""
        self._prefill[engine] -= self._placed.pop(request.id)

    def finished(self, now: float, engine: int, request: TraceRequest) -> None:
        """Its blocks are no longer in use."""
        active = self._active[engine]
        for block in request.chain.hashes:
            active[block] -= 1
            if not active[block]:
                del active[block]

    def _credit(self, match: Match) -> float:
        return match.gpu + self.HOST_CREDIT * match.host + self.DISK_CREDIT * match.disk

    def _in_use(self, engine: int, hashes: Sequence[BlockHash]) -> int:
        """Blocks in use if the prompt came to the engine. The blocks it shares are its first ones."""
        active = self._active[engine]
        shared = bisect_left(range(len(hashes)), True, key=lambda at: hashes[at] not in active)
        return len(active) + len(hashes) - shared


class MinTtft(Policy):
    """The engine that answers first, as the engines themselves foresee it: with the requests that wait there
    and the blocks those will leave. Ties go to the engine that holds least. This is the best that a rule
    without regard for other requests can reach."""

    def choose(self, now: float, request: TraceRequest, engines: Sequence[SimEngine]) -> PolicyChoice:
        """The lowest time to the first token."""
        foreseen = [engine.foresee(now, request.chain) for engine in engines]
        best = min(range(len(engines)), key=lambda at: (foreseen[at][0], engines[at].held))
        return PolicyChoice(best, foreseen[best][1])


# --- the policies by the names users give them ----------------------------------------------------------

# An upper bound: one cache that all engines share. It has hits and no times.
ORACLE = "oracle"

POLICIES: dict[str, Callable[[SimFleet, int], Policy]] = {
    "kvpin": Kvpin,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "sticky": Sticky,
    "chwbl": BoundedHash,
    "sglang": SglangCacheAware,
    "llm-d": LlmdDefault,
    "dynamo": DynamoLike,
    "min-ttft": MinTtft,
}
ABLATIONS: dict[str, Callable[[SimFleet, int], Policy]] = {
    f"kvpin-no-{term}": partial(Kvpin, without=term) for term in TERMS
}
# Names that stand for several policies.
GROUPS: dict[str, tuple[str, ...]] = {
    "all": (*POLICIES, ORACLE),
    "ablations": ("kvpin", *ABLATIONS),
}
NAMES = (*POLICIES, *ABLATIONS, ORACLE)


class UnknownPolicy(ValueError):
    """There is no policy of that name; the message lists the names."""


def resolve(names: Iterable[str]) -> tuple[str, ...]:
    """Names with groups spelled out, each once, in the order given. Raises UnknownPolicy if a name is
    unknown."""
    resolved: dict[str, None] = {}
    for name in names:
        if name not in GROUPS and name not in NAMES:
            known = ", ".join((*GROUPS, *NAMES))
            raise UnknownPolicy(f"there is no policy {name!r}; there are {known}")
        resolved.update(dict.fromkeys(GROUPS.get(name, (name,))))
    return tuple(resolved)


def make(name: str, fleet: SimFleet, seed: int) -> Policy:
    """A policy by its name, other than the oracle."""
    return {**POLICIES, **ABLATIONS}[name](fleet, seed)
