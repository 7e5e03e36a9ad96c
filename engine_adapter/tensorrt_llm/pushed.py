"""Follows KV events that a server pushes over ZMQ, which is another way to the same events as polling.

Servers with KVCacheManagerV2 and a `kv_events_config` push, and have nothing to poll; others reject that
setting or ignore it. So kvpin polls where nothing is pushed:

    served enough, nothing came    the stream ends: poll instead
    a request has a salt or LoRA   ViewLost for good: pushed events name neither
    reset                          CacheCleared before the next message

Frames are vLLM's, and events are maps. Only whole blocks of the largest attention window come, without salts,
LoRA adapters, media or moves between tiers: an offloaded block stays on the GPU in the view.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing

from engine_adapter.events.keys import read_vllm_keys
from engine_adapter.events.subscriber import EventEndpoints, KvEventSubscriber
from engine_adapter.http.adapter import EventWatch
from engine_adapter.tensorrt_llm.poller import Traffic
from engine_adapter.types import CacheCleared, EventPosition, Finding, KvEvent, ViewCurrent, ViewLost

IDLE_CHECK_S = 0.5
NOTHING_PUSHED = Finding(
    "nothing was pushed at its events address: kvpin polls /kv_cache_events instead",
    "check kv_events_config in its --config file and the address, or leave the option events out",
)


class _EndedError(Exception):
    """The events no longer show what the server holds, with the finding that says why; without one, the
    server served prompts, but pushed nothing."""

    def __init__(self, finding: Finding | None = None) -> None:
        super().__init__()
        self.finding = finding


class PushedEvents:
    """One server's pushed events, as `EngineAdapter.events` describes them.

    Attributes:
        watch: what they have told.
        doubt: why the events are not followed; None while they are.
    """

    def __init__(
        self, endpoints: EventEndpoints, traffic: Traffic, *, exact: bool, since: EventPosition | None = None
    ) -> None:
        """`exact`: the server reuses only whole blocks, so its events show everything it will report."""
        self.subscriber = KvEventSubscriber(
            endpoints,
            read_keys=read_vllm_keys,
            idle_check_s=IDLE_CHECK_S,
            since=since,
            between=self._between,
        )
        self.watch = EventWatch()
        self.doubt: Finding | None = None
        self._traffic = traffic
        self._exact = exact
        self._was_reset = False

    async def events(self) -> AsyncGenerator[KvEvent, None]:
        """Ends if the server pushes nothing. Raises EngineUnavailable when the server goes away."""
        self._traffic.prompts.clear()
        try:
            async with aclosing(self.subscriber.events()) as events:
                async for event in events:
                    yield self._noted(event)
        except _EndedError as ended:
            if ended.finding is not None:
                self.doubt = ended.finding
                yield self._noted(ViewLost(ended.finding.problem))
                await asyncio.Event().wait()

    async def reset(self, act: Callable[[], Awaitable[object]]) -> int:
        """Resets the cache with `act`. Returns the known blocks."""
        blocks = self.watch.blocks
        await act()
        self._was_reset = True
        return blocks

    def _between(self) -> Iterable[KvEvent]:
        """Checks the requests before each message: a message with blocks of a salted one is not read."""
        hidden = self._traffic.hidden_from(lacks_salt=True, lacks_lora=True)
        if hidden is not None:
            raise _EndedError(hidden)
        if self._traffic.is_enough and not self.subscriber.counts.batches:
            raise _EndedError
        was_reset, self._was_reset = self._was_reset, False
        return (CacheCleared(),) if was_reset else ()

    def _noted(self, event: KvEvent) -> KvEvent:
        self.watch.note(event)
        return ViewCurrent(event.complete and self._exact) if isinstance(event, ViewCurrent) else event
