"""Drops everything that a vLLM holds.

vLLM can only reset its whole cache, refuses while requests run, and publishes the reset with the next
request. So kvpin sends a request of one token after the reset and waits for the event.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.types import KvProgress
from engine_adapter.vllm.event_watch import EventWatch
from engine_adapter.vllm.options import rank_headers

_EVENT_S = 2.0
_NUDGE = {"prompt": [1], "max_tokens": 1, "temperature": 0}


async def flush(
    control: ControlClient, model: str, ranks: Iterable[int | None], watch: EventWatch
) -> KvProgress:
    """Resets the cache of a server, on all its `ranks`; `model` is the name it serves under.

    Returns the known blocks dropped, or those left because requests run.

    Raises:
        EngineUnavailable: it is not reachable, or no event reported the reset within 2 s.
    """
    blocks, clearings = watch.blocks, watch.clearings
    answer = await control.call("POST", "/reset_prefix_cache")
    if not isinstance(answer, dict) or answer.get("success") is not True:
        return KvProgress(0, blocks, left={"busy": max(blocks, 1)})
    for rank in ranks:
        nudge = {**_NUDGE, "model": model}
        await control.call("POST", "/v1/completions", json=nudge, headers=rank_headers(rank))
    if watch.is_followed and not await watch.wait_for_clearing(clearings, _EVENT_S):
        raise EngineUnavailable("its cache was reset, but no event said so")
    return KvProgress(blocks, blocks)
