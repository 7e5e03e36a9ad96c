"""Saves slots while nobody needs them, so that overwriting one later loses nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from engine_adapter.errors import EngineError
from engine_adapter.llama_server.keeper import SlotKeeper
from engine_adapter.llama_server.plan import worth_saving
from engine_adapter.llama_server.slot_owners import UNKNOWN_OWNER
from engine_adapter.llama_server.slots import Operation, Slot

# A slot is written back when nothing has used it for this long.
IDLE_S = 0.1
POLL_S = 0.25


async def write_back(keeper: SlotKeeper) -> None:
    """Saves what is worth it whenever slots are idle; runs until it is cancelled."""
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
    """Saves every slot that is not saved yet: the idle ones, then those on which something was being done."""
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
    """Idle slots with content that lies in no file and could."""
    if not keeper.contents.can_restore:
        return []
    return [slot for slot in keeper.contents.table.idle() if slot.dirty and slot.salt != UNKNOWN_OWNER]


def _worth_most(keeper: SlotKeeper) -> Slot | None:
    """The idle slot to save now, the one unused for longest."""
    contents = keeper.contents
    if not contents.can_save:
        return None
    rates, now, streams = contents.rates.view, keeper.now(), keeper.streams
    worth = [s for s in dirty_slots(keeper) if worth_saving(s, rates, now, streams, idle_s=IDLE_S)]
    return min(worth, key=lambda slot: slot.since, default=None)
