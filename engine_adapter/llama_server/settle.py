"""Finds out when a llama-server has no more work on its slots."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from engine_adapter.errors import EngineRejected
from engine_adapter.http.control import ControlClient
from engine_adapter.llama_server.discovery import SlotState, read_slots

# Pauses between looks at a slot whose client left: the server notices that only after an idle second.
_POLL_S = (0.02, 0.15, 1.2)
# Time from the last byte of a request to its place in the server's queue.
_ARRIVAL_S = 0.02


async def when_idle(control: ControlClient, slot_id: int) -> SlotState:
    """Waits until the server no longer works on a slot; returns its state."""
    pauses = iter(_POLL_S)
    while True:
        state = (await read_slots(control))[slot_id]
        if not state.is_processing:
            return state
        await asyncio.sleep(next(pauses, _POLL_S[-1]))


async def until_all_arrived(control: ControlClient) -> None:
    """Waits until every request sent so far runs or is gone.

    A request whose client left may still wait behind a long step and then start. The server answers `/slots`
    during the step and does not show the request.
    """
    await asyncio.sleep(_ARRIVAL_S)
    with suppress(EngineRejected):  # a server without this route
        await control.get("/lora-adapters")  # changes nothing, and waits in the same queue


async def end_copies(control: ControlClient, slot_id: int) -> None:
    """Computes one token on a slot without useful KV.

    A request for several answers copies KV between slots. If it ends without a further step, the copies stay
    pending. The next step of any slot then makes them, even over KV that was restored meanwhile, and answers
    are wrong (observed on llama.cpp 0c1e570). Erasing the slot does not help, a step does.
    """
    body = {"prompt": [0], "n_predict": 0, "id_slot": slot_id, "cache_prompt": False}
    await control.call("POST", "/completion", json=body)
