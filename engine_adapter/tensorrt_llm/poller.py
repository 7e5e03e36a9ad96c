"""Polls a server's KV events: often under traffic, rarely without.

Reading events removes them from the server. So only one kvpin may read a server's events, and events on their
way when a view ends are lost.

    start   ViewLost → the buffer, which goes back to the start of the process if nobody read it → ViewCurrent
    reset   between two readings: events buffered before it are dropped, then CacheCleared
    doubt   the events do not show what the server did → ViewLost; kvpin learns from answers instead
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from engine_adapter.tensorrt_llm.events import PolledEventReader
from engine_adapter.types import CacheCleared, Finding, KvEvent, TokenIds, ViewLost

NOTHING_PUSHED = Finding(
    "nothing was pushed at its events address: kvpin polls /kv_cache_events instead",
    "check kv_events_config in its --config file and the address, or leave the option events out",
)
BUSY_S = 0.05
IDLE_S = 1.0
# After this many different prompts without an event, kvpin concludes that none will come.
SILENT_PROMPTS = 8
CONFIG = "start trtllm-serve with --config FILE, and in it kv_cache_config: "
SILENT = Finding(
    "prompts were served, but no KV event came: kvpin learns what it holds from its answers",
    CONFIG + "{enable_block_reuse: true, event_buffer_max_size: 16384}; "
    "if it pushes its events (kv_events_config), give their address: events=tcp://HOST:PORT",
)
NO_SALT_IN_EVENTS = Finding(
    "its KV events do not carry cache salts, and a request had one: "
    "kvpin learns what it holds from its answers",
    "use a version whose events have cache_salt",
)
NO_LORA_IN_EVENTS = Finding(
    "its KV events do not carry LoRA adapters, and a request had one: "
    "kvpin learns what it holds from its answers",
    "serve LoRA requests from an engine of their own",
)
SEVERAL_RANKS = Finding(
    "it chooses among data-parallel ranks itself, each with its own cache: "
    "kvpin learns what it holds from its answers",
    "start one server per rank instead of enable_attention_dp",
)


@dataclass(slots=True)
class Traffic:
    """The requests sent to the server. `prompts`: hashes of different prompts that were answered, at most
    `SILENT_PROMPTS`."""

    in_flight: int = 0
    salted: bool = False
    lora: bool = False
    prompts: set[int] = field(default_factory=set)

    @property
    def is_enough(self) -> bool:
        """True if so many prompts were answered that an event must have come."""
        return len(self.prompts) >= SILENT_PROMPTS

    def hidden_from(self, *, lacks_salt: bool, lacks_lora: bool) -> Finding | None:
        """Why events that lack these keys do not show what the requests left; None if they do."""
        if self.salted and lacks_salt:
            return NO_SALT_IN_EVENTS
        return NO_LORA_IN_EVENTS if self.lora and lacks_lora else None

    def served(self, prompt: TokenIds[int] | None, tokens_per_block: int) -> None:
        """Notes an answered prompt. A prompt shorter than a block stores nothing."""
        if prompt is not None and len(prompt) > tokens_per_block and not self.is_enough:
            self.prompts.add(hash(prompt.tobytes()))


class EventPoller:
    """One server's events, as `EngineAdapter.events` describes them. `doubt`: why the events are not
    followed; None while they are."""

    def __init__(
        self, drain: Callable[[], Awaitable[bytes]], new_reader: Callable[[], PolledEventReader]
    ) -> None:
        """`drain` asks the server for its events; `new_reader` makes a reader for a view."""
        self._drain = drain
        self._new_reader = new_reader
        self._wake = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._outbox: list[KvEvent] = []
        self.reader = new_reader()
        self.traffic = Traffic()
        self.doubt: Finding | None = None

    def wake(self) -> None:
        """A request has ended: ask for events at once."""
        self._wake.set()

    async def events(self) -> AsyncGenerator[KvEvent, None]:
        """Yields as `EngineAdapter.events` does. An answer without events raises EngineUnavailable, too."""
        levels = self.reader.blocks_per_level
        self.reader, self.doubt, self._outbox = self._new_reader(), None, []
        self.reader.blocks_per_level = levels  # sent once, when a process starts
        self.traffic.prompts.clear()
        yield ViewLost("connected")
        wait_s = BUSY_S
        while True:
            events = await self._read()
            for event in events:
                yield event
            self.doubt = self._doubt()
            if self.doubt is not None:
                yield ViewLost(self.doubt.problem)
                for event in await self._out_of_doubt():
                    yield event
                self.doubt = None
            busy = bool(events) or self.traffic.in_flight > 0 or self._wake.is_set()
            wait_s = BUSY_S if busy else min(2 * wait_s, IDLE_S)
            await self._pause(wait_s)

    async def reset(self, act: Callable[[], Awaitable[object]]) -> None:
        """Resets the cache with `act`; events from before the reset are dropped."""
        async with self._one_at_a_time:
            alone = self.traffic.in_flight == 0
            await act()
            # Events of running requests from before the reset may come one server step later.
            for pause_s in (0, BUSY_S):
                await asyncio.sleep(pause_s)
                self.reader.pass_over(await self._drain())
            alone = alone and self.traffic.in_flight == 0
            self._outbox += [CacheCleared(), self.reader.current(complete=alone)]
        self.wake()

    async def _read(self) -> list[KvEvent]:
        """Events that resets left, and the server's next events."""
        async with self._one_at_a_time:
            # Before the events read now, which were stored after the reset.
            events, self._outbox = self._outbox, []
            return events + self.reader.read(await self._drain())

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):  # wait_for can lose a cancellation
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    def _doubt(self) -> Finding | None:
        """Why the events do not show what the server holds; None if they do."""
        reader, traffic = self.reader, self.traffic
        if len(reader.ranks) > 1:
            return SEVERAL_RANKS
        hidden = traffic.hidden_from(lacks_salt=reader.lacks_salt, lacks_lora=reader.lacks_lora)
        return hidden or (SILENT if not reader.heard and traffic.is_enough else None)

    async def _out_of_doubt(self) -> list[KvEvent]:
        """Waits until an event comes: events then begin a view. Any other doubt lasts."""
        if self.doubt is not SILENT:
            await asyncio.Event().wait()
        while True:
            self.reader.forget()
            await self._pause(IDLE_S)
            events = await self._read()
            if self.reader.heard:
                return events
