"""Saves slots in idle time, so that overwriting one later loses nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from engine_adapter.errors import EngineError
from engine_adapter.llama_server.keeper import SlotKeeper
from engine_adapter.llama_server.plan import worth_saving
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from engine_adapter.llama_server.slots import Operation, Slot

# A slot is written back after it has been idle for this long.
IDLE_S = 0.1
POLL_S = 0.25


async def write_back(keeper: SlotKeeper) -> None:
    """Saves idle slots that are worth it; runs until it is cancelled."""
    while True:
        keeper.changed.clear()
        slot = _worth_most(keeper)
        if slot is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if dirty_slots(keeper) else None):
                    await keeper.changed.wait()
            await asyncio.sleep(IDLE_S)
            continue
        keeper.contents.counts.write_backs += 1
        with suppress(EngineError):
            await keeper.take(slot.id, Operation.SAVE, keeper.contents.save)


async def save_all(keeper: SlotKeeper) -> None:
    """Saves every slot that is not saved yet: first the idle ones, then those that were busy."""
    await save_idle(keeper)
    await keeper.settled()
    await save_idle(keeper)


async def save_idle(keeper: SlotKeeper) -> None:
    """Saves every idle slot that is not saved yet; stops at the first that cannot be saved."""
    for slot in dirty_slots(keeper):
        if not slot.is_idle:
            continue
        with suppress(EngineError):
            if await keeper.take(slot.id, Operation.SAVE, keeper.contents.save):
                continue
        return


def dirty_slots(keeper: SlotKeeper) -> list[Slot]:
    """Idle slots with known owners whose content lies in no file."""
    if not keeper.contents.can_restore:
        return []
    return [slot for slot in keeper.contents.table.idle() if slot.dirty and slot.salt != UNKNOWN_OWNER]


def _worth_most(keeper: SlotKeeper) -> Slot | None:
    """The slot to save now: the longest idle one that is worth it."""
    contents = keeper.contents
    if not contents.can_save:
        return None
    rates, now, streams = contents.rates.view, keeper.now(), keeper.streams
    worth = [s for s in dirty_slots(keeper) if worth_saving(s, rates, now, streams, idle_s=IDLE_S)]
    return min(worth, key=lambda slot: slot.since, default=None)
