"""Forgetting everything an engine holds.

vLLM resets its whole cache or nothing, refuses while requests run, and publishes that it did only with the
next request: so one of a single token is sent after it, and the event waited for.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.types import KvProgress
from engine_adapter.vllm.event_watch import EventWatch
from engine_adapter.vllm.ranks import rank_headers

_EVENT_S = 2.0
_NUDGE = {"prompt": [1], "max_tokens": 1, "temperature": 0}


async def flush(
    control: ControlClient, model: str, ranks: Iterable[int | None], watch: EventWatch
) -> KvProgress:
    """Resets the cache of a server, on all its `ranks`; `model` is the name it serves under.

    Returns the blocks dropped, as far as they were known; or, where requests run, those left.

    Raises:
        EngineUnavailable: it is gone, or did not say in time that its cache was cleared.
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
