"""The state of one pool that placement uses, and the decision.

    match → candidate → place → begin → first_token or answered → end → settled

The proxy runs it live, `kvpin replay` on a virtual clock. It is pure: the time is an argument, and the index
says what engines hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine_adapter.hold import Forecast
from proxy.core.index.blocks import Chain
from proxy.core.index.prefix_index import Match, PrefixIndex
from proxy.core.placement.answers import Answer, Report
from proxy.core.placement.decision import NOTHING, Candidate, Outlook, Placement, place, place_least_loaded
from proxy.core.placement.demand import Demand
from proxy.core.placement.in_use import InUse
from proxy.core.placement.load import EngineLedger, Sample, Spent, Work
from proxy.core.placement.rates import EngineRates, PoolRates
from proxy.core.placement.recent import WINDOW_S, Recent
from proxy.core.placement.residents import Residents

# Conversations whose last engine is remembered: more than run at a time.
MAX_SESSIONS = 50_000


@dataclass(slots=True, eq=False)
class Seat:
    """An engine's place in a pool.

    Attributes:
        engine: its id.
        ledger: its work in flight.
        rates: how fast it is.
        residents: the prompts that any of its tiers holds.
        on_gpu: the prompts that its GPU holds; None if it has no host tier, so that both are the same.
        tokens_per_block: its own block size, or the pool's if that is larger.
        gpu_blocks: capacity of its GPU, in blocks of the pool; None if unknown.
        host_blocks: capacity of its host tier, in blocks of the pool; 0 if it has none.
        in_use: GPU memory that requests in flight hold; None if the capacity is unknown.
        turn: number of the placement that last chose it, 0 for none.
        epoch: epoch of the rates that priced its ledger.
        worked: seconds it spent lately on prompts before their first tokens.
    """

    engine: str
    ledger: EngineLedger
    rates: EngineRates
    residents: Residents
    on_gpu: Residents | None
    tokens_per_block: int
    gpu_blocks: int | None
    host_blocks: int
    in_use: InUse | None
    turn: int = 0
    epoch: int = 0
    worked: Recent = field(default_factory=Recent)


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its engine.

    Attributes:
        seat: the engine's.
        number: the request's ticket in the engine's ledger.
        chain: its prompt; None if that is not known.
        work: its work before the first token.
        begun: when that work ended; None before.
        spent: what the engine did until its answer came, if that came whole.
    """

    seat: Seat
    number: int
    chain: Chain | None
    work: Work
    begun: float | None = None
    spent: Spent | None = None


class Placer:
    """Places the requests of one pool."""

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.index = PrefixIndex()
        self.demand = Demand()
        self.rates = PoolRates()
        self.seats: dict[str, Seat] = {}
        self._turn = 0
        self._sessions: OrderedDict[Hashable, str] = OrderedDict()  # → the engine it was last on

    # --- engines -----------------------------------------------------------------------------------

    def add(
        self,
        engine: str,
        ledger: EngineLedger | None = None,
        *,
        tokens_per_block: int | None = None,
        gpu_blocks: int | None = None,
        host_blocks: int | None = None,
    ) -> None:
        """Adds an engine. Capacities are in its own blocks."""
        self.remove(engine)
        self.index.add_engine(engine)
        own, pools = tokens_per_block or self.tokens_per_block, self.tokens_per_block
        gpu = gpu_blocks * own // pools if gpu_blocks is not None else None
        holds, on_gpu = partial(self.index.holds, engine), partial(self.index.is_on_gpu, engine)
        self.seats[engine] = Seat(
            engine=engine,
            ledger=ledger or EngineLedger(),
            rates=EngineRates(self.rates),
            residents=Residents(holds if host_blocks else on_gpu),
            on_gpu=Residents(on_gpu) if host_blocks else None,
            tokens_per_block=max(own, pools),
            gpu_blocks=gpu,
            host_blocks=(host_blocks or 0) * own // pools,
            in_use=InUse(gpu) if gpu is not None else None,
        )

    def remove(self, engine: str) -> None:
        """Removes an engine and everything it held."""
        self.index.remove_engine(engine)
        self.seats.pop(engine, None)

    def wipe(self, engine: str) -> None:
        """The engine lost its KV, or its events were lost."""
        self.index.wipe(engine)
        seat = self.seats[engine]
        seat.residents.clear()
        if seat.on_gpu is not None:
            seat.on_gpu.clear()

    # --- placement ---------------------------------------------------------------------------------

    def match(self, chain: Chain | None) -> dict[str, Match]:
        """What each engine holds of a prompt; nothing for a prompt that is not known."""
        return self.index.match(chain.hashes) if chain is not None else {}

    def last_engine(self, session: Hashable | None) -> str | None:
        """The engine that a conversation was last placed on; None if unknown."""
        return self._sessions.get(session)

    def candidate(
        self,
        now: float,
        engine: str,
        match: Match | None = None,
        *,
        forecast: Forecast | None = None,
        complete: bool = True,
        is_last: bool = False,
    ) -> Candidate:
        """What placement knows of an engine now."""
        seat = self.seats[engine]
        if seat.epoch != self.rates.epoch:
            seat.epoch = self.rates.epoch
            seat.ledger.reprice(seat.rates.price)
        free = room = None
        if seat.gpu_blocks is not None:
            gpu, host, _, pending = self.index.counts(engine)
            free = room = max(seat.gpu_blocks - gpu - pending, 0)
            if seat.host_blocks:
                room += max(seat.host_blocks - host, 0)
        return Candidate(
            engine,
            seat.tokens_per_block,
            seat.rates,
            match or NOTHING,
            seat.ledger.view(now),
            room,
            free,
            seat.turn,
            seat.residents,
            seat.on_gpu,
            forecast,
            complete,
            is_last,
            min(seat.worked.sum(now) / WINDOW_S, 1.0),
            seat.in_use,
        )

    def place(self, now: float, candidates: Sequence[Candidate], chain: Chain | None) -> Placement:
        """Chooses an engine; by load alone if the prompt is not known. Changes no state."""
        if chain is None:
            return place_least_loaded(candidates)
        return place(candidates, chain, self.outlook(now))

    def outlook(self, now: float) -> Outlook:
        """What a placement costs other requests now."""
        demand = self.demand
        strain = 1 / (1 - demand.utilisation(now, len(self.seats)))
        return Outlook(now, strain, demand.returns, demand.turns, demand.rest_s(now), demand.answer_s(now))

    # --- requests ----------------------------------------------------------------------------------

    def begin(
        self,
        now: float,
        placement: Placement,
        chain: Chain | None,
        *,
        streams: bool = True,
        known: bool = True,
        session: Hashable | None = None,
    ) -> Ticket:
        """The request goes to its engine. Its first token will be seen if it `streams`. Its times teach rates
        only if all its tokens are `known`."""
        seat, work = self.seats[placement.engine], placement.work
        self._turn += 1
        seat.turn = self._turn
        if session is not None:
            self._note(session, seat.engine)
        if chain is not None:
            self.index.add_pending(placement.engine, chain.hashes)
            if seat.in_use is not None:
                seat.in_use.add(chain.hashes)
        known = known and chain is not None
        number = seat.ledger.begin(now, seat.rates.price(work), work if known else None, seen=streams)
        return Ticket(seat, number, chain, work)

    def _note(self, session: Hashable, engine: str) -> None:
        self._sessions[session] = engine
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def refine(self, ticket: Ticket, work: Work) -> None:
        """Corrects the work of a request."""
        ticket.work = work
        ticket.seat.ledger.refine(ticket.number, ticket.seat.rates.price(work), work)

    def first_token(self, now: float, ticket: Ticket) -> None:
        """Its first token came."""
        sample = ticket.seat.ledger.first_token(now, ticket.number)
        if sample is not None:
            ticket.seat.rates.learn(sample)
        self._count(now, ticket)

    def answered(self, now: float, ticket: Ticket) -> None:
        """Its answer came whole, and showed no first token."""
        ticket.spent = ticket.seat.ledger.answered(now, ticket.number)

    def end(self, now: float, ticket: Ticket, computed: int | None, report: Report | None = None) -> None:
        """The request is over. `computed` tokens of its prompt are new on the engine; None if it failed. If
        its answer came whole, the engine's `report` teaches rates."""
        seat, chain, size = ticket.seat, ticket.chain, self.tokens_per_block
        seat.ledger.end(now, ticket.number)
        if chain is not None and seat.in_use is not None:
            seat.in_use.remove(chain.hashes)
        if computed is None:
            return
        if ticket.begun is not None:
            self.demand.answered(now, now - ticket.begun)
        if ticket.spent is not None and chain is not None and report is not None:
            self._learn(now, ticket, chain, ticket.spent, report)
        self._count(now, ticket)
        if chain is None:
            return
        seat.residents.use(now, chain.hashes, computed // size)
        if seat.on_gpu is not None:
            seat.on_gpu.use(now, chain.hashes, (computed + ticket.work.host + ticket.work.disk) // size)

    def _learn(self, now: float, ticket: Ticket, chain: Chain, spent: Spent, report: Report) -> None:
        """Learns rates from a whole answer: from the engine's own timing if it reports one, else from the
        time the answer took."""
        rates, work, output = ticket.seat.rates, ticket.work, report.output_tokens
        others = spent.computed - work.computed
        own = work.computed if report.cached_tokens is None else chain.n_tokens - report.cached_tokens
        if report.prefill is not None:
            tokens, seconds = report.prefill
            rates.learn(Sample(Work(tokens), seconds, spent.decoding, blurred=others > 0))
        elif output is not None:
            computing_s = spent.seconds - rates.restore_s(work.host, work.disk)
            rates.answered(Answer(own + others, output, computing_s))
        if output is not None and self.rates.fit is not None:
            self.demand.answered(now, output * self.rates.fit.step_s)

    def _count(self, now: float, ticket: Ticket) -> None:
        """Counts a prompt that an engine has computed, once per request: an attempt that an engine refused is
        no demand of its own. Its seconds count only once rates were learned."""
        if ticket.begun is not None:
            return
        ticket.begun = now
        if self.rates.learned:
            seconds = ticket.seat.rates.price(ticket.work)
            ticket.seat.worked.add(now, seconds)
            self.demand.worked(now, seconds)
        if ticket.chain is not None:
            self.demand.asked(now, ticket.chain, ticket.work.computed)

    def settled(self, ticket: Ticket) -> None:
        """Ends its pending blocks: events have confirmed by now what it left."""
        seat, chain = ticket.seat, ticket.chain
        if chain is not None and self.seats.get(seat.engine) is seat:
            self.index.end_pending(seat.engine, chain.hashes)
