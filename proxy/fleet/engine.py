"""One engine as the proxy sees it now. State only, see `fleet.py`."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import structlog

from engine_adapter import (
    Capability,
    EngineAdapter,
    EngineChanged,
    EngineInfo,
    EngineSpec,
    Finding,
    ModelState,
    Role,
    log_text,
)
from proxy.core.audit import Breaker, EmptyAnswers, EngineAudit
from proxy.core.index.expected import LearnedBlocks
from proxy.core.index.view import EngineView
from proxy.core.placement.load import EngineLedger
from proxy.core.placement.tiering import AheadCounts
from proxy.fleet.lease import Lease, PeerRequest
from proxy.fleet.managed_engine import ManagedEngine
from proxy.prompt import Audits, PromptBuilder
from proxy.request.comparison import Flush
from proxy.request.tenants import TenantSalts

log = structlog.get_logger(__name__)

# The block size of pools, unless an engine's own is smaller.
TOKENS_PER_BLOCK = 16
# Assumed capacity of an engine that does not report one, in tokens.
ASSUMED_CAPACITY_TOKENS = 131_072
# Most blocks remembered per engine on lower tiers that send no events.
HINTED_BLOCKS = 65_536
EMPTY = "its answers are empty, while other engines of its model answer with text"
# After this many doubts within so many seconds that were none, it closes connections by habit: for a while,
# only its regular checks count.
FALSE_DOUBTS, FALSE_WITHIN_S, TRUSTED_S = 3, 30.0, 300.0
# Seconds until forms that served prompts took away are compared again; each time twice as many.
HEAL_S = 60


class EngineState(StrEnum):
    """Only `ready` engines get requests; if there is none, `suspect` ones."""

    CONNECTING = "connecting"
    READY = "ready"
    SUSPECT = "suspect"  # a request failed on it, or its model failed to load; it is being checked
    DOWN = "down"
    DRAINING = "draining"  # finishes its requests, gets no new ones
    REFUSED = "refused"  # not used: tenants would share its KV
    ELSEWHERE = "elsewhere"  # not used: another kvpin does, and only one may


class DrainReason(StrEnum):
    """Why an engine drains. It takes requests again when no reason is left."""

    ORDERED = "an operator drained it"
    NOT_READY = "the source that names it says that it is not ready"
    LEAVING = "nothing names it any more"


def address_of(spec: EngineSpec) -> tuple[str, bool]:
    """An engine's address as peers are told it, with its rank, and whether only this machine can reach it."""
    return (f"{socket.gethostname()} {spec.address}", True) if spec.is_local else (spec.address, False)


def order_name(spec: EngineSpec) -> str:
    """The engine's name in operators' orders: its address, and what tells it from others there. One that
    kvpin starts has another port each time: its id and its machine name it.
    Headers may be secret: their digest is told."""
    if spec.is_started:
        return f"{socket.gethostname()} engine {spec.id}"
    name, _ = address_of(spec)
    if spec.model is not None:
        name += f" model {spec.model}"
    if spec.headers:
        name += f" headers {hashlib.sha256(repr(sorted(spec.headers.items())).encode()).hexdigest()[:8]}"
    return name


class Engine:
    """One engine: its adapter, what it declared, its load, its audit."""

    def __init__(self, adapter: EngineAdapter, on_ready: Callable[[], None] = lambda: None) -> None:
        """`on_ready` is called whenever the engine becomes ready."""
        self.adapter = adapter
        self.id = adapter.spec.id
        self.order = order_name(adapter.spec)  # its name in operators' orders
        self._state = EngineState.CONNECTING
        self._on_ready = on_ready
        self._failed = 0  # requests, since it was ready last
        self.info: EngineInfo | None = None  # its declaration when it connected; None before that
        # The builder of its prompts; None before it has connected. It stays while the engine is away.
        self.prompts: PromptBuilder | None = None
        self.is_proven = True  # this connection was compared, and makes the tokens that `prompts` makes
        self.audits = Audits()  # which of its prompts it is asked to tokenise itself
        # When forms that served prompts took away are compared again; None if there are none.
        self.heals_at: float | None = None
        # An event, set while the process that answers is surely the one that was compared.
        self.sure = asyncio.Event()
        self.sure.set()
        # Connections that have ended; times that it closed one, so that another process might answer.
        self.connections = self.doubts = 0
        # The last look at what it is ended early: its adapter may know already what nobody was told.
        self.was_cut_short = False
        self._trusted_until = 0.0
        self._false_doubts: deque[float] = deque(maxlen=FALSE_DOUBTS)
        self.ledger = EngineLedger()
        self.audit = EngineAudit()  # predicted against reported cached tokens, and the trust in its view
        # Blocks learned from responses, for engines without events.
        self.learned = LearnedBlocks(ASSUMED_CAPACITY_TOKENS // TOKENS_PER_BLOCK)
        self.below = LearnedBlocks(HINTED_BLOCKS)  # blocks on lower tiers that its events do not report
        self.salts = TenantSalts()
        self.ahead = AheadCounts()  # counts of restores ahead of need
        self.lacks: set[str] = set()  # routes that the engine said it does not have
        self.keeps_no_kv = False  # it computed a prompt for another engine, and kept nothing for it
        self.view: EngineView | None = None  # its KV cache, from its events; None without events
        self.process: ManagedEngine | None = None  # its process, if kvpin runs it
        # It is there while kvpin's supervisor starts the engine for the first time; None if the supervisor
        # does not start it.
        self.starting_file: Path | None = None
        # When it lost its cache, in Unix time; the last times only.
        self.emptied: deque[float] = deque(maxlen=16)
        self.flushed: deque[Flush] = deque(maxlen=16)  # the last flushes that this kvpin ordered
        self.drains: set[DrainReason] = set()  # why it drains; empty unless its state is `draining`
        self.last_error: str | None = None  # why it is not ready
        self.refuses = False  # it can be reached, and its answer to kvpin was an error, as `last_error` says
        self.check_now = asyncio.Event()  # wakes its monitor
        self.leases: set[Lease] = set()
        # Requests that other kvpins have on it and that have no answer yet, by ticket.
        self.of_peers: dict[int, PeerRequest] = {}
        # Requests of this kvpin, which a worker hands over: it answered them; it computed their prompt for
        # another engine; their answer was an error, or they got none.
        self.served = self.prefilled = self.failed = 0
        self.at_others = 0  # requests in flight of other workers that do not count as load here
        self.empty = EmptyAnswers()  # its empty answers beside those of others
        # Lets few requests through after several failed in a row; None after none did.
        self.breaker: Breaker | None = None
        self.mine = asyncio.Event()  # an event, set while this kvpin may use the engine
        self.mine.set()
        self.owner: str | None = None  # the kvpin that uses the engine, if only one may; None while unknown
        self.is_served_there = False  # the owner is another kvpin, and takes requests from this one

    @property
    def role(self) -> Role:
        """The part of requests that it is meant for."""
        told = self.info.role if self.info is not None else None
        return told or self.adapter.spec.role

    @property
    def model_failed(self) -> bool:
        """True if its model failed to load. The next request that no other engine can take tries again."""
        return self.adapter.model_state is ModelState.FAILED

    @property
    def state(self) -> EngineState:
        """Its state. Only a ready engine gets requests."""
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state
        if state is EngineState.READY:
            self._failed = 0
            self._on_ready()

    @property
    def is_own(self) -> bool:
        """True if kvpin, or the supervisor of its workers, runs its process."""
        return self.process is not None or self.starting_file is not None

    @property
    def is_starting(self) -> bool:
        """True while kvpin, or its supervisor, starts it for the first time: it may not answer yet."""
        if self.process is not None:
            return self.process.starting
        return self.starting_file is not None and self.starting_file.exists()

    @property
    def unanswered(self) -> list[Lease]:
        """Its requests whose answer has not begun."""
        return [lease for lease in self.leases if not lease.begun.is_set()]

    @property
    def underway(self) -> list[Lease | PeerRequest]:
        """Requests whose prompt it computes: their answer has not begun. Those of other kvpins are included,
        but none whose prompt another engine computes."""
        own = (lease for lease in self.unanswered if lease.placed.part is not Role.DECODE)
        return [*own, *self.of_peers.values()]

    @property
    def has_lower_tiers(self) -> bool:
        """True if there are tiers below its GPU that can be asked what they hold."""
        return self.info is not None and bool(self.info.tokens_per_chunk)

    def can(self, capability: Capability) -> bool:
        """True if the engine, as connected, declares the capability."""
        return self.info is not None and capability in self.info.capabilities

    def serves(self, native: str) -> bool:
        """True if the engine, as connected, declares this route beside `/v1`."""
        return self.info is not None and native in self.info.routes

    def lost_forms(self) -> None:
        """A served prompt had other tokens: its forms are made there until they are compared again."""
        self.heals_at = time.monotonic() + (HEAL_S << self.audits.healed)

    def takes(self, tokens: int) -> bool:
        """True if a prompt of so many tokens fits into its context, as far as that is known."""
        context = self.info.max_model_len if self.info is not None else None
        return context is None or tokens <= context

    @property
    def loras(self) -> frozenset[str]:
        """Names of the LoRA adapters it serves."""
        return self.info.loras if self.info is not None else frozenset()

    @property
    def in_flight(self) -> int:
        """Its requests in flight, also those of other workers."""
        return self.ledger.in_flight + self.at_others

    @property
    def removals(self) -> int:
        """Blocks that its events have removed from the view."""
        return self.view.counts.removed if self.view is not None else 0

    def has_connected(self, info: EngineInfo) -> None:
        """A connection begins: nothing that was found out about an earlier one holds."""
        self.info, self.is_proven, self.keeps_no_kv = info, self.prompts is None, False
        self.lacks.clear()
        self.audits, self.heals_at = Audits(), None
        self._trusted_until = 0.0
        self._false_doubts = deque(maxlen=FALSE_DOUBTS)
        self.sure.set()

    def has_gone(self) -> None:
        """Its connection is over. Requests that wait to be sent on it fail."""
        self.is_proven = self.prompts is None
        self.connections += 1
        self.sure.set()

    def doubt(self, *, was_asked: bool = False) -> None:
        """It closed a connection, or seems to be another one when asked (`was_asked`): another process may
        answer from now on. The monitor checks at once. Of an engine that keeps closing connections, a closed
        one says nothing."""
        is_used = self.state in (EngineState.READY, EngineState.SUSPECT, EngineState.DRAINING)
        if is_used and (was_asked or time.monotonic() >= self._trusted_until):
            self.doubts += 1
            self.sure.clear()
            self.check_now.set()

    def is_same(self, doubts: int) -> None:
        """A check that began after so many doubts found the same process."""
        now = time.monotonic()
        self._false_doubts.append(now)
        if len(self._false_doubts) == FALSE_DOUBTS and now - self._false_doubts[0] < FALSE_WITHIN_S:
            self._trusted_until = now + TRUSTED_S
        if self.doubts == doubts or now < self._trusted_until:
            self.sure.set()

    async def confirm(self, connections: int) -> None:
        """Waits until it is sure which process answers; awaited before a request uses a new connection.
        `connections`: those at its placement. Raises EngineChanged if another one began since."""
        await self.sure.wait()
        if self.connections != connections:
            raise EngineChanged("another process may have taken the engine's place")

    def give_to(self, owner: str | None, *, is_served_there: bool = False) -> None:
        """Leaves the engine to another kvpin; None if its owner is not known yet. New requests stop."""
        self.mine.clear()
        self.owner, self.is_served_there = owner, is_served_there
        if owner is None:
            self.last_error = "only one kvpin may use it, and it is not decided which one"
        elif is_served_there:
            self.last_error = None
        else:
            self.last_error = f"another kvpin uses it ({owner}), and only one may"
        if self.state is not EngineState.DRAINING:
            self.state = EngineState.CONNECTING if owner is None else EngineState.ELSEWHERE
        self.check_now.set()

    def take(self) -> None:
        """This kvpin may use it from now on: the monitor connects it."""
        if self.state is EngineState.ELSEWHERE:
            self.state = EngineState.CONNECTING
        self.owner, self.is_served_there = None, False
        self.mine.set()

    def suspect(self, error: Exception) -> None:
        """A request failed on it. The monitor checks it at once; until then other engines are preferred.

        Logs only the first failure since the engine was ready.
        """
        if self.state in (EngineState.CONNECTING, EngineState.DOWN, EngineState.ELSEWHERE):
            return  # the loss is known, and `abandon` counted this request
        self.last_error = log_text(error)
        self._has_opened()
        if not self._failed:
            log.warning("a request failed: checking its engine", engine=self.id, error=self.last_error)
        self._failed += 1
        if self.state is EngineState.READY:
            self.state = EngineState.SUSPECT
        self.check_now.set()

    def refused(self, error: Exception) -> None:
        """Counts a refused request. After several in a row, the engine gets few requests for a while."""
        if self._has_opened():
            log.warning(
                "requests keep failing: the engine gets few until one is answered",
                engine=self.id,
                error=log_text(error),
            )

    def _has_opened(self) -> bool:
        """Counts a failure. Returns whether it opened the breaker."""
        if self.breaker is None:
            self.breaker = Breaker()
        return self.breaker.failed(time.monotonic())

    def answered(self) -> None:
        """A request was answered well."""
        self.empty.texts += 1
        self.empty.in_a_row = 0
        if self.breaker is not None:
            self.breaker.answered(time.monotonic())
            if self.breaker.is_closed:
                self.breaker = None

    def findings(self) -> tuple[Finding, ...]:
        """What its answers show."""
        return (Finding(EMPTY, "look at its log, and ask it directly"),) if self.empty.is_odd else ()

    @property
    def is_allowed(self) -> bool:
        """True if its breaker lets another request through."""
        return self.breaker is None or self.breaker.allows(time.monotonic(), len(self.unanswered))

    def gives_kv(self, lora: str | None) -> bool:
        """True if it may compute a prompt, for that adapter, for another engine now."""
        is_well = self.state is EngineState.READY and self.is_allowed and not self.keeps_no_kv
        return is_well and (lora is None or lora in self.loras)

    def abandon(self) -> None:
        """Ends the requests of a lost engine. A request whose answer has not begun is retried elsewhere.

        Called again at each failed attempt to connect. Logs each request once: an answer that is still
        being read remains for a while.
        """
        failed, self._failed = self._failed + sum(not lease.is_lost for lease in self.leases), 0
        if failed:
            log.warning("requests failed because their engine was lost", engine=self.id, requests=failed)
        for lease in self.leases:
            lease.is_lost = True
            lease.on_lost()
