"""A placement in data: what is known of each engine, what each one costs, and which one was chosen.

`scores.py` computes the costs and chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import msgspec

from engine_adapter.hold import Forecast
from engine_adapter.types import Attention
from proxy.core.index.match import Match
from proxy.core.placement.demand import InUse, Residents
from proxy.core.placement.load import IDLE, LoadView, Work
from proxy.core.placement.rates import EngineRates

NOTHING = Match()  # the match of an engine that holds none of a prompt


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """Facts about one engine at placement time."""

    engine: str
    tokens_per_block: int  # its own block size in tokens, which bounds what it can reuse
    rates: EngineRates
    match: Match = NOTHING  # leading blocks of the chain it holds
    load: LoadView = IDLE  # its work in flight
    room: int | None = None  # pool blocks it can store before it evicts; None if unknown
    free_blocks: int | None = None  # how many of those are on its GPU; None if unknown
    turn: int = 0  # number of the placement that last chose it, 0 for none
    residents: Residents | None = None  # the prompts it would evict; None if they are not known
    # The prompts that would move from its GPU to its host tier; None if it has no host tier.
    on_gpu: Residents | None = None
    # Its adapter's own estimate, if that follows the engine's cache token by token. It replaces the estimate
    # from `match` and the rates.
    forecast: Forecast | None = None
    complete: bool = True  # False if the engine may hold blocks that its events did not report
    is_last: bool = False  # it served this session before
    busy: float = 0.0  # share of its time that it computes prompts
    in_use: InUse | None = None  # GPU memory that requests in flight hold; None if its capacity is not known
    # The engines of which one must compute the prompt for it; () if it answers alone. Engines with the same
    # partners share one tuple.
    partners: tuple[Candidate, ...] = ()


class Outlook(msgspec.Struct, frozen=True, gc=False):
    """Figures for the cost of a placement to other requests."""

    now: float  # the time, in seconds of the caller's clock
    strain: float  # seconds that all requests wait for one second of prefill: 1 / (1 - utilisation)
    returns: Callable[[float], float]  # seconds idle → probability that a prompt is requested again
    turns: float = 1.0  # expected number of requests of a prompt from now on, the present one included
    rest_s: float = 0.0  # mean seconds that are left of a prefill that a prompt finds running
    answer_s: float = 0.0  # mean seconds from the first token of an answer to its last
    stall: float = 0.0  # what a second of prefill costs each stream that its engine decodes, in seconds
    # Engine → requests that it gets per second; None where their delay does not count.
    arrivals: Callable[[str], float] | None = None
    # How far an engine is idle while a burst's common beginning is computed, see `spare_of`.
    spare: float = 0.0


CALM = Outlook(0.0, 1.0, lambda _idle_s: 0.0)  # no other requests run, and no prompt comes back


class Cost(msgspec.Struct, frozen=True, gc=False):
    """The cost of placing a request on one engine, term by term. Times in seconds. Each field whose name ends
    with `_s` is a term: the total is their sum. `Scores` gives them in this order."""

    engine: str
    queue_s: float = 0.0  # prefill in flight before this request
    room_s: float = 0.0  # until the streams that hold the memory it needs have ended
    restore_s: float = 0.0  # to bring KV back from lower tiers
    prefill_s: float = 0.0  # to compute the rest
    interference_s: float = 0.0  # delay of the prefill by decoding streams
    # Delay of those streams by the prefill, and of requests that come while it runs or wait for memory;
    # counted only where a pair could spare them.
    stall_s: float = 0.0
    congestion_s: float = 0.0  # delay of later requests
    later_s: float = 0.0  # delay of its own next turns there by prompts of others
    again_s: float = 0.0  # cost of computing its beginning once more for the next prompt with it
    transfer_s: float = 0.0  # to move the KV that `prefiller` computes to the engine
    # Cost of what it evicts and will be requested again. None if it was not computed, because the engine
    # costs more than others without it.
    regret_s: float | None = None
    cached_tokens: int = 0  # prompt tokens the engine would reuse
    host_tokens: int = 0  # how many of those are on its host tier
    disk_tokens: int = 0  # how many are on its disk
    pending_tokens: int = 0  # how many requests in flight have yet to leave
    in_flight: int = 0
    # Empty blocks on its GPU; None if unknown. This and the next two break ties.
    free_blocks: int | None = None
    turn: int = 0  # number of the placement that last chose it, 0 for none
    is_last: bool = False  # it served this session before
    # The engine that computes the prompt for it; None if it does so itself. What comes before the transfer,
    # and the cached tokens, are then that engine's.
    prefiller: str | None = None
    pulled_tokens: int = 0  # prompt tokens whose KV is moved

    @property
    def computed_by(self) -> str:
        """The engine that computes the prompt: the cached tokens are those that it holds."""
        return self.prefiller or self.engine

    @property
    def first_token_s(self) -> float:
        """Seconds the request itself waits for its first token."""
        computing_s = self.restore_s + self.prefill_s + self.interference_s
        return self.queue_s + self.room_s + computing_s + self.transfer_s

    @property
    def total_s(self) -> float:
        """All of it. The lowest one wins."""
        return sum([getattr(self, term) or 0.0 for term in TERMS])


TERMS = tuple([name for name in Cost.__struct_fields__ if name.endswith("_s")])  # the terms of a cost


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A decision: the engine, the cached tokens it should report, and what every candidate costs."""

    chosen: Cost  # the cost of the engine that was chosen
    predicted_tokens: int  # cached tokens it should report
    n_tokens: int
    # Builds the cost of every candidate from what was known at the decision. Few requests are explained, so
    # costs are built when somebody asks.
    all_costs: Callable[[], tuple[Cost, ...]]
    rule: str  # "lowest cost" or "least loaded"
    # Most tokens of the prompt that another candidate would reuse; None without another.
    elsewhere: int | None = None
    # False if the prediction counts blocks that requests in flight have yet to leave, or the engine may hold
    # more than is known.
    firm: bool = True
    gpu_tokens: int = 0  # predicted tokens that lie on the GPU
    strain: float = 1.0  # how many times a second of prefill counted, see `Outlook`
    cut_tokens: int = 0  # further tokens that its full attention holds, and that it cannot reuse
    lacks: Attention | None = None  # the kind of attention that lacks its part of those; None without any
    # The two legs, if another engine computes the prompt; None if the engine does so itself.
    pair: Pair | None = None
    # Other engines, which make other tokens of the request: none of them cost less.
    unlike: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        """The engine that was chosen."""
        return self.chosen.engine

    @property
    def costs(self) -> tuple[Cost, ...]:
        """The cost of every candidate, in their order."""
        return self.all_costs()

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens the engine has to compute."""
        return self.n_tokens - self.predicted_tokens

    @property
    def work(self) -> Work:
        """The engine's work before the first token."""
        return Work(self.uncached_tokens, self.chosen.host_tokens, self.chosen.disk_tokens)


class Pair(msgspec.Struct, frozen=True, gc=False):
    """The two legs of a request whose prompt one engine computes and another one answers."""

    prefill: Placement  # the placement of the prompt alone
    decode: Placement  # the placement on the other engine, as if it computed the prompt itself
    patience_s: float = inf  # the first leg is given up if it takes longer
    together: bool = False  # both legs run at once, because neither engine can answer alone
