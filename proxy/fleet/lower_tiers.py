"""Host and disk tiers: asked for blocks that no event reports, and restored from before the next turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from engine_adapter import Capability, EngineError, KvVerb, Tier, log_text
from proxy.core.index.blocks import BlockHash, Chain
from proxy.core.placement.load import Work
from proxy.core.placement.tiering import Below, Thread, Threads, gain, soon
from proxy.fleet.engine import Engine, EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.lease import Lease
from proxy.fleet.pool import Pool
from proxy.prompt import Prompt
from proxy.request.records import RequestRecord
from proxy.runtime import Supervisor

# --- asks host and disk tiers for their blocks, where the engine's events do not report these -----------
# After placement, kvpin asks such tiers if they may hold more of the prompt than the GPU. Their answer is
# the prediction, exact to the token. The index keeps the answer, and the blocks that the request will store
# there, as hints: later placements use hints, predictions do not.


async def look_below(
    pool: Pool, engine: Engine, lease: Lease, prompt: Prompt | None, chain: Chain | None
) -> None:
    """Refines the placement of a leased request with what the engine's lower tiers hold of it now."""
    placement = lease.placement
    whole = _whole_tokens(engine, chain)
    if prompt is None or chain is None or whole <= placement.gpu_tokens:
        return
    is_text = prompt.whole and not prompt.media  # tiers are asked by token ids, which do not identify images
    below = await engine.adapter.lookup(prompt.kv) if is_text else None
    if below is None:
        lease.placement = replace(placement, predicted_tokens=placement.gpu_tokens, firm=False)
        return
    on_host, held = below.host // pool.tokens_per_block, (below.host + below.disk) // pool.tokens_per_block
    for each in _sharing(pool, engine):
        each.below.forget(chain.hashes, on_host)
        pool.index.remove(each.id, Tier.HOST, chain.hashes[on_host:])
        pool.index.remove(each.id, Tier.DISK, chain.hashes[on_host:])
        _hint(pool, each, chain.hashes, on_host, held)
    cached = max(placement.gpu_tokens, below.cached)
    # A tier may not yet report what was just stored: the true number can only be higher.
    firm = placement.firm and below.host + below.disk >= whole
    lease.placement = replace(placement, predicted_tokens=cached, firm=firm)
    host = min(below.host, cached) - placement.gpu_tokens
    disk = cached - placement.gpu_tokens - max(host, 0)
    lease.refine_work(Work(placement.n_tokens - cached, max(host, 0), max(disk, 0)))


def expect_below(pool: Pool, engine: Engine, chain: Chain | None) -> None:
    """Notes that the engine served this chain and writes it to its lower tiers."""
    blocks = _whole_tokens(engine, chain) // pool.tokens_per_block
    if chain is not None and blocks:
        for each in _sharing(pool, engine):
            _hint(pool, each, chain.hashes, blocks, blocks)


def _whole_tokens(engine: Engine, chain: Chain | None) -> int:
    """The most tokens of a prompt that lower tiers can hold; 0 where there are none to ask."""
    unit = engine.info.tokens_per_chunk if engine.info is not None else None
    return chain.n_tokens // unit * unit if unit and chain is not None else 0


def _hint(pool: Pool, engine: Engine, hashes: tuple[BlockHash, ...], host: int, held: int) -> None:
    """The first blocks of a chain, `host` of them, lie on the host tier, those up to `held` on disk."""
    pool.index.store(engine.id, Tier.HOST, hashes[:host])
    pool.index.store(engine.id, Tier.DISK, hashes[host:held])
    evicted = engine.below.learn(hashes[:held])
    pool.index.remove(engine.id, Tier.HOST, evicted)
    pool.index.remove(engine.id, Tier.DISK, evicted)


def _sharing(pool: Pool, engine: Engine) -> list[Engine]:
    """The engines of the pool that share the engine's lower tiers, itself included."""
    name = engine.info.shared_tiers if engine.info is not None else None
    return [
        each
        for each in pool.engines.values()
        if each is engine or (name is not None and each.info is not None and each.info.shared_tiers == name)
    ]


# --- restores KV to the GPU before the turn that needs it -----------------------------------------------
# answered requests → threads → due? → worth its room? → adapter.operate(RESTORE), one at a time per engine
#
# It uses idle time only. An engine that computes a prompt is left alone. When a prompt arrives, a restore
# ends after its current slice. At most a quarter of an engine's time goes to it.

log = structlog.get_logger(__name__)

TICK_S = 0.1
# Share of an engine's time. A request that arrives meanwhile waits for one slice of a restore at most.
MOST_TIME = 0.25
# Seconds that one tick may hold the event loop. The next tick looks at the remaining threads.
LOOK_S = 0.001


@dataclass(frozen=True, slots=True)
class NextTurn:
    """The data that a restore of a thread needs."""

    model: str
    prompt: Prompt


class _Choice(NamedTuple):
    """A thread that an engine could restore, and what that is worth, see `tiering.gain`."""

    gain: float
    pool: Pool
    engine: Engine
    thread: Thread[NextTurn]


@dataclass(slots=True)
class RestoreAhead:
    """Watches finished requests, and restores the KV of the turns that are due next."""

    _fleet: Fleet
    _tasks: Supervisor  # runs the restores
    clock: Callable[[], float] = time.monotonic
    _threads: Threads[NextTurn] = field(default_factory=Threads)
    # Engine → when it may restore again, in monotonic seconds; while it restores: never.
    _not_before: dict[str, float] = field(default_factory=dict)

    def observe(self, record: RequestRecord) -> None:
        """Notes a finished request: its next turn may need its KV."""
        prompt, placement = record.prompt, record.placement
        if prompt is None or placement is None or record.error is not None or not prompt.whole:
            return
        engine = self._fleet.engines.get(placement.engine)
        if engine is None or not _is_able(engine):
            return
        if (pool := self._fleet.pool_of(engine)) is None:
            return
        hashes = record.chain.hashes if record.chain is not None else ()
        now = self.clock()
        started = now - (record.duration_s or 0.0)
        turn, called = NextTurn(pool.model, prompt), record.called_tool
        before = self._threads.turn(started, now, hashes, len(prompt.token_ids), turn, called_tool=called)
        if before is not None and before.restored_on is not None:
            is_used = (
                before.restored_on == engine.id
                and placement.gpu_tokens > before.on_gpu * pool.tokens_per_block
            )
            self._count(before, used=is_used)

    async def run(self) -> None:
        """Restores what is due, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Starts the restores that are worth it now, at most one per engine."""
        now = self.clock()
        self._not_before = {engine: when for engine, when in self._not_before.items() if when > now}
        for thread in self._threads.lapsed(now):
            if thread.restored_on is not None:
                self._count(thread, used=False)
        best: dict[str, _Choice] = {}
        for thread in self._threads.due(now):
            if (choice := self._look_at(thread, now)) is not None:
                rival = best.get(choice.engine.id)
                if choice.gain > (rival.gain if rival is not None else 0.0):
                    best[choice.engine.id] = choice
            if self.clock() - now >= LOOK_S:
                break
        for engine_id, choice in best.items():
            choice.thread.restored_on = engine_id
            self._not_before[engine_id] = inf
            self._tasks.start(f"restore ahead on {engine_id}", self._restore(choice))

    def _look_at(self, thread: Thread[NextTurn], now: float) -> _Choice | None:
        """The engine that holds most of a thread, and the gain of a restore there; None where no block of it
        lies below the GPU, or the engine is busy."""
        if (pool := self._fleet.pools.get(thread.prompt.model)) is None:
            return None
        matches = pool.index.match(thread.hashes)
        best = max(matches, key=lambda engine: (matches[engine].blocks, matches[engine].lead), default=None)
        if best is None:
            return None
        engine, match = self._fleet.engines[best], matches[best]
        thread.on_gpu = match.lead
        blocks = match.host + match.disk
        may_restore = now >= self._not_before.get(best, now)
        if not blocks or not may_restore or not _is_able(engine) or not _is_quiet(engine, now):
            return None
        below = Below(thread, blocks, self._threads.closes(thread))
        return _Choice(_gain(pool, engine, below, now), pool, engine, thread)

    async def _restore(self, choice: _Choice) -> None:
        engine, thread = choice.engine, choice.thread
        started, done = self.clock(), 0
        try:
            async with aclosing(engine.adapter.operate(KvVerb.RESTORE, thread.prompt.prompt.kv)) as steps:
                async for step in steps:
                    done = step.done
                    if not _is_quiet(engine, self.clock()):
                        break
        except EngineError as error:
            event = "restore ahead failed; the next turn computes the rest"
            log.info(event, engine=engine.id, error=log_text(error))
        finally:
            now = self.clock()
            self._not_before[engine.id] = now + (now - started) * (1 / MOST_TIME - 1)
        engine.ahead.restores += 1
        engine.ahead.blocks += done
        pool, book, info = choice.pool, choice.pool.placer.books.get(engine.id), engine.info
        if book is None or info is None:
            return
        book.residents.use(now, thread.hashes, 0)
        if book.on_gpu is not None:  # they are on its GPU again
            blocks = done * (info.tokens_per_block or pool.tokens_per_block) // pool.tokens_per_block
            book.on_gpu.use(now, thread.hashes[: thread.on_gpu + blocks], blocks)

    def _count(self, thread: Thread[NextTurn], *, used: bool) -> None:
        if (engine := self._fleet.engines.get(thread.restored_on or "")) is not None:
            engine.ahead.used += used
            engine.ahead.wasted += not used
        thread.restored_on = None


def _is_able(engine: Engine) -> bool:
    """True if the engine has a tier of blocks below its GPU to restore from. An engine with slots has none: a
    restore there takes the place of a whole conversation."""
    info = engine.info
    return (
        engine.state is EngineState.READY
        and engine.can(Capability.RESTORE)
        and bool(info and info.host_blocks)
    )


def _is_quiet(engine: Engine, now: float) -> bool:
    """True if no request waits for its first token there."""
    load = engine.ledger.view(now)
    return load.in_flight == load.decoding


def _gain(pool: Pool, engine: Engine, below: Below[NextTurn], now: float) -> float:
    book, returns = pool.placer.books[engine.id], pool.placer.demand.returns
    on_gpu = book.on_gpu if book.on_gpu is not None else book.residents
    gpu, _, _, pending = pool.index.counts(engine.id)

    def lost(blocks: int, within_s: float) -> float:
        return on_gpu.lost(now, blocks, lambda idle_s: soon(returns, idle_s, within_s))

    return gain(below, now, max((book.gpu_blocks or 0) - gpu - pending, 0), lost, returns)
