"""All that placement knows of a pool, and the decision itself.

The proxy runs it live, `kvpin replay` on a clock of its own.

    candidate → place → begin → first_token → served → settled

Pure: the time is an argument, and what engines hold is told through the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_adapter.hold import Forecast
from engine_adapter.types import Tier
from proxy.core.blocks import Chain
from proxy.core.demand import Demand
from proxy.core.index import Match, PrefixIndex
from proxy.core.load import EngineLedger, Work
from proxy.core.placement import NOTHING, Candidate, Outlook, Placement, place, place_least_loaded
from proxy.core.rates import EngineRates, PoolRates
from proxy.core.residents import Residents


@dataclass(slots=True)
class Seat:
    """An engine's place in a pool.

    Attributes:
        engine: its id.
        ledger: its work in flight.
        rates: how fast it is.
        residents: the prompts it was given.
        tokens_per_block: its own block size, or the pool's where that is larger.
        gpu_blocks: what its GPU holds, in blocks of the pool; None where unknown.
        host_blocks: likewise of its host tier; 0 where it has none.
        epoch: of the rates that its ledger is in.
    """

    engine: str
    ledger: EngineLedger
    rates: EngineRates
    residents: Residents
    tokens_per_block: int
    gpu_blocks: int | None
    host_blocks: int
    epoch: int = 0

    def price(self, work: Work) -> float:
        """Seconds of the engine's time that some work takes."""
        return self.rates.prefill_s(work.computed) + self.rates.restore_s(work.host, work.disk)


class Placer:
    """Places the requests of one pool."""

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.index = PrefixIndex()
        self.demand = Demand()
        self.rates = PoolRates()
        self.seats: dict[str, Seat] = {}

    # --- engines -----------------------------------------------------------------------------------

    def add(
        self,
        engine: str,
        *,
        ledger: EngineLedger | None = None,
        tokens_per_block: int | None = None,
        gpu_blocks: int | None = None,
        host_blocks: int | None = None,
    ) -> Seat:
        """Takes an engine in, or what is new of one that is known. Capacities are in blocks of its own."""
        self.index.add_engine(engine)
        own = tokens_per_block or self.tokens_per_block
        known = self.seats.get(engine)
        seat = self.seats[engine] = Seat(
            engine=engine,
            ledger=ledger or (known.ledger if known else EngineLedger()),
            rates=known.rates if known else EngineRates(self.rates),
            residents=known.residents if known else Residents(lambda block: self.index.holds(engine, block)),
            tokens_per_block=max(own, self.tokens_per_block),
            gpu_blocks=gpu_blocks * own // self.tokens_per_block if gpu_blocks is not None else None,
            host_blocks=(host_blocks or 0) * own // self.tokens_per_block,
        )
        return seat

    def remove(self, engine: str) -> None:
        """The engine is gone, and all it held."""
        self.index.remove_engine(engine)
        self.seats.pop(engine, None)

    def wipe(self, engine: str) -> None:
        """The engine, which has a seat, lost its KV, or sight of it was lost."""
        self.index.wipe(engine)
        self.seats[engine].residents.clear()

    def free_blocks(self, engine: str) -> int | None:
        """Blocks of the engine's GPU tier that hold nothing known, nor soon will; None where unknown."""
        capacity = self.seats[engine].gpu_blocks
        if capacity is None:
            return None
        return max(capacity - self.index.held(engine, Tier.GPU) - self.index.pending(engine), 0)

    # --- requests ----------------------------------------------------------------------------------

    def match(self, chain: Chain | None) -> dict[str, Match]:
        """What each engine holds of a prompt."""
        return self.index.match(chain.hashes) if chain is not None else {}

    def candidate(
        self,
        now: float,
        engine: str,
        match: Match | None = None,
        *,
        forecast: Forecast | None = None,
        complete: bool = True,
    ) -> Candidate:
        """An engine as placement sees it."""
        seat = self.seats[engine]
        if seat.epoch != self.rates.epoch:
            seat.epoch = self.rates.epoch
            seat.ledger.reprice(seat.price)
        free = self.free_blocks(engine)
        room = free
        if free is not None and seat.host_blocks:
            room = free + max(seat.host_blocks - self.index.held(engine, Tier.HOST), 0)
        return Candidate(
            engine=engine,
            tokens_per_block=seat.tokens_per_block,
            rates=seat.rates,
            match=match or NOTHING,
            load=seat.ledger.view(now),
            room=room,
            free_blocks=free,
            served=seat.ledger.served,
            residents=seat.residents,
            forecast=forecast,
            complete=complete,
        )

    def place(self, now: float, candidates: Sequence[Candidate], chain: Chain | None) -> Placement:
        """Where a request goes; by load alone when its prompt is not known. Changes nothing."""
        if chain is None:
            return place_least_loaded(candidates)
        tokens_s = sum(candidate.rates.prefill_tok_s for candidate in candidates)
        utilisation = self.demand.utilisation(now, tokens_s)
        return place(candidates, chain, Outlook(now, 1 / (1 - utilisation), self.demand.returns))

    def begin(self, now: float, placement: Placement, chain: Chain | None, *, streams: bool = True) -> int:
        """The request goes to its engine. Returns its ticket there."""
        seat, work = self.seats[placement.engine], placement.work
        if chain is not None:
            self.demand.asked(now, chain, work.computed)
            self.index.add_pending(placement.engine, chain.hashes)
        return seat.ledger.begin(now, seat.price(work), work, seen=streams)

    def refine(self, seat: Seat, ticket: int, work: Work) -> None:
        """More is known of what a request asks of its engine."""
        seat.ledger.refine(ticket, seat.price(work), work)

    def first_token(self, now: float, seat: Seat, ticket: int) -> None:
        """Its answer has begun."""
        begun = seat.ledger.first_token(now, ticket)
        if begun is not None:
            work = begun.work
            seat.rates.began(work.computed, work.host, work.disk, begun.seconds, begun.decoding)

    def served(self, now: float, seat: Seat, chain: Chain, computed: int) -> None:
        """It was answered: the engine holds the prompt now, `computed` tokens of which are new there."""
        seat.residents.use(now, chain.hashes, computed // self.tokens_per_block)

    def settled(self, seat: Seat, chain: Chain) -> None:
        """Events have told what the request left behind, or will not: nothing of it is pending any longer."""
        if seat.engine in self.seats:
            self.index.end_pending(seat.engine, chain.hashes)
