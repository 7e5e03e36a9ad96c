"""The write path: engine KV events → index, reported cached tokens → audit.

engine KV events ──→ EngineView.apply → index
reported tokens  ──→ EngineAudit.observe → trust → resync
"""

from __future__ import annotations

import asyncio

import structlog

from engine_adapter import Capability, EngineError, ViewCurrent, ViewLost
from proxy.core.view import EngineView
from proxy.fleet import Engine, Fleet, Pool
from proxy.tasks import Supervisor

log = structlog.get_logger(__name__)

RETRY_S = 1.0
# Applying an event takes microseconds; after this many the loop gets a turn, so that requests do not wait.
BATCH = 64


class Ingest:
    """Keeps the index true to what the engines say."""

    def __init__(self, fleet: Fleet, tasks: Supervisor) -> None:
        self._fleet = fleet
        self._tasks = tasks

    def follow(self, engine: Engine, pool: Pool) -> None:
        """Starts, or starts over, following the engine's events; ends with `leave`."""
        if has_exact_events(engine, pool):
            self._tasks.keep(_task(engine), lambda: self._follow(engine, pool))
        else:
            engine.audit.lost("no KV events that fit: learning from responses")

    def leave(self, engine: Engine) -> None:
        """The engine is gone."""
        self._tasks.cancel(_task(engine))

    def audit(self, engine: Engine, predicted: int, reported: int, *, evicted_since: bool = False) -> None:
        """Holds a prediction against the engine's report, in tokens; persistent misses start a resync."""
        if engine.audit.observe(predicted, reported, evicted_since=evicted_since):
            log.warning("predictions miss: the view is rebuilt", engine=engine.id, why=engine.audit.why)
            pool = self._fleet.pool_of(engine)
            if pool is not None:
                self.follow(engine, pool)

    async def _follow(self, engine: Engine, pool: Pool) -> None:
        while True:
            reason = "it ended"
            try:
                await self._apply_all(engine, pool)
            except EngineError as error:
                reason = str(error)
                engine.suspect(error)
            engine.audit.lost(f"the event stream broke: {reason}")
            await asyncio.sleep(RETRY_S)

    async def _apply_all(self, engine: Engine, pool: Pool) -> None:
        """One subscription, from an empty view to its end."""
        view = engine.view = EngineView(engine.id, pool.index, pool.root_of, pool.tokens_per_block)
        applied = 0
        async for event in engine.adapter.events():
            if isinstance(event, ViewLost):
                engine.audit.lost(event.reason)
                engine.learned.clear()
                log.info("an engine's cache is viewed afresh", engine=engine.id, why=event.reason)
            view.apply(event)
            if isinstance(event, ViewCurrent):
                engine.audit.synced()
                log.info(
                    "the view of the engine's cache is exact", engine=engine.id, blocks=view.counts.stored
                )
            applied += 1
            if applied % BATCH == 0:
                await asyncio.sleep(0)


def has_exact_events(engine: Engine, pool: Pool) -> bool:
    """Whether the engine sends events, in blocks that map onto the pool's."""
    own = engine.info.tokens_per_block if engine.info is not None else None
    return engine.can(Capability.KV_EVENTS) and own is not None and own % pool.tokens_per_block == 0


def _task(engine: Engine) -> str:
    return f"events {engine.id}"
