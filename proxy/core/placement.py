"""Placement: the choice of an engine, with its reasons.

Cost in seconds, lowest wins: queue + restore + prefill + interference + regret. Ties go to the engine with
the most free cache, then to the one that served least. Without reuse, the engine with the fewest requests
in flight wins, and of those the one that served least, which alternates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_adapter.hold import Forecast
from proxy.core.blocks import Chain, reusable_tokens
from proxy.core.index import Match
from proxy.core.load import DECODE_INTERFERENCE_S, LoadView

# Learned rates of equal engines differ by noise: costs this close are equal, else one engine would get
# every new prompt and evict, while its neighbour stays empty.
TIE = 1.15
# What a prompt evicts now is only the beginning: its next turns bring about as much again, each. A shared
# system prompt would otherwise draw every conversation to one full engine past an empty one.
EVICTION_PRICE = 4.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of one engine when a request is placed.

    Attributes:
        engine: its id.
        tokens_per_block: its own block size in tokens, which bounds what it can reuse.
        match: leading blocks of the chain it holds.
        load: its work in flight.
        prefill_tok_s: prompt tokens it computes per second.
        restore_tok_s: tokens it restores from its host tier per second.
        free_blocks: blocks of its GPU tier that hold nothing, None where unknown.
        served: requests it has been given so far.
        forecast: what its own adapter foresees, where that follows the engine's cache token by token; it
            stands in place of what would follow from `match` and the rates.
        complete: False when the engine may hold blocks that nothing told of.
    """

    engine: str
    tokens_per_block: int
    match: Match
    load: LoadView
    prefill_tok_s: float
    restore_tok_s: float
    free_blocks: int | None = None
    served: int = 0
    forecast: Forecast | None = None
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Cost:
    """Why an engine would answer when: each term in seconds, and the cached tokens it would reuse."""

    engine: str
    queue_s: float
    restore_s: float
    prefill_s: float
    interference_s: float
    regret_s: float
    cached_tokens: int
    in_flight: int

    @property
    def total_s(self) -> float:
        """Expected time to the first token, and what it costs those that come after."""
        return self.queue_s + self.restore_s + self.prefill_s + self.interference_s + self.regret_s


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision: the engine, the cached tokens it is expected to report, and the cost of every candidate.

    `firm` is False when the prediction rests on what requests in flight have yet to leave behind, or the
    engine may hold more than is known. `gpu_tokens` are those of the prediction that need no lower tier.
    """

    engine: str
    predicted_tokens: int
    n_tokens: int
    costs: tuple[Cost, ...]
    rule: str
    firm: bool = True
    gpu_tokens: int = 0

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens the engine has to compute."""
        return self.n_tokens - self.predicted_tokens


def predict(chain: Chain, match: Match, tokens_per_block: int) -> int:
    """Cached tokens an engine of that block size will report for the chain."""
    held = match.blocks * chain.tokens_per_block // tokens_per_block * tokens_per_block
    return min(held, reusable_tokens(chain.n_tokens, tokens_per_block))


def cost_of(candidate: Candidate, chain: Chain) -> Cost:
    """The terms of the cost rule for one engine."""
    if candidate.forecast is not None:
        return _foreseen(candidate, candidate.forecast)
    cached = predict(chain, candidate.match, candidate.tokens_per_block)
    uncached = chain.n_tokens - cached
    free = candidate.free_blocks * chain.tokens_per_block if candidate.free_blocks is not None else uncached
    below_gpu = (candidate.match.host + candidate.match.disk) * chain.tokens_per_block
    return Cost(
        engine=candidate.engine,
        queue_s=candidate.load.prefill_tokens / candidate.prefill_tok_s,
        restore_s=min(below_gpu, cached) / candidate.restore_tok_s,
        prefill_s=uncached / candidate.prefill_tok_s,
        interference_s=candidate.load.decoding * DECODE_INTERFERENCE_S,
        regret_s=EVICTION_PRICE * max(uncached - free, 0) / candidate.prefill_tok_s,
        cached_tokens=cached,
        in_flight=candidate.load.in_flight,
    )


def _foreseen(candidate: Candidate, forecast: Forecast) -> Cost:
    return Cost(
        engine=candidate.engine,
        queue_s=forecast.wait_s,
        restore_s=forecast.restore_s,
        prefill_s=forecast.prefill_s,
        interference_s=forecast.interference_s,
        regret_s=forecast.regret_s,
        cached_tokens=forecast.cached_tokens,
        in_flight=candidate.load.in_flight,
    )


def place(candidates: Sequence[Candidate], chain: Chain) -> Placement:
    """The engine that will answer first. `candidates` is not empty."""
    costs = tuple(cost_of(candidate, chain) for candidate in candidates)
    cheapest = min(costs, key=lambda cost: cost.total_s)
    ties = [
        i
        for i, cost in enumerate(costs)
        if cost.total_s <= cheapest.total_s * TIE and cost.cached_tokens >= cheapest.cached_tokens
    ]
    best = min(
        ties,
        key=lambda i: (-costs[i].cached_tokens, -(candidates[i].free_blocks or 0), candidates[i].served, i),
    )
    return Placement(
        engine=costs[best].engine,
        predicted_tokens=costs[best].cached_tokens,
        n_tokens=chain.n_tokens,
        costs=costs,
        rule="lowest cost",
        firm=_is_firm(candidates[best]),
        gpu_tokens=_on_gpu(candidates[best], costs[best], chain),
    )


def _on_gpu(candidate: Candidate, cost: Cost, chain: Chain) -> int:
    """Tokens of the prediction that need no lower tier."""
    if candidate.forecast is not None:
        return cost.cached_tokens
    return predict(chain, Match(gpu=candidate.match.lead), candidate.tokens_per_block)


def _is_firm(candidate: Candidate) -> bool:
    if candidate.forecast is not None:
        return candidate.forecast.firm
    return candidate.complete and candidate.match.pending == 0


def place_least_loaded(candidates: Sequence[Candidate], n_tokens: int = 0) -> Placement:
    """The engine with the fewest requests in flight; nothing of its cache is considered.

    For requests whose prompt is not known (reuse off, embeddings, audio). `candidates` is not empty.
    """
    best = min(range(len(candidates)), key=lambda i: (candidates[i].load.in_flight, candidates[i].served, i))
    costs = tuple(Cost(c.engine, 0.0, 0.0, 0.0, 0.0, 0.0, 0, c.load.in_flight) for c in candidates)
    return Placement(candidates[best].engine, 0, n_tokens, costs, "least loaded")
