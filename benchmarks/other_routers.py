"""Policies of other routers for `kvpin replay`, and kvpin with a term of its rule left out.

The rules have their published constants, as far as a trace of hashes can show them. All of them count their
own requests in flight at once, without the delays between several replicas of a router. If a rule needs a
rate, it gets the true one.

    python benchmarks/other_routers.py TRACE [options of `kvpin replay`]

`--policies` takes more names here: chwbl, sglang, llm-d, dynamo and min-ttft; `all` has them, too. For kvpin
without a term, see placement_sim.py.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil

from hybrid_cache import HybridModel, SimHybridCache
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from engine_adapter.types import Attention, KvGroup, Tier
from proxy.cli import main
from proxy.core.index.blocks import BlockHash, Chain, reusable_tokens
from proxy.core.index.match import Match
from proxy.core.index.prefix_index import PrefixIndex
from proxy.core.placement.decision import Candidate, Placement
from proxy.core.placement.scores import place
from proxy.replay.policy import Counting, Kvpin, Policy, PolicyChoice, SimFleet
from proxy.replay.rules import POLICIES, affinity
from proxy.replay.simulated_engine import SimEngine, found_tokens
from proxy.replay.trace import TraceRequest


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
        foreseen = [foresee(engine, now, request.chain) for engine in engines]
        best = min(range(len(engines)), key=lambda at: (foreseen[at][0], engines[at].cache.held))
        return PolicyChoice(best, foreseen[best][1])


def foresee(engine: SimEngine, now: float, chain: Chain) -> tuple[float, int]:
    """Seconds until the first token of a prompt that came now, and the cached tokens it would find.

    This is the engine's own knowledge; a router only estimates it. It counts what the prompts before it have
    to restore and compute, and what each of them leaves for the next. It leaves out what they evict, and
    streams that begin or end meanwhile.
    """
    seconds, cached, coming, ends = 0.0, 0, set[BlockHash](), set[BlockHash]()
    model, current = engine._model, engine._current  # noqa: SLF001 - it may know all
    rate = model.rates(len(engine._streams), prefilling=True)[0]  # noqa: SLF001 - likewise
    before = [request.chain for request in engine._waiting]  # noqa: SLF001 - likewise
    if current is not None:
        restored_at, left = engine._restored_at, engine._left  # noqa: SLF001 - likewise
        done = rate * max(now - max(engine._last, restored_at), 0.0)  # noqa: SLF001 - likewise
        seconds = max(restored_at - now, 0.0) + max(left - done, 0.0) / rate
        coming.update(current.chain.hashes)
        ends.update(current.chain.hashes[: current.chain.reusable][-1:])
    for each in (*before, chain):
        cached, host = found_tokens(each, *_match(engine, each, coming, ends))
        seconds += host / model.restore_tok_s + model.work(cached, each.n_tokens) / rate
        coming.update(each.hashes)
        ends.update(each.hashes[: each.reusable][-1:])
    return seconds, cached


def _match(engine: SimEngine, chain: Chain, coming: set[BlockHash], ends: set[BlockHash]) -> tuple[int, int]:
    """The match of the engine's cache when blocks in `coming` are on its GPU, and the windows before those in
    `ends` are whole."""
    cache = engine.cache
    if isinstance(cache, SimHybridCache):
        return cache.match(chain, coming, ends)
    gpu = host = 0
    for block in chain.hashes:
        if block in cache._used or block in cache._idle or block in coming:  # noqa: SLF001 - see `foresee`
            gpu += 1
        elif block in cache._host:  # noqa: SLF001 - likewise
            host += 1
        else:
            break
    return gpu, host


# --- kvpin with a term left out, and on hybrid models ---------------------------------------------------
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


class AnyKvpin(Kvpin):
    """kvpin on engines of any model, with one of `TERMS` left out if it is named."""

    def __init__(self, fleet: SimFleet, seed: int, *, without: str | None = None) -> None:
        super().__init__(fleet, seed)
        model, size = fleet.model, fleet.tokens_per_block
        windows = (
            [KvGroup(1 + at, Attention.WINDOW, model.window_tokens) for at in range(model.window_groups)]
            if isinstance(model, HybridModel)
            else []
        )
        self._groups = windows
        for name in self.names:
            for group in windows:
                self._placer.index.add_group(name, group, size, size)
        self._without = without
        self._alter = _CANDIDATES.get(without or "")

    def choose(self, now: float, request: TraceRequest, engines: Sequence[SimEngine]) -> PolicyChoice:
        """The engine that costs least."""
        for name, engine in zip(self.names, engines, strict=False) if self._groups else ():
            self._read_windows(name, engine.cache)
        choice = super().choose(now, request, engines)
        if self._without == "pending":
            self._placer.settled(self._placed[request.id][0])
        return choice

    def place(self, now: float, candidates: list[Candidate], chain: Chain) -> Placement:
        """The decision. An ablation chooses without its term; the full rule then prices the engine it
        chose."""
        placer = self._placer
        if self._without == "congestion":
            altered = place(candidates, chain, replace(placer.outlook(now), strain=1.0))
        elif self._alter is not None:
            altered = placer.place(now, [self._alter(candidate) for candidate in candidates], chain)
        else:
            return placer.place(now, candidates, chain)
        return placer.place(now, [each for each in candidates if each.engine == altered.engine], chain)

    def finished(self, now: float, engine: int, request: TraceRequest) -> None:
        """Its answer has ended."""
        if self._without != "pending":
            super().finished(now, engine, request)
            return
        placed, computed = self._placed.pop(request.id)
        self._placer.end(now, placed, computed)

    def _read_windows(self, name: str, cache: object) -> None:
        """What happened in the window groups of an engine, into the index."""
        assert isinstance(cache, SimHybridCache)  # noqa: S101 - engines of a hybrid model have it
        index = self._placer.index
        for is_new, hashes in cache.windows:
            for group in self._groups:
                (index.store_group if is_new else index.remove_group)(name, group, tuple(hashes))
        cache.windows.clear()


POLICIES |= {
    "kvpin": AnyKvpin,
    "chwbl": BoundedHash,
    "sglang": SglangCacheAware,
    "llm-d": LlmdDefault,
    "dynamo": DynamoLike,
    "min-ttft": MinTtft,
}
ABLATIONS: dict[str, Callable[[SimFleet, int], Policy]] = {
    f"kvpin-no-{term}": partial(AnyKvpin, without=term) for term in TERMS
}

if __name__ == "__main__":
    sys.argv.insert(1, "replay")
    main()
