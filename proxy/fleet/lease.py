"""A request's hold on an engine, and how long it waits for other requests that compute the same prefix."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine_adapter import EngineUnavailable, Hold
from proxy.core.index.blocks import BlockHash, Chain
from proxy.core.placement.answers import Report
from proxy.core.placement.decision import NOTHING, Placement, predict
from proxy.core.placement.gather import leader, patience_s
from proxy.core.placement.load import Work
from proxy.core.placement.placer import Placer, Ticket

if TYPE_CHECKING:
    from proxy.fleet.engine import Engine  # an engine keeps its leases


_LOST = "the engine was lost in mid-answer"
# Ends an answer that is being read, for a reason.
HangUp = Callable[[str], None]


@dataclass(slots=True, eq=False)
class Lease:
    """A request's hold on an engine, with the times it has seen.

    Attributes:
        found: leading blocks of its prompt that it leaves to the engine to find; it computes the others.
        begun: its answer has begun, or will not.
        report: what the engine said of its answer.
    """

    engine: Engine
    placement: Placement
    placer: Placer
    ticket: Ticket
    started: float
    removals: int
    first_byte_s: float | None = None
    succeeded: bool = False
    found: int = 0
    report: Report | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    _patience: asyncio.Timeout | None = None
    _hang_up: HangUp | None = None
    _is_lost: bool = False

    @asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """Waits for the engine as long as it is not lost, until the answer has begun.

        Raises:
            EngineUnavailable: it was lost before; an engine that hangs would never say so itself.
        """
        try:
            async with asyncio.timeout(None) as self._patience:
                yield
        except TimeoutError:
            if self._patience is None or not self._patience.expired():
                raise
            raise EngineUnavailable("the engine was lost before it answered") from None

    async def gather(self) -> None:
        """Waits while another request has the engine compute what this prompt begins with, where the engine
        would compute it twice. Where that one fails, or takes too long, this one computes it, and those that
        come after it may wait for this one."""
        chain, info = self.ticket.chain, self.engine.info
        if chain is None or (info is not None and info.shares_prefill):
            return
        self.found = self.placement.predicted_tokens // chain.tokens_per_block
        shared = self.placement.chosen.pending_tokens
        if shared and not await self._is_shared(self.ticket.seat.rates.prefill_s(shared)):
            self._compute(chain)

    def _compute(self, chain: Chain) -> None:
        """What others are yet to leave behind it computes, too: it finds what the engine holds by now."""
        seat, placement = self.ticket.seat, self.placement
        match = self.placer.match(chain).get(seat.engine, NOTHING)
        predicted = predict(chain, replace(match, pending=0), seat.tokens_per_block)
        self.found = predicted // chain.tokens_per_block
        gpu_tokens = min(placement.gpu_tokens, predicted)
        self.placement = replace(placement, predicted_tokens=predicted, gpu_tokens=gpu_tokens)
        self.refine_work(self.placement.work)

    async def _is_shared(self, shared_s: float) -> bool:
        """Waits for whoever computes what would take `shared_s` alone; whether the engine has it now."""
        ledger, has_failed = self.ticket.seat.ledger, False
        while other := leader(self.engine.unanswered, self.hashes, self.found):
            remaining = ledger.remaining(time.monotonic(), other.ticket.number)
            if remaining is None:
                return True
            wait_s = patience_s(remaining, shared_s)
            if wait_s is None:
                return False
            try:
                async with asyncio.timeout(wait_s):
                    await other.begun.wait()
            except TimeoutError:
                return not remaining.seen
            if other.first_byte_s is not None:
                return True
            has_failed = True
        return not has_failed

    @property
    def hashes(self) -> Sequence[BlockHash]:
        """The full blocks of its prompt, as far as they are known."""
        return self.ticket.chain.hashes if self.ticket.chain is not None else ()

    def refine(self, hold: Hold) -> Placement:
        """The placement with what the engine's hold knows better."""
        if hold.cached_tokens is not None:
            self.placement = replace(self.placement, predicted_tokens=hold.cached_tokens, firm=hold.firm)
        return self.placement

    def refine_work(self, work: Work) -> None:
        """What it asks of the engine, now that more is known."""
        self.placer.refine(self.ticket, work)

    @property
    def evicted_since(self) -> bool:
        """Whether the engine evicted anything since the placement."""
        return self.engine.removals != self.removals

    def give_up(self) -> None:
        """The engine is lost: ends `patience`, or the answer where that has begun."""
        self._is_lost = True
        if self._hang_up is not None:
            self._hang_up(_LOST)
        elif self._patience is not None:
            self._patience.reschedule(0)

    def first_byte(self, hang_up: HangUp, *, streamed: bool) -> None:
        """The answer has begun. A stream's first byte is its first token; other answers are whole by then."""
        self._hang_up = hang_up
        if self._patience is not None:
            self._patience.reschedule(None)
        if self._is_lost:
            hang_up(_LOST)
        self.first_byte_s = time.monotonic() - self.started
        self.begun.set()
        if streamed:
            self.placer.first_token(time.monotonic(), self.ticket)
        else:
            self.placer.answered(time.monotonic(), self.ticket)
