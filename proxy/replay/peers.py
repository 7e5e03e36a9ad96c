"""The rules of other routers, with the constants they publish, as far as a trace of hashes lets them show.

All of them count their own requests in flight at once, without the delays that several replicas of a router
have. Where a rule needs a rate, it is given the true one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from engine_adapter.types import Tier
from proxy.core.blocks import BlockHash
from proxy.core.index import Match
from proxy.replay.policy import Choice, Counting, EngineTruth, Fleet, Seeing, cached_tokens
from proxy.replay.trace import Request


class SglangCacheAware(Counting):
    """SGLang's router (sglang-router, SMG): policy `cache_aware`.

    When requests in flight differ by more than 64 and 1.5 times, the least loaded engine. Otherwise the one
    that its tree of prompts names for the longest match, if that is more than 0.3 of the prompt, else the
    least loaded. The tree knows what was sent where, nothing of what was evicted; each engine's part of it is
    cut back to 2^26 characters, least recently used first, every 120 s. Of equally loaded engines it always
    takes the first; here it is one at random, which serves it better.
    """

    CACHE_THRESHOLD = 0.3
    BALANCE_ABS = 64
    BALANCE_REL = 1.5
    MAX_TREE_CHARS = 1 << 26
    EVICTION_INTERVAL_S = 120.0
    CHARS_PER_TOKEN = 4

    def __init__(self, fleet: Fleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self._trees = [OrderedDict[BlockHash, None]() for _ in range(fleet.engines)]
        self._latest: dict[BlockHash, int] = {}  # block → whom it was last sent to
        self._max_blocks = self.MAX_TREE_CHARS // (self.CHARS_PER_TOKEN * fleet.tokens_per_block)
        self._evict_at = self.EVICTION_INTERVAL_S

    def choose(self, now: float, request: Request, engines: Sequence[EngineTruth]) -> Choice:
        """By load or by its tree."""
        if now >= self._evict_at:
            self._evict(now)
        most, fewest = max(self.in_flight), min(self.in_flight)
        engine = None
        if not (most - fewest > self.BALANCE_ABS and most > self.BALANCE_REL * fewest):
            engine = self._holder(request)
        if engine is None:
            engine = self.least(self.in_flight)
        self._insert(engine, request.chain.hashes)
        return self.placed(engine)

    def _holder(self, request: Request) -> int | None:
        """Who the deepest node of the tree that matches was last sent to; None where that is too little."""
        hashes, latest = request.chain.hashes, self._latest
        matched = bisect_left(range(len(hashes)), True, key=lambda at: hashes[at] not in latest)
        if matched * request.chain.tokens_per_block <= self.CACHE_THRESHOLD * request.n_tokens:
            return None
        return latest[hashes[matched - 1]]

    def _insert(self, engine: int, hashes: Sequence[BlockHash]) -> None:
        tree, latest = self._trees[engine], self._latest
        for block in reversed(hashes):
            tree[block] = None
            tree.move_to_end(block)
            latest[block] = engine

    def _evict(self, now: float) -> None:
        self._evict_at = now + self.EVICTION_INTERVAL_S
        for engine, tree in enumerate(self._trees):
            for _ in range(len(tree) - self._max_blocks):
                block, _ = tree.popitem(last=False)
                if self._latest[block] == engine:
                    others = [at for at, other in enumerate(self._trees) if block in other]
                    if others:
                        self._latest[block] = others[0]
                    else:
                        del self._latest[block]


class LlmdDefault(Seeing):
    """llm-d's router: `prefix-cache-affinity-filter`, then `token-load-scorer`.

    Engines that hold 0.8 of the prompt or more are kept, unless their tokens in flight stand for 18 s more
    than the best other's; of those kept, the one with the fewest uncached tokens in flight, this prompt's
    included. It is given the exact index, with placements in flight, which is more than its defaults know.
    """

    MIN_MATCH = 0.8
    MAX_TTFT_PENALTY_S = 18.0

    def __init__(self, fleet: Fleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self._tokens = [0] * fleet.engines
        self._placed: dict[int, int] = {}

    def choose(self, now: float, request: Request, engines: Sequence[EngineTruth]) -> Choice:
        """The least loaded of those kept."""
        cached = [cached_tokens(request.chain, match) for match in self.matches(request.chain)]
        uncached = [request.n_tokens - tokens for tokens in cached]
        kept = [at for at, tokens in enumerate(cached) if tokens >= self.MIN_MATCH * request.n_tokens]
        others = [at for at in range(self.fleet.engines) if at not in kept]
        if kept and others:
            apart = min(self._tokens[at] for at in kept) - min(self._tokens[at] for at in others)
            if apart > self.MAX_TTFT_PENALTY_S * self.fleet.model.prefill_tok_s:
                kept = []
        among = kept or range(self.fleet.engines)
        engine = among[self.least([self._tokens[at] + uncached[at] for at in among])]
        self._tokens[engine] += uncached[engine]
        self._placed[request.id] = uncached[engine]
        self.index.add_pending(self.names[engine], request.chain.hashes)
        return Choice(engine, cached[engine])

    def first_token(self, now: float, engine: int, request: Request) -> None:
        """Its prompt is computed."""
        self._tokens[engine] -= self._placed.pop(request.id)
        self.index.end_pending(self.names[engine], request.chain.hashes)


class DynamoLike(Seeing):
    """Dynamo's KV router: blocks of prefill, in flight and of this prompt beyond what is cached, plus blocks
    of KV in use; credits 1 for blocks on the GPU, 0.75 in host memory, 0.25 on disk; temperature 0."""

    HOST_CREDIT = 0.75
    DISK_CREDIT = 0.25

    def __init__(self, fleet: Fleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self._prefill = [0.0] * fleet.engines  # tokens
        self._placed: dict[int, float] = {}
        self._active: list[dict[BlockHash, int]] = [{} for _ in range(fleet.engines)]  # block → users

    def choose(self, now: float, request: Request, engines: Sequence[EngineTruth]) -> Choice:
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
        return Choice(engine, cached_tokens(chain, matches[engine]))

    def first_token(self, now: float, engine: int, request: Request) -> None:
        """Its prompt is computed."""
        self._prefill[engine] -= self._placed.pop(request.id)

    def finished(self, now: float, engine: int, request: Request) -> None:
        """Its blocks are in use no longer."""
        active = self._active[engine]
        for block in request.chain.hashes:
            active[block] -= 1
            if not active[block]:
                del active[block]

    def _credit(self, match: Match) -> float:
        return match.gpu + self.HOST_CREDIT * match.host + self.DISK_CREDIT * match.disk

    def _in_use(self, engine: int, hashes: Sequence[BlockHash]) -> int:
        """Blocks in use if the prompt came to the engine. Those it shares are the first of it."""
        active = self._active[engine]
        shared = bisect_left(range(len(hashes)), True, key=lambda at: hashes[at] not in active)
        return len(active) + len(hashes) - shared


class MinTtft(Seeing):
    """The engine that answers first, by the true state of its queue and an exact index; ties go to the engine
    that holds least. What a rule without a thought for others can reach at best."""

    def choose(self, now: float, request: Request, engines: Sequence[EngineTruth]) -> Choice:
        """The lowest time to the first token."""
        model, chain = self.fleet.model, request.chain
        cached, times = [], []
        for match, engine in zip(self.matches(chain), engines, strict=True):
            tokens = cached_tokens(chain, match)
            cached.append(tokens)
            restore_s = match.host * chain.tokens_per_block / model.restore_tok_s
            times.append(engine.queue_s(now) + restore_s + model.prefill_s(tokens, chain.n_tokens))
        best = min(range(len(times)), key=lambda at: (times[at], self.index.held(self.names[at], Tier.GPU)))
        return Choice(best, cached[best])
