"""The write path: engine KV events → index, reported cached tokens → audit.

engine KV events ──→ slices ──→ EngineView.apply → index
reported tokens  ──→ EngineAudit.observe → trust → resync
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import structlog

from engine_adapter import (
    BlocksRemoved,
    CacheCleared,
    Capability,
    EngineError,
    ViewCurrent,
    ViewLost,
    ViewResumed,
)
from engine_adapter.types import KvEvent
from proxy.core.index.blocks import BlockHash
from proxy.core.index.view import EngineView, slices
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool
from proxy.fleet.saved_state import EngineMemory, recall_learned, recall_view, take_memory
from proxy.runtime import Supervisor

log = structlog.get_logger(__name__)

RETRY_S = 1.0
_EXACT, _EXACT_SINCE = "cache view is exact", "cache view is exact for new events; older content is unknown"
_FIRST_VIEW, _RESET = "learning the cache view from events", "cache view reset; relearning from events"
# After applying events for 1 ms, the event loop gives requests a turn. The engines share the time, down to
# turns of 0.1 ms: shorter ones would be spent on switching between tasks.
TURN_S = 0.001
MIN_TURN_S = 0.0001


@dataclass(slots=True)
class Ingest:
    """Keeps the index equal to the engines' reports.

    `_owner_of` names the tenant of a cache salt, None for a salt of no tenant. `_memories` were saved before
    the restart.
    """

    _fleet: Fleet
    _tasks: Supervisor
    _owner_of: Callable[[str], str | None] = lambda _salt: None
    _memories: dict[str, EngineMemory] = field(default_factory=dict)
    _followed: int = 0  # engines

    def follow(self, engine: Engine, pool: Pool) -> None:
        """Starts following the engine's events, or starts again; ends with `leave`."""
        if has_exact_events(engine, pool):
            self._tasks.keep(f"events {engine.id}", lambda: self._follow(engine, pool))
        else:
            self.leave(engine)
            engine.view = None
            engine.audit.lost("no usable KV events: learning from responses")
            if (memory := take_memory(self._memories, engine, pool)) is not None:
                recall_learned(engine, pool, memory)

    def leave(self, engine: Engine) -> None:
        """Stops following an engine that is gone."""
        self._tasks.cancel(f"events {engine.id}")

    def audit(self, engine: Engine, predicted: int, reported: int, *, evicted_since: bool = False) -> None:
        """Compares a prediction with the engine's report, in tokens. Persistent misses start a resync."""
        pool = self._fleet.pool_of(engine)
        within = exact_within(engine, pool)
        if engine.audit.observe(predicted, reported, within=within, evicted_since=evicted_since):
            log.warning(
                "predictions miss; relearning the cache view from events",
                engine=engine.id,
                why=engine.audit.why,
            )
            if pool is not None:
                self.follow(engine, pool)

    async def _follow(self, engine: Engine, pool: Pool) -> None:
        self._followed += 1
        try:
            while True:
                reason = "the engine ended it"
                try:
                    await self._apply_all(engine, pool)
                except EngineError as error:
                    reason = str(error)
                    engine.suspect(error)
                engine.audit.lost(f"the event stream broke: {reason}")
                await asyncio.sleep(RETRY_S)
        finally:
            self._followed -= 1

    async def _apply_all(self, engine: Engine, pool: Pool) -> None:
        """Follows one subscription: begins with an empty view, ends with the stream."""

        def root_of(salt: str | None, lora: str | None) -> BlockHash:
            if salt is not None:
                engine.salts.note(self._owner_of(salt), salt)
            return pool.root_of(salt, lora)

        was_known = any(pool.index.counts(engine.id))
        view = engine.view = EngineView(engine.id, pool.index, root_of, pool.tokens_per_block)
        memory = take_memory(self._memories, engine, pool)
        turn_ends = 0.0
        async with aclosing(engine.adapter.events(memory.position if memory else None)) as events:
            async for event in events:
                if isinstance(event, ViewLost):
                    engine.audit.lost(event.reason)
                    engine.learned.clear()
                    log.info(_RESET if was_known else _FIRST_VIEW, engine=engine.id, why=event.reason)
                    was_known = True
                else:
                    _before(event, engine, pool)
                for part in slices(event):
                    view.apply(part)
                    if time.monotonic() > turn_ends:
                        await asyncio.sleep(0)
                        turn_ends = time.monotonic() + self._turn_s()
                if isinstance(event, ViewResumed) and memory is not None:
                    await recall_view(engine, view, memory)
                if isinstance(event, ViewCurrent):
                    engine.audit.synced()
                    what = _EXACT if view.complete else _EXACT_SINCE
                    log.info(what, engine=engine.id, blocks=view.counts.stored)

    def _turn_s(self) -> float:
        """Seconds for which an engine's events may be applied in one turn."""
        return max(TURN_S / max(self._followed, 1), MIN_TURN_S)


def _before(event: KvEvent, engine: Engine, pool: Pool) -> None:
    """What has to be known before an event is applied."""
    if isinstance(event, CacheCleared):
        engine.emptied.append(time.time())
    elif isinstance(event, BlocksRemoved):
        pool.placer.told(engine.id)


def has_exact_events(engine: Engine, pool: Pool) -> bool:
    """True if the engine sends events, and one of the two block sizes is a multiple of the other."""
    own = engine.info.tokens_per_block if engine.info is not None else None
    fits = own is not None and (own % pool.tokens_per_block == 0 or _has_pages(engine, pool))
    return engine.can(Capability.KV_EVENTS) and fits


def exact_within(engine: Engine | None, pool: Pool | None) -> int:
    """A prediction is exact if the engine reports less than that many tokens more; see `is_exact`."""
    is_coarse = engine is not None and pool is not None and _has_pages(engine, pool)
    return pool.tokens_per_block if pool is not None and is_coarse else 1


def _has_pages(engine: Engine, pool: Pool) -> bool:
    """True if several of the engine's blocks make one of the pool's."""
    own = engine.info.tokens_per_block if engine.info is not None else None
    return own is not None and own < pool.tokens_per_block and pool.tokens_per_block % own == 0
