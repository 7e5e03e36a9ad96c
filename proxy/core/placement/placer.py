"""The state of one pool that placement uses, and the decision.

    match → candidate → place → begin → first_token or answered → end → settled

The proxy runs it live, `kvpin replay` on a virtual clock. It is pure: the time is an argument, and the index
says what engines hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from engine_adapter.hold import Forecast
from engine_adapter.types import Role, Tier, Usage
from proxy.core.index.blocks import BlockHash, Chain
from proxy.core.index.match import Match
from proxy.core.index.prefix_index import PrefixIndex
from proxy.core.placement.decision import NOTHING, Candidate, Outlook, Placement
from proxy.core.placement.demand import WINDOW_S, Demand, InUse, Rate, Residents
from proxy.core.placement.load import EngineLedger, LoadSample, Spent, Work
from proxy.core.placement.pairs import Prefillers, Transfers, least_loaded_of, place_halves, place_with_pairs
from proxy.core.placement.rates import EngineRates, PoolRates
from proxy.core.placement.scores import spare_of
from proxy.core.placement.whole_answers import AnswerSample

MAX_SESSIONS = 50_000  # conversations whose last engine is remembered: more than run at a time
# Of the prompts that an engine has yet to read, so many are looked at when another one joins them.
MAX_NEIGHBOURS = 8
# Blocks that each stream takes while a prompt waits to be read: one that it fills, and one that the engine
# has not told of. An SGLang tells of an answer's blocks when that has ended.
STREAM_BLOCKS = 2
_NO_WORK = Work(0)


@dataclass(slots=True, eq=False)
class KnownEngine:
    """Placement's knowledge of one engine."""

    engine: str
    ledger: EngineLedger
    rates: EngineRates
    residents: Residents  # the prompts that any of its tiers holds
    # The prompts that its GPU holds; None if it has no host tier, so that both are the same.
    on_gpu: Residents | None
    tokens_per_block: int  # its own block size, or the pool's if that is larger
    gpu_blocks: int | None  # capacity of its GPU, in blocks of the pool; None if unknown
    host_blocks: int  # capacity of its host tier, in blocks of the pool; 0 if it has none
    in_use: InUse | None  # GPU memory that requests in flight hold; None if the capacity is unknown
    turn: int = 0  # number of the placement that last chose it, 0 for none
    epoch: int = 0  # epoch of the rates that priced its ledger
    # Seconds that it spent on prompts before their first tokens, over the last minutes: the next turns of a
    # conversation take minutes, too. Over a few seconds, one long prefill would drive the conversations away
    # from its engine, and their prefills elsewhere would drive the next ones away.
    worked: Rate = field(default_factory=partial(Rate, WINDOW_S))
    # Requests that were placed on it, over the last minutes, `counted` of them so far: only decisions about
    # pairs ask for it.
    arrived: Rate = field(default_factory=partial(Rate, WINDOW_S))
    counted: int = 0
    # Its answers tell how long prompts took. First tokens may have waited for a slot, too.
    reports: bool = False
    # Requests that have no first token yet, by their tickets.
    unread: dict[int, PlacedRequest] = field(default_factory=dict)
    unread_blocks: int = 0  # those of their prompts
    in_flight: int = 0  # requests that have not ended, legs included
    is_lost: bool = False  # the engine was lost, and its KV: it gets another book when it comes back
    # Requests that were served, and whose blocks no event has told of yet.
    untold: list[PlacedRequest] = field(default_factory=list)
    idle: Candidate = field(init=False)  # what of it as a candidate never changes

    def __post_init__(self) -> None:
        self.idle = Candidate(
            self.engine,
            self.tokens_per_block,
            self.rates,
            residents=self.residents,
            on_gpu=self.on_gpu,
            in_use=self.in_use,
        )

    def forget(self) -> None:
        """The engine lost its KV."""
        self.residents.clear()
        if self.on_gpu is not None:
            self.on_gpu.clear()


class PlacedRequest(Struct, eq=False):
    """A request that was placed, until it ends."""

    book: KnownEngine
    ticket: int  # its number in the engine's ledger
    chain: Chain | None  # its prompt; None if that is not known
    work: Work  # its work before the first token
    counted_s: float = 0.0  # seconds of that work which count as demand
    begun: float | None = None  # when that work ended; None before
    # The part of the request that runs on the engine. The engine of a decode leg computes no prompt.
    part: Role = Role.BOTH
    spent: Spent | None = None  # the engine's work until its answer came, if that came whole
    # Prompts in flight may evict what it counts on before its engine looks for that.
    may_be_evicted: bool = False
    is_settled: bool = False  # it leaves no pending blocks any more

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        """The full blocks of its prompt; empty when the prompt is not known."""
        return self.chain.hashes if self.chain is not None else ()


class Placer:
    """Places the requests of one pool."""

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.index = PrefixIndex()
        self.demand = Demand()
        self.rates = PoolRates()
        self.transfers = Transfers(lambda: self.rates.prefill_tok_s)
        self.books: dict[str, KnownEngine] = {}
        # Engines that compute no prompts, and answer what others have computed: no prefill makes them busy.
        self.answering = 0
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
        self.books[engine] = KnownEngine(
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

    def resize(self, engine: str, before: int, now: int) -> None:
        """The engine's own block size is another than it told when it was added. It holds what it held."""
        book = self.books[engine]
        book.tokens_per_block = max(now, self.tokens_per_block)
        book.idle = replace(book.idle, tokens_per_block=book.tokens_per_block)
        book.host_blocks = book.host_blocks * now // before
        if book.gpu_blocks is not None and book.in_use is not None:
            book.gpu_blocks = book.in_use.capacity = book.gpu_blocks * now // before

    def remove(self, engine: str) -> None:
        """Removes an engine and everything it held."""
        self.index.remove_engine(engine)
        self.transfers.forget(engine)
        if (book := self.books.pop(engine, None)) is not None:
            book.forget()  # costs of past decisions still refer to it

    def wipe(self, engine: str) -> None:
        """The engine lost its KV, or its events were lost."""
        self.index.wipe(engine)
        self.books[engine].forget()

    # --- placement ---------------------------------------------------------------------------------

    def match(self, chain: Chain | None) -> dict[str, Match]:
        """The match of a prompt on each engine that holds some of it; {} for a prompt that is not known."""
        if chain is None:
            return {}
        return self.index.match(chain.hashes, chain.reusable)

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
        partners: tuple[Candidate, ...] = (),
    ) -> Candidate:
        """An engine as a candidate for placement now."""
        book = self.books[engine]
        if book.epoch != self.rates.epoch:
            book.epoch = self.rates.epoch
            book.ledger.reprice(book.rates.price)
        free = room = None
        if book.gpu_blocks is not None:
            gpu, host, _, pending = self.index.counts(engine)
            free = book.gpu_blocks - gpu
            if engine in self.index.grouped:
                free = self.index.grouped[engine].groups.room(book.gpu_blocks, gpu)
            free = room = free - pending if free > pending else 0
            if book.host_blocks > host:
                room += book.host_blocks - host
        busy = book.worked.per_s(now)
        return replace(
            book.idle,
            match=match or NOTHING,
            load=book.ledger.view(now),
            room=room,
            free_blocks=free,
            turn=book.turn,
            forecast=forecast,
            complete=complete,
            is_last=is_last,
            busy=busy if busy < 1 else 1.0,
            partners=partners,
        )

    def place(
        self,
        now: float,
        candidates: Sequence[Candidate],
        chain: Chain | None,
        prefillers: Prefillers | None = None,
    ) -> Placement:
        """Chooses an engine, or a pair if there are `prefillers`, or if engines answer only in pairs; by load
        alone if the prompt is not known. Changes no state."""
        if chain is None:
            return least_loaded_of(candidates)
        outlook = self.outlook(now, spare_of(candidates, chain))
        if [each for each in candidates if each.partners]:
            return place_halves(candidates, prefillers, chain, outlook)
        return place_with_pairs(candidates, prefillers, chain, outlook)

    def prefillers(
        self,
        now: float,
        candidates: Sequence[Candidate],
        decoders: Collection[str],
        holders: Sequence[Candidate] = (),
    ) -> Prefillers:
        """These engines, which may compute a prompt for one of the `decoders`, and those that may hold it for
        them."""
        seconds = partial(self.transfers.seconds, now)
        return Prefillers(candidates, decoders, seconds, partial(self._arrivals, now), holders)

    def _arrivals(self, now: float, engine: str) -> float:
        """Requests that an engine gets per second."""
        book = self.books[engine]
        book.arrived.add_evenly(now, book.ledger.placed - book.counted)
        book.counted = book.ledger.placed
        return book.arrived.per_s(now)

    def outlook(self, now: float, spare: float = 0.0) -> Outlook:
        """The figures for the cost of a placement to other requests now; for `spare` see `spare_of`."""
        demand = self.demand
        computing = len(self.books) - self.answering
        strain = 1 / (1 - demand.utilisation(now, computing or 1, spare))
        rest_s, answer_s = demand.prefills.rest, demand.answers.mean
        return Outlook(now, strain, demand.returns, demand.turns, rest_s, answer_s, spare=spare)

    # --- requests ----------------------------------------------------------------------------------

    def begin(
        self,
        now: float,
        engine: str,
        work: Work,
        chain: Chain | None,
        *,
        streams: bool = True,
        known: bool = True,
        session: Hashable | None = None,
        part: Role = Role.BOTH,
    ) -> PlacedRequest:
        """A request, or a `part` of it, goes to an engine, which has so much work with it. Its first token
        will be seen if it `streams`. Its times teach rates only if all its tokens are `known`. A decode leg
        has no work and leaves no pending blocks, unless the engine `computes` its prompt."""
        book = self.books[engine]
        self._turn += 1
        book.turn = self._turn
        book.in_flight += 1
        if session is not None:
            self._note(session, engine)
        if chain is not None and book.in_use is not None:
            book.in_use.add(chain.hashes)
        if part is Role.DECODE:
            return PlacedRequest(book, book.ledger.begin_pull(seen=streams), chain, _NO_WORK, part=part)
        seconds, counted_s = self._queue(now, book, chain, work)
        ticket = book.ledger.begin(now, seconds, work if known and chain is not None else None, seen=streams)
        placed = PlacedRequest(book, ticket, chain, work, counted_s, part=part)
        self._note_evictions(placed)
        return placed

    def computes(self, now: float, placed: PlacedRequest, work: Work, *, streams: bool = True) -> None:
        """The engine of a decode leg has to compute the prompt itself."""
        book, placed.work, placed.part = placed.book, work, Role.BOTH
        seconds, placed.counted_s = self._queue(now, book, placed.chain, work)
        book.ledger.computes(now, placed.ticket, seconds, work, seen=streams)
        self._note_evictions(placed)

    def _queue(self, now: float, book: KnownEngine, chain: Chain | None, work: Work) -> tuple[float, float]:
        """A prompt will be computed: its blocks are pending. Returns its seconds, and how many count."""
        if chain is not None:
            self.index.add_pending(book.engine, chain.hashes, chain.reusable)
        seconds = book.rates.price(work)
        return seconds, self.demand.placed(now, seconds, learned=self.rates.learned)

    def _note_evictions(self, placed: PlacedRequest) -> None:
        """Notes which prompts may lose what they are to reuse. Of those that an engine has yet to read, each
        may evict it for another, as they may be read in any order. Streams need blocks meanwhile, too. If
        memory is full, a prompt waits until some of them end: then all that is not in use may be evicted."""
        book, in_use = placed.book, placed.book.in_use
        book.unread[placed.ticket] = placed
        book.unread_blocks += len(placed.hashes)
        streams = book.in_flight - len(book.unread)
        # What leaves a GPU for a host tier can be reused there.
        if (len(book.unread) == 1 and not streams) or in_use is None or book.on_gpu is not None:
            return
        is_full = streams and in_use.blocks > in_use.capacity
        coming = book.unread_blocks + STREAM_BLOCKS * streams + (in_use.capacity if is_full else 0)
        evicted = self._evictions_of(book, coming)
        if not evicted:
            return
        oldest = book.residents.oldest(evicted)
        for each in islice(reversed(book.unread.values()), MAX_NEIGHBOURS):
            if not each.may_be_evicted and (evicts := self._evictions_of(book, coming - len(each.hashes))):
                is_rest = not book.residents.has_any(each.hashes)
                each.may_be_evicted = is_rest or _goes_on_from(each.hashes, oldest, evicts)

    def _evictions_of(self, book: KnownEngine, blocks: int) -> int:
        """The most blocks that an engine evicts to compute prompts of so many blocks."""
        held, groups = self.index.held(book.engine, Tier.GPU), self.index.groups_of(book.engine)
        if book.gpu_blocks is None:
            return 0
        if groups is not None:
            return groups.evicted(book.gpu_blocks, held, blocks)
        return max(blocks - max(book.gpu_blocks - held, 0), 0)

    def recent_sessions(self, limit: int) -> list[tuple[Hashable, str]]:
        """Conversations and the engine that each was last placed on, the last placed first."""
        return [*islice(reversed(self._sessions.items()), limit)]

    def note_earlier(self, session: Hashable, engine: str) -> None:
        """A conversation was placed on that engine before all those that are known."""
        if session not in self._sessions and len(self._sessions) < MAX_SESSIONS:
            self._sessions[session] = engine
            self._sessions.move_to_end(session, last=False)

    def _note(self, session: Hashable, engine: str) -> None:
        self._sessions[session] = engine
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def refine(self, placed: PlacedRequest, work: Work) -> None:
        """Corrects the work of a request."""
        placed.work = work
        placed.book.ledger.refine(placed.ticket, placed.book.rates.price(work), work)

    def first_token(self, now: float, placed: PlacedRequest) -> None:
        """Its first token came."""
        sample = placed.book.ledger.first_token(now, placed.ticket)
        if sample is not None and not placed.book.reports:
            placed.book.rates.learn(sample)
        if placed.begun is None:
            self._count(now, placed)

    def answered(self, now: float, placed: PlacedRequest) -> None:
        """Its answer came whole, and showed no first token."""
        placed.spent = placed.book.ledger.answered(now, placed.ticket)

    def end(
        self, now: float, placed: PlacedRequest, computed: int | None, report: Usage | None = None
    ) -> None:
        """The request is over. `computed` tokens of its prompt are new on the engine; None if it failed. The
        engine's `report` teaches rates."""
        book, chain, size = placed.book, placed.chain, self.tokens_per_block
        if placed.ticket in book.unread:
            self._was_read(placed)
        book.in_flight -= 1
        book.ledger.end(now, placed.ticket)
        if chain is not None and book.in_use is not None:
            book.in_use.remove(chain.hashes)
        if computed is None:
            if placed.begun is None:
                self.demand.refused(now, placed.counted_s)
            return
        decodes = placed.part is not Role.PREFILL
        if placed.begun is not None and decodes and chain is not None:  # a WebSocket may be open for hours
            self.demand.answers.add(now, now - placed.begun)
        if chain is not None and report is not None and (report.prefill or placed.spent is not None):
            self._learn(now, placed, chain, report)
        if placed.begun is None:
            self._count(now, placed)
        if chain is None or (book.in_use is None and book.on_gpu is None):
            return  # nobody asks what an engine of unknown capacity would evict
        book.residents.use(now, chain.hashes, computed // size)
        if book.on_gpu is not None:
            book.on_gpu.use(now, chain.hashes, (computed + placed.work.host + placed.work.disk) // size)

    def _learn(self, now: float, placed: PlacedRequest, chain: Chain, report: Usage) -> None:
        """Learns rates from an answer: from the engine's own timing if it reports one, else from the time
        that a whole answer took."""
        book, work, spent, output = placed.book, placed.work, placed.spent, report.output_tokens
        rates, others = book.rates, spent.computed - work.computed if spent is not None else 0
        own = work.computed if report.cached_tokens is None else chain.n_tokens - report.cached_tokens
        if report.prefill is not None:
            book.reports, (tokens, seconds) = True, report.prefill
            decoding = book.ledger.view(now).decoding if spent is None else spent.decoding
            rates.learn(LoadSample(Work(tokens), seconds, decoding, blurred=others > 0))
        elif output is not None and spent is not None:
            computing_s = spent.seconds - rates.restore_s(work.host, work.disk)
            rates.answered(now, AnswerSample(own + others, output, computing_s))
        if spent is not None and output is not None and self.rates.fit is not None:
            self.demand.answers.add(now, output * self.rates.fit.step_s)

    def _count(self, now: float, placed: PlacedRequest) -> None:
        """Counts a prompt that an engine has computed, once per request. Its seconds count only after rates
        were learned."""
        placed.begun = now
        if placed.ticket in placed.book.unread:
            self._was_read(placed)
        if placed.part is Role.DECODE:
            return  # the other leg counts
        if self.rates.learned:
            seconds = placed.book.rates.price(placed.work)
            placed.book.worked.add(now, seconds)
            self.demand.prefills.add(now, seconds)
        if placed.chain is not None:
            self.demand.asked(now, placed.chain, placed.work.computed)

    def _was_read(self, placed: PlacedRequest) -> None:
        del placed.book.unread[placed.ticket]
        placed.book.unread_blocks -= len(placed.hashes)

    def ended(self, placed: PlacedRequest) -> bool:
        """A request was served. Its blocks stay pending until events tell of them. Returns whether they do
        already: else end the wait by `settled`."""
        placed.book.untold.append(placed)
        self.told(placed.book.engine)
        return placed.is_settled

    def told(self, engine: str) -> None:
        """Events of the engine were applied: what they tell of ended requests is no longer pending. To be
        called before they remove blocks, or what left the GPU soon would still count."""
        book = self.books.get(engine)
        if book is None or engine in self.index.grouped:
            return  # of further groups, events may still come
        for placed in book.untold[:]:
            own = len(placed.hashes) * self.tokens_per_block // book.tokens_per_block  # the engine's blocks
            end = own * book.tokens_per_block // self.tokens_per_block
            if not end or self.index.is_on_gpu(engine, placed.hashes[end - 1]):
                self.settled(placed)

    def settled(self, placed: PlacedRequest) -> None:
        """Ends its pending blocks, once: events have confirmed by now what it left."""
        book, chain = placed.book, placed.chain
        if placed in book.untold:
            book.untold.remove(placed)
        if placed.is_settled or placed.part is Role.DECODE:
            return  # such a part had none
        placed.is_settled = True
        if chain is not None and self.books.get(book.engine) is book:
            self.index.end_pending(book.engine, chain.hashes)


def _goes_on_from(
    chain: Sequence[BlockHash], oldest: Iterable[tuple[int, int, BlockHash]], evicts: int
) -> bool:
    """True if a chain continues one of the prompts that leave with the first `evicts` blocks; see
    `Residents.oldest`."""
    most = len(chain)
    for before, blocks, last in oldest:
        if before >= evicts:
            return False
        if blocks <= most and chain[blocks - 1] == last:
            return True
    return False
