"""A request's hold on an engine, and its wait for other requests that compute the same prefix.

Some engines share a prompt's KV only once the whole prompt is computed. Two prompts with one prefix that run
side by side then compute it twice, each at half the speed. There the second prompt waits for the first token
of the first, unless running beside it is faster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from msgspec import Struct, field
from msgspec.structs import replace

from engine_adapter import EngineError, Hold, Role
from engine_adapter.types import Usage
from proxy.core.index.blocks import BlockHash
from proxy.core.peers.messages import Step, Telling
from proxy.core.placement.decision import NOTHING, Placement
from proxy.core.placement.load import Remaining, Work
from proxy.core.placement.placer import PlacedRequest, Placer
from proxy.core.placement.scores import predict

if TYPE_CHECKING:
    from proxy.fleet.engine import Engine

# Nobody waits longer than this many times the expected time of a first token.
LENIENCE = 2.0


class PeerRequest(Struct, eq=False):
    """A request that another kvpin has on the engine."""

    placed: PlacedRequest
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # its answer has begun, or never will
    has_answer: bool = False

    @property
    def hashes(self) -> Sequence[BlockHash]:
        """The full blocks of its prompt; empty when the prompt is not known."""
        return self.placed.hashes

    @property
    def found(self) -> int:
        """Leading blocks that the engine is expected to hold; the request computes the others."""
        chain = self.placed.chain
        return (chain.n_tokens - self.placed.work.computed) // chain.tokens_per_block if chain else 0


class Lease(Struct, eq=False):
    """A request's hold on an engine, as a context."""

    engine: Engine
    placement: Placement
    placer: Placer
    placed: PlacedRequest
    started: float  # when it was placed here, in monotonic seconds
    removals: int  # blocks the engine had removed by then
    ended: Callable[[Lease], None]  # called once it is over
    on_lost: Callable[[], None]  # called if its engine is lost meanwhile
    # Asked when its request is cancelled: was it because the engine was lost or too slow?
    is_late: Callable[[], bool]
    tell: Callable[..., Telling] | None = None  # tells other kvpins that it begins; None if there are none
    telling: Telling | None = None  # tells them of its further steps; None before it has begun
    gathered: float = 0.0  # when no other request computed its prefix any more; until then, `started`
    first_byte_s: float | None = None  # seconds from placement to the first byte; None before that
    # The answer is complete, and kvpin's token ids were right: the engine now holds the prompt.
    succeeded: bool = False
    failed: bool = False  # the answer is an error, or the engine gave none
    found: int = 0  # leading blocks that the engine is expected to hold; the request computes the others
    report: Usage | None = None
    is_lost: bool = False  # its engine was lost while it ran
    connections: int = 0  # those of its engine when it began
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # the answer has begun, or never will

    async def confirm(self) -> None:
        """Waits until it is sure that the process which was leased answers. Raises EngineChanged."""
        await self.engine.confirm(self.connections)

    def __enter__(self) -> Self:
        self.gathered, self.connections = self.started, self.engine.connections
        self.engine.leases.add(self)
        if self.placed.part is not Role.DECODE:
            self.begins()
        return self

    def begins(self) -> None:
        """The engine gets work. A decode leg begins when another engine has computed the prompt."""
        if self.tell is not None:
            self.telling = self.tell(self.placed.work, part=self.placed.part)

    async def computes(self, *, streams: bool) -> None:
        """A decode leg begins without the prompt's KV: its engine has to compute the prompt itself. Its first
        token will be seen if it `streams`."""
        self.placer.computes(time.monotonic(), self.placed, self.placement.work, streams=streams)
        self.begins()
        if self.has_company():
            await self.gather()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):
            self.failed = self.is_late()
        elif isinstance(error, EngineError):
            self.failed = True
        self.engine.leases.discard(self)
        if self.failed:
            self.engine.failed += 1
        elif self.placed.part is Role.PREFILL:
            self.engine.prefilled += 1
        else:
            self.engine.served += 1
        self.begun.set()
        self.ended(self)

    def has_company(self) -> bool:
        """Notes what it computes. True if another request may be computing its prefix, and the engine would
        compute that twice: then it has to `gather`. A decode leg computes no prompt, so it waits for none."""
        chain, info = self.placed.chain, self.engine.info
        if chain is None or (info is not None and info.shares_prefill) or self.placed.part is Role.DECODE:
            return False
        self.found = self.placement.predicted_tokens // chain.tokens_per_block
        return self.placement.chosen.pending_tokens > 0

    async def gather(self) -> None:
        """Waits for the request that computes this prefix. Each lease does so before its engine gets the
        request, whatever its part. If the other request fails or takes too long, this one computes the
        prefix, and later ones may wait for it."""
        chain, book, shared = self.placed.chain, self.placed.book, self.placement.chosen.pending_tokens
        if chain is None or await self._is_shared(book.rates.prefill_s(shared)):
            return
        placement = self.placement  # it computes every block that the engine lacks, pending blocks included
        match = self.placer.match(chain).get(book.engine, NOTHING)
        predicted = predict(chain, match.blocks - match.pending, book.tokens_per_block)
        self.found = predicted // chain.tokens_per_block
        gpu_tokens = min(placement.gpu_tokens, predicted)
        self.placement = replace(placement, predicted_tokens=predicted, gpu_tokens=gpu_tokens)
        self.refine_work(self.placement.work)

    async def _is_shared(self, shared_s: float) -> bool:
        """Waits for the request that computes the shared prefix. Returns whether the engine holds it now.

        `shared_s`: seconds that computing the shared part alone would take.
        """
        ledger, has_failed = self.placed.book.ledger, False
        while other := leader(self.engine.underway, self.hashes, self.found):
            if (remaining := ledger.remaining(time.monotonic(), other.placed.ticket)) is None:
                return True
            if (wait_s := patience_s(remaining, shared_s)) is None:
                return False
            try:
                async with asyncio.timeout(wait_s):
                    await other.begun.wait()
            except TimeoutError:
                return not remaining.seen
            if other.has_answer:
                return True
            has_failed = True
        return not has_failed

    @property
    def hashes(self) -> Sequence[BlockHash]:
        """The full blocks of its prompt; empty when the prompt is not known."""
        return self.placed.hashes

    @property
    def has_answer(self) -> bool:
        """True if its answer has begun."""
        return self.first_byte_s is not None

    def refine(self, hold: Hold) -> Placement:
        """The placement, with the hold's own prediction of cached tokens if it has one. A prediction is not
        firm while requests in flight may evict what it rests on."""
        if hold.cached_tokens is not None:
            self.placement = replace(self.placement, predicted_tokens=hold.cached_tokens, firm=hold.firm)
        elif not hold.firm or (self.placed.may_be_evicted and self.placement.predicted_tokens):
            self.placement = replace(self.placement, firm=False)
        return self.placement

    def refine_work(self, work: Work) -> None:
        """Replaces the estimate of its work on the engine."""
        self.placer.refine(self.placed, work)
        if self.telling is not None:
            self.telling.tell(work=work)

    @property
    def evicted_since(self) -> bool:
        """True if the engine has evicted anything since the placement."""
        return self.engine.removals != self.removals

    def first_byte(self, *, streamed: bool) -> None:
        """The answer has begun. A stream's first byte is its first token; other answers are whole by then."""
        self.first_byte_s = time.monotonic() - self.started
        self.begun.set()
        if streamed:
            self.placer.first_token(time.monotonic(), self.placed)
        else:
            self.placer.answered(time.monotonic(), self.placed)
        if self.telling is not None:
            self.telling.tell(step=Step.STREAMS if streamed else Step.ANSWERED)


def leader(
    underway: Iterable[Lease | PeerRequest], hashes: Sequence[BlockHash], blocks: int
) -> Lease | PeerRequest | None:
    """The running request that computes block number `blocks` of a chain; None if there is none."""
    for each in underway:
        if each.found < blocks <= len(each.hashes) and each.hashes[blocks - 1] == hashes[blocks - 1]:
            return each
    return None


def patience_s(remaining: Remaining, shared_s: float) -> float | None:
    """The longest wait for a running request, in seconds; None if running beside it is faster. Its first
    token comes after `remaining`; computing what both share takes `shared_s`."""
    if remaining.own_s >= 2 * shared_s:
        return None
    expected_s = remaining.before_s + remaining.own_s
    return LENIENCE * expected_s if remaining.seen else expected_s
