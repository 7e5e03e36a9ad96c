"""Brings KV back to the GPU ahead of the turn that will need it.

    answered requests → threads → due? → worth its room? → adapter.operate(RESTORE), one at a time an engine

It takes what nobody needs: an engine that computes a prompt is left alone, a restore ends after its current
slice when a prompt comes, and no more than a part of an engine's time is spent on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

import structlog

from engine_adapter import Capability, EngineError, KvVerb, Tier
from proxy.core.tiering import Below, Thread, Threads, choose, soon
from proxy.engine import Engine, EngineState
from proxy.fleet import Fleet, Pool
from proxy.prompt import Prompt
from proxy.records import RequestRecord
from proxy.tasks import Supervisor

log = structlog.get_logger(__name__)

TICK_S = 0.1
# Of an engine's time; requests that come meanwhile wait for a slice of a restore at most.
MOST_TIME = 0.25
# Threads looked at in one tick: a bound on what a tick costs.
MOST_THREADS = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """What it takes to bring a thread back."""

    model: str
    prompt: Prompt


class RestoreAhead:
    """Watches requests, and restores what is due.

    Args:
        fleet: the engines.
        tasks: runs the restores.
        clock: monotonic seconds.
    """

    def __init__(
        self, fleet: Fleet, tasks: Supervisor, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._tasks = tasks
        self._clock = clock
        self._threads = Threads[Turn]()
        self._not_before: dict[str, float] = {}  # engine → when it may restore again
        self._restoring: set[str] = set()

    def observe(self, record: RequestRecord) -> None:
        """A request is over."""
        prompt, placement = record.prompt, record.placement
        if prompt is None or placement is None or record.error is not None or not prompt.whole:
            return
        engine = self._fleet.engines.get(placement.engine)
        pool = self._fleet.pool_of(engine) if engine is not None else None
        if engine is None or pool is None or not _is_able(engine):
            return
        chain = pool.chain(prompt)
        hashes = chain.hashes if chain is not None else ()
        now = self._clock()
        started = now - (record.duration_s or 0.0)
        before = self._threads.turn(started, now, hashes, len(prompt.token_ids), Turn(pool.model, prompt))
        if before is not None and before.restored_on is not None:
            is_used = (
                before.restored_on == engine.id
                and placement.gpu_tokens > before.on_gpu * pool.tokens_per_block
            )
            self._count(before, used=is_used)

    async def run(self) -> None:
        """Restores what is due, for as long as it is not cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Starts what is worth it now, at most one restore an engine."""
        now = self._clock()
        for thread in self._threads.lapsed(now):
            if thread.restored_on is not None:
                self._count(thread, used=False)
        by_engine: dict[str, list[Below[Turn]]] = {}
        for thread in self._threads.due(now)[:MOST_THREADS]:
            found = self._below(thread)
            if found is not None:
                engine, blocks = found
                below = Below(thread, blocks, self._threads.closes(thread))
                by_engine.setdefault(engine.id, []).append(below)
        for engine_id, candidates in by_engine.items():
            self._start(self._fleet.engines[engine_id], candidates, now)

    def _below(self, thread: Thread[Turn]) -> tuple[Engine, int] | None:
        """The engine that holds most of a thread, and how many blocks of it lie below its GPU."""
        pool = self._fleet.pools.get(thread.prompt.model)
        if pool is None:
            return None
        matches = pool.index.match(thread.hashes)
        best = max(matches, key=lambda engine: (matches[engine].blocks, matches[engine].lead), default=None)
        if best is None:
            return None
        engine, match = self._fleet.engines[best], matches[best]
        blocks = match.host + match.disk
        thread.on_gpu = match.lead
        return (engine, blocks) if blocks and _is_able(engine) else None

    def _start(self, engine: Engine, candidates: list[Below[Turn]], now: float) -> None:
        """Has the engine bring back the best of `candidates`, if it has nothing better to do."""
        pool = self._fleet.pool_of(engine)
        may_restore = engine.id not in self._restoring and now >= self._not_before.get(engine.id, now)
        if pool is None or not may_restore or not _is_quiet(engine, now):
            return
        returns = pool.placer.demand.returns
        chosen = choose(
            candidates, now, _free_blocks(pool, engine), partial(_lost, pool, engine, now), returns
        )
        if chosen is not None:
            chosen.thread.restored_on = engine.id
            self._restoring.add(engine.id)
            self._tasks.start(f"restore ahead on {engine.id}", self._restore(engine, pool, chosen.thread))

    async def _restore(self, engine: Engine, pool: Pool, thread: Thread[Turn]) -> None:
        started, done = self._clock(), 0
        try:
            steps = engine.adapter.operate(KvVerb.RESTORE, thread.prompt.prompt.kv)
            async for step in steps:
                done = step.done
                if not _is_quiet(engine, self._clock()):
                    break
            if isinstance(steps, AsyncGenerator):
                await steps.aclose()
        except EngineError as error:
            log.info("restoring ahead failed", engine=engine.id, error=str(error))
        finally:
            now = self._clock()
            self._restoring.discard(engine.id)
            self._not_before[engine.id] = now + (now - started) * (1 / MOST_TIME - 1)
        engine.ahead.restores += 1
        engine.ahead.blocks += done
        seat = pool.placer.seats.get(engine.id)
        if seat is not None:
            seat.residents.use(now, thread.hashes, 0)

    def _count(self, thread: Thread[Turn], *, used: bool) -> None:
        engine = self._fleet.engines.get(thread.restored_on or "")
        if engine is not None:
            engine.ahead.used += used
            engine.ahead.wasted += not used
        thread.restored_on = None


def _is_able(engine: Engine) -> bool:
    """Whether it has a tier of blocks below its GPU that can be restored from. A slot of a llama-server is no
    such thing: what is brought back takes a whole conversation's place."""
    info = engine.info
    return (
        engine.state is EngineState.READY
        and engine.can(Capability.RESTORE)
        and bool(info and info.host_blocks)
    )


def _is_quiet(engine: Engine, now: float) -> bool:
    """Whether nobody waits for a first token there."""
    load = engine.ledger.view(now)
    return load.in_flight == load.decoding


def _free_blocks(pool: Pool, engine: Engine) -> int:
    held = pool.index.held(engine.id, Tier.GPU) + pool.index.pending(engine.id)
    return max((pool.placer.seats[engine.id].gpu_blocks or 0) - held, 0)


def _lost(pool: Pool, engine: Engine, now: float, blocks: int, within_s: float) -> float:
    """Of so many blocks that would leave its GPU, those that are asked for within that time, on average. What
    was used least lies on the host already, and comes before them."""
    residents, below = pool.placer.seats[engine.id].residents, pool.index.held(engine.id, Tier.HOST)

    def returns(idle_s: float) -> float:
        return soon(pool.placer.demand.returns, idle_s, within_s)

    return residents.lost(now, below + blocks, returns) - residents.lost(now, below, returns)
