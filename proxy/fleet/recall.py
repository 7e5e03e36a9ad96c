"""Keeps the knowledge of engines' caches over a restart of kvpin.

    keep     an engine → its memory: plain data, to be written to disk
    recall   a memory, and an engine with the same process → view, or model, of its cache

An engine with events is the same if it still has the last batch that kvpin read; it then replays the later
batches. An engine without events is the same if its process is. Any other memory is dropped.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable
from itertools import islice

import msgspec
import structlog

from engine_adapter import EventPosition, Tier
from proxy.core.audit import Trust
from proxy.core.index.runs import KeptRun
from proxy.core.index.view import EngineView
from proxy.fleet.engine import Engine
from proxy.fleet.pool import Pool
from proxy.fleet.salts import KeptSalts

log = structlog.get_logger(__name__)

# Runs that are packed or unpacked in one turn of the event loop, in well below 1 ms.
SLICE_RUNS = 4

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[KeptRun]).decode


class EngineMemory(msgspec.Struct, frozen=True):
    """The knowledge of one engine's cache.

    Attributes:
        salts: the cache salts of each tenant with KV there.
        position: the place in its events up to which `runs` are right; None without such events.
        runs: its view, in parts: packed lists of KeptRun.
        learned: the prompts it probably holds, the next to be evicted first: hashes as uint64.
    """

    engine: str
    model: str
    tokens_per_block: int
    instance: str
    salts: KeptSalts
    position: EventPosition | None = None
    runs: list[msgspec.Raw] = []
    learned: list[bytes] = []


async def keep(engine: Engine, pool: Pool) -> EngineMemory | None:
    """The memory of an engine; None if kvpin could not verify it later."""
    view, info = engine.view, engine.info
    position = engine.adapter.event_position() if engine.audit.trust is Trust.PRECISE else None
    if info is None or (position is None and not engine.learned):
        return None
    runs: list[msgspec.Raw] = []
    learned: list[bytes] = []
    salts = engine.salts.kept()
    if view is not None and position is not None:
        # Events that are applied meanwhile are replayed later: applying them twice changes nothing.
        rest = view.runs()
        while part := [run.kept() for run in islice(rest, SLICE_RUNS)]:
            runs.append(msgspec.Raw(_pack(part)))
            await asyncio.sleep(0)
    else:
        learned = [array("Q", stretch).tobytes() for stretch in engine.learned.stretches()]
    return EngineMemory(
        engine.id, pool.model, pool.tokens_per_block, info.instance, salts, position, runs, learned
    )


class Memories:
    """The memories of engines that have not connected yet."""

    def __init__(self, memories: Iterable[EngineMemory] = ()) -> None:
        self._by_engine = {memory.engine: memory for memory in memories}

    def of(self, engine: str) -> EngineMemory | None:
        """The memory of an engine, which is not taken."""
        return self._by_engine.get(engine)

    def take(self, engine: Engine, pool: Pool) -> EngineMemory | None:
        """Takes the memory of an engine; None if there is none for its model and block size."""
        memory = self._by_engine.pop(engine.id, None)
        if memory is None:
            return None
        then, now = (memory.model, memory.tokens_per_block), (pool.model, pool.tokens_per_block)
        if then != now:
            log.warning(
                "state from before the restart is dropped: the engine has another model or block size",
                engine=engine.id,
                before=list(then),
                now=list(now),
            )
            return None
        return memory


async def recall_view(engine: Engine, view: EngineView, memory: EngineMemory) -> None:
    """Fills the view of an engine that still has the events since the memory."""
    engine.learned.clear()
    engine.salts.restore(memory.salts)
    for part in memory.runs:
        for run in _unpack(part):
            view.restore(run)
        await asyncio.sleep(0)
    log.info("cache view restored from before the restart", engine=engine.id, blocks=view.counts.stored)


def recall_learned(engine: Engine, pool: Pool, memory: EngineMemory) -> None:
    """Fills the model of an engine's cache, if its process is the same."""
    if engine.info is None or memory.instance != engine.info.instance or not memory.learned:
        return
    engine.salts.restore(memory.salts)
    for packed in memory.learned:
        stretch = tuple(array("Q", packed))
        if engine.learned.restore(stretch):
            pool.index.store(engine.id, Tier.GPU, stretch)
    log.info(
        "learned cache content restored from before the restart",
        engine=engine.id,
        blocks=len(engine.learned),
    )
