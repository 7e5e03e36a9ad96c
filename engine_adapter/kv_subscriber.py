"""Follows an engine's KV events over ZMQ without missing one, or says that it did.

    start    subscribe → snapshot → replay what came after it → ViewCurrent
    follow   the next number: yield · a hole: replay from the last one known · a number that falls: start over
    idle     ask the replay socket what follows the last one known, so that a lost last batch is noticed

A replay begins at the last batch known, and that batch has to come back unchanged: that is how another
process behind the same address is told from this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import xxhash
import zmq
import zmq.asyncio

from engine_adapter.errors import EngineUnavailable
from engine_adapter.kv_events import EventBatch, KeyReader, MalformedEvents, Snapshot, decode_batch
from engine_adapter.types import KvEvent, ViewCurrent, ViewLost

_END_OF_REPLAY = 2**64 - 1
_HIGH_WATER_MARK = 10_000
_SEQUENCE_BYTES = 8


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """ZMQ addresses of one engine's events; without `replay` a lost batch means starting over."""

    events: str
    replay: str | None
    topic: str = ""


class _StartOverError(Exception):
    """The view cannot be carried on; the text says why."""


@dataclass(slots=True)
class _Cursor:
    """How far the stream has been followed.

    Attributes:
        last: number of the last batch taken in, -1 before the first, None while any may be the first.
        digest: hash of that batch's bytes, None where they were never seen (a snapshot stood for them).
        last_live: number of the last batch that came by subscription rather than replay.
    """

    last: int | None = None
    digest: int | None = None
    last_live: int | None = None


class KvEventSubscriber:
    """One engine's event stream as `EngineAdapter.events` promises it.

    Attributes:
        malformed: messages and events that could not be read, and were skipped.
        replays: times a hole had to be filled.
    """

    def __init__(
        self,
        endpoints: EventEndpoints,
        *,
        snapshot: Callable[[], Awaitable[Snapshot]] | None = None,
        read_keys: KeyReader | None = None,
        idle_check_s: float = 0.5,
        replay_timeout_s: float = 5.0,
    ) -> None:
        self._endpoints = endpoints
        self._snapshot = snapshot
        self._read_keys = read_keys
        self._idle_check_s = idle_check_s
        self._replay_timeout_s = replay_timeout_s
        self.malformed = 0
        self.replays = 0

    async def events(self) -> AsyncGenerator[KvEvent, None]:
        """See `EngineAdapter.events`. Raises EngineUnavailable when the engine goes away."""
        reason = "connected"
        with _subscription(self._endpoints) as subscription:
            while True:
                yield ViewLost(reason)
                try:
                    async with aclosing(self._follow(subscription)) as events:
                        async for event in events:
                            yield event
                except _StartOverError as lost:
                    reason = str(lost)

    async def _follow(self, subscription: _Subscription) -> AsyncGenerator[KvEvent, None]:
        """One view from its start until it breaks."""
        cursor = _Cursor()
        with _replay_client(self._endpoints.replay, self._replay_timeout_s) as replay:
            if self._snapshot is not None:
                held = await self._snapshot()
                cursor.last = held.sequence
                for event in held.events:
                    yield event
            async for event in self._catch_up(replay, cursor):
                yield event
            yield ViewCurrent()
            while True:
                async for event in self._step(subscription, replay, cursor):
                    yield event

    async def _step(
        self, subscription: _Subscription, replay: _ReplayClient | None, cursor: _Cursor
    ) -> AsyncGenerator[KvEvent, None]:
        """The events of the next message, or of what an idle check brings to light."""
        frames = await subscription.receive(self._idle_check_s)
        if frames is None:
            async for event in self._catch_up(replay, cursor):
                yield event
            return
        message = _numbered(frames)
        if message is None:
            self.malformed += 1
            return
        sequence, payload = message
        if cursor.last_live is not None and sequence <= cursor.last_live:
            raise _StartOverError(f"sequence fell from {cursor.last_live} to {sequence}")
        cursor.last_live = sequence
        if cursor.last is not None and sequence > cursor.last + 1:
            self.replays += 1
            async for event in self._catch_up(replay, cursor):
                yield event
            if cursor.last < sequence:
                raise _StartOverError(f"batches {cursor.last + 1} to {sequence} are lost")
        elif cursor.last is None or sequence > cursor.last:
            for event in self._take(cursor, sequence, payload):
                yield event

    async def _catch_up(self, replay: _ReplayClient | None, cursor: _Cursor) -> AsyncGenerator[KvEvent, None]:
        """What the engine published after `cursor.last`, by replay; nothing where there is none."""
        if replay is None:
            return
        expect_last = cursor.last is not None and cursor.last >= 0
        async for frames in replay.ask(max(cursor.last or 0, 0)):
            message = _numbered(frames)
            if message is None:
                self.malformed += 1
                continue
            sequence, payload = message
            if expect_last:
                expect_last = False
                _check_same(cursor, sequence, payload)
                continue
            if cursor.last is not None and sequence != cursor.last + 1:
                raise _StartOverError(f"batches {cursor.last + 1} to {sequence - 1} left the replay buffer")
            for event in self._take(cursor, sequence, payload):
                yield event
        if expect_last:
            raise _StartOverError(f"the engine no longer has batch {cursor.last}")

    def _take(self, cursor: _Cursor, sequence: int, payload: bytes) -> tuple[KvEvent, ...]:
        """Moves the cursor to this batch; returns its events."""
        cursor.last, cursor.digest = sequence, _digest(payload)
        try:
            batch = decode_batch(payload, self._read_keys)
        except MalformedEvents:
            batch = EventBatch((), skipped=1)
        self.malformed += batch.skipped
        return batch.events


def _check_same(cursor: _Cursor, sequence: int, payload: bytes) -> None:
    """The first replayed batch is the last one known, or the process is another."""
    if sequence != cursor.last:
        raise _StartOverError(f"batch {cursor.last} left the replay buffer")
    digest = _digest(payload)
    if cursor.digest not in (None, digest):
        raise _StartOverError(f"batch {sequence} is another than before: the engine restarted")
    cursor.digest = digest


def _digest(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def _numbered(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Sequence number and payload, the last two frames of any message; None when it has none."""
    if len(frames) < 2 or len(frames[-2]) != _SEQUENCE_BYTES:  # noqa: PLR2004 - sequence, payload
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]


class _Subscription:
    """A SUB socket that notices when its connection drops."""

    def __init__(self, sub: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        self._sub = sub
        self._monitor = monitor
        self._poller = zmq.asyncio.Poller()
        self._poller.register(sub, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    async def receive(self, timeout_s: float) -> list[bytes] | None:
        """The next message, None when none came in time. Raises EngineUnavailable on a dropped connection."""
        ready = dict(await self._poller.poll(int(timeout_s * 1000)))
        # The drop is told before anything the next process sends: a reconnect never goes unseen.
        if self._monitor in ready:
            raise EngineUnavailable("the engine closed its event stream")
        if self._sub in ready:
            return await self._sub.recv_multipart()
        return None


@contextmanager
def _subscription(endpoints: EventEndpoints) -> Iterator[_Subscription]:
    context = zmq.asyncio.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    sub.setsockopt(zmq.SUBSCRIBE, endpoints.topic.encode())
    monitor = sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        sub.connect(endpoints.events)
        yield _Subscription(sub, monitor)
    finally:
        sub.disable_monitor()
        monitor.close(linger=0)
        sub.close(linger=0)
        context.term()


class _ReplayClient:
    """A DEALER socket that asks for batches from a number on."""

    def __init__(self, dealer: zmq.asyncio.Socket, timeout_s: float) -> None:
        self._dealer = dealer
        self._timeout_s = timeout_s

    async def ask(self, start: int) -> AsyncGenerator[list[bytes], None]:
        """Messages from batch `start` on, as they come. Raises EngineUnavailable when they stop coming."""
        await self._dealer.send_multipart((b"", start.to_bytes(_SEQUENCE_BYTES, "big")))
        while True:
            try:
                frames = await asyncio.wait_for(self._dealer.recv_multipart(), self._timeout_s)
            except TimeoutError as error:
                raise EngineUnavailable("the engine does not answer on its replay socket") from error
            message = _numbered(frames)
            if message is not None and message[0] == _END_OF_REPLAY:
                return
            yield frames


@contextmanager
def _replay_client(endpoint: str | None, timeout_s: float) -> Iterator[_ReplayClient | None]:
    """A fresh socket for each view: answers to a question given up must not be read as the next one's."""
    if endpoint is None:
        yield None
        return
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 0)  # a ROUTER drops what does not fit, the end mark too
    try:
        dealer.connect(endpoint)
        yield _ReplayClient(dealer, timeout_s)
    finally:
        dealer.close(linger=0)
        context.term()
