"""ZMQ sockets read from an event loop: until they are dry without waiting, and only then waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
import zmq.asyncio

from engine_adapter.errors import EngineUnavailable

# Messages that wait here at most. Beyond them the connection backs up and the publisher keeps its own queue;
# what that drops comes by replay. A batch holds up to some hundred kilobytes, so that more would cost
# gigabytes where an engine floods; a thousand steps are many seconds of any engine.
_HIGH_WATER_MARK = 1_000
# Messages that are there already are taken without waiting; after this long others get a turn.
_TURN_S = 0.001


class Inbox:
    """The messages of one socket."""

    def __init__(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket | None = None) -> None:
        """`monitor` tells that the connection dropped."""
        self._now: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._monitor: zmq.Socket[bytes] | None = None
        if monitor is not None:
            self._monitor = zmq.Socket.shadow(monitor.underlying)
        self._poller = zmq.asyncio.Poller()
        for each in (socket, monitor):
            if each is not None:
                self._poller.register(each, zmq.POLLIN)
        self._turn_ends = 0.0

    async def receive(self, timeout_s: float) -> list[bytes] | None:
        """The next message, None when none came in time. Raises EngineUnavailable on a dropped connection."""
        if time.monotonic() > self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = time.monotonic() + _TURN_S
        frames = self._take()
        if frames is None:
            await self._poller.poll(int(timeout_s * 1000))
            self._turn_ends = time.monotonic() + _TURN_S
            frames = self._take()
        return frames

    def _take(self) -> list[bytes] | None:
        """A message that is there already."""
        try:
            frames = self._now.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            frames = None
        # After the message was taken, so that none of the next process's is passed on: the connection
        # dropped before it came.
        self.check()
        return frames

    def check(self) -> None:
        """Raises EngineUnavailable when the connection dropped."""
        if self._monitor is not None and int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            raise EngineUnavailable("the engine closed its event stream")


@contextmanager
def subscription(endpoint: str, topic: str) -> Iterator[Inbox]:
    """What a PUB socket publishes from now on under topics that begin with `topic`."""
    context = zmq.asyncio.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.IPV6, 1)
    sub.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
    monitor = sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        sub.connect(endpoint)
        yield Inbox(sub, monitor)
    finally:
        sub.disable_monitor()
        monitor.close(linger=0)
        sub.close(linger=0)
        context.term()


class ReplayClient:
    """Asks a ROUTER socket for batches again."""

    def __init__(self, dealer: zmq.asyncio.Socket) -> None:
        self._dealer = dealer
        self._inbox = Inbox(dealer)

    async def ask(self, start: int) -> None:
        """Asks for batch `start` and all after it."""
        await self._dealer.send_multipart((b"", start.to_bytes(8, "big")))

    async def receive(self, timeout_s: float) -> list[bytes] | None:
        """The next message of the answer, None when none came in time."""
        return await self._inbox.receive(timeout_s)


@contextmanager
def replay_client(endpoint: str | None) -> Iterator[ReplayClient | None]:
    """A client of its own for each view: answers to a question that was given up must not be read as the
    next one's. None without an endpoint."""
    if endpoint is None:
        yield None
        return
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IPV6, 1)
    # A ROUTER drops what does not fit. The engine's own buffer bounds what it sends.
    dealer.setsockopt(zmq.RCVHWM, 0)
    try:
        dealer.connect(endpoint)
        yield ReplayClient(dealer)
    finally:
        dealer.close(linger=0)
        context.term()
