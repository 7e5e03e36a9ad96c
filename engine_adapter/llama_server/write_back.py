"""Saves slots in idle time, so that overwriting one later loses nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from engine_adapter.errors import EngineError
from engine_adapter.llama_server.plan import worth_saving
from engine_adapter.llama_server.scheduler import SlotScheduler
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from engine_adapter.llama_server.slots import Operation, Slot

# A slot is written back after it has been idle for this long.
IDLE_S = 0.1
POLL_S = 0.25


async def write_back(scheduler: SlotScheduler) -> None:
    """Saves idle slots that are worth it; runs until it is cancelled."""
    while True:
        scheduler.changed.clear()
        slot = _worth_most(scheduler)
        if slot is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if dirty_slots(scheduler) else None):
                    await scheduler.changed.wait()
            await asyncio.sleep(IDLE_S)
            continue
        scheduler.contents.counts.write_backs += 1
        with suppress(EngineError):
            await scheduler.take(slot.id, Operation.SAVE, scheduler.contents.save)


async def save_all(scheduler: SlotScheduler) -> None:
    """Saves every slot that is not saved yet: first the idle ones, then those that were busy."""
    await save_idle(scheduler)
    await scheduler.settled()
    await save_idle(scheduler)


async def save_idle(scheduler: SlotScheduler) -> None:
    """Saves every idle slot that is not saved yet; stops at the first that cannot be saved."""
    for slot in dirty_slots(scheduler):
        if not slot.is_idle:
            continue
        with suppress(EngineError):
            if await scheduler.take(slot.id, Operation.SAVE, scheduler.contents.save):
                continue
        return


def dirty_slots(scheduler: SlotScheduler) -> list[Slot]:
    """Idle slots with known owners whose content lies in no file."""
    if not scheduler.contents.can_restore:
        return []
    return [slot for slot in scheduler.contents.table.idle() if slot.dirty and slot.salt != UNKNOWN_OWNER]


def _worth_most(scheduler: SlotScheduler) -> Slot | None:
    """The slot to save now: the longest idle one that is worth it."""
    contents = scheduler.contents
    if not contents.can_save:
        return None
    rates, now, streams = contents.rates.view, scheduler.now(), scheduler.streams
    worth = [s for s in dirty_slots(scheduler) if worth_saving(s, rates, now, streams, idle_s=IDLE_S)]
    return min(worth, key=lambda slot: slot.since, default=None)
