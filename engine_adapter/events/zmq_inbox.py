"""Reads ZMQ sockets on an event loop: takes all waiting messages at once, and waits only when none is
left."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zmq
import zmq.asyncio

from engine_adapter.errors import EngineUnavailable

# At most this many messages wait here. Then the connection backs up and the publisher queues; what it drops
# is replayed. A batch may have several 100 kB, so a longer queue could take gigabytes. A thousand steps are
# many seconds of any engine.
_HIGH_WATER_MARK = 1_000
# The longest part of a message. The events of a prompt of a million tokens take some 10 MiB.
MAX_MESSAGE_BYTES = 128 << 20
# Waiting messages are taken without yielding for this long; then other tasks get a turn.
_TURN_S = 0.001
# As many messages are taken before the connection is checked, which costs as much as taking one.
_AT_ONCE = 16


class Inbox:
    """The messages of one socket."""

    def __init__(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket | None = None) -> None:
        """`monitor` reports a dropped connection."""
        self._now: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._monitor: zmq.Socket[bytes] | None = None
        if monitor is not None:
            self._monitor = zmq.Socket.shadow(monitor.underlying)
        self._poller = zmq.asyncio.Poller()
        for each in (socket, monitor):
            if each is not None:
                self._poller.register(each, zmq.POLLIN)
        self._taken: deque[list[bytes]] = deque()
        self._turn_ends = 0.0

    async def receive(self, timeout_s: float, other: Inbox | None = None) -> list[bytes] | None:
        """The next message; None after the time-out, or as soon as the `other` inbox has one. Raises
        EngineUnavailable on a dropped connection."""
        if time.monotonic() > self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = time.monotonic() + _TURN_S
        if not self._taken:
            self._take()
        if not self._taken:
            poller = self._poller if other is None else self._beside(other)
            await poller.poll(int(timeout_s * 1000))
            self._turn_ends = time.monotonic() + _TURN_S
            self._take()
        return self._taken.popleft() if self._taken else None

    def has_messages(self) -> bool:
        """True if messages wait."""
        return bool(self._taken) or bool(int(self._now.get(zmq.EVENTS)) & zmq.POLLIN)

    def _beside(self, other: Inbox) -> zmq.asyncio.Poller:
        """A poller of this inbox's sockets and those of the other."""
        poller = zmq.asyncio.Poller()
        for socket, flags in (*self._poller.sockets, *other._poller.sockets):
            poller.register(socket, flags)
        return poller

    def _take(self) -> None:
        with suppress(zmq.Again):
            for _ in range(_AT_ONCE):
                self._taken.append(self._now.recv_multipart(zmq.NOBLOCK))
        # Check after taking the messages: if one is the next process's, the connection dropped before.
        self.check()

    def check(self) -> None:
        """Raises EngineUnavailable if the connection dropped."""
        if self._monitor is not None and int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            raise EngineUnavailable("the engine closed its event stream")


@contextmanager
def subscription(endpoint: str, topic: str) -> Iterator[Inbox]:
    """Subscribes to topics of a PUB socket that begin with `topic`."""
    context = zmq.asyncio.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.IPV6, 1)
    sub.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    sub.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
    monitor = sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        _connect(sub, endpoint)
        yield Inbox(sub, monitor)
    finally:
        sub.disable_monitor()
        monitor.close(linger=0)
        sub.close(linger=0)
        context.term()


def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise EngineUnavailable(f"cannot connect to its KV events: {error}") from error


class ReplayClient:
    """Asks a ROUTER socket to replay batches. `inbox`: the messages of the answer."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        """`connect` comes first."""
        self._context, self._endpoint = context, endpoint
        self._open()

    def connect(self) -> None:
        """Connects. A later call opens another connection: a late answer to an earlier question is then not
        read as the answer to the next. Raises EngineUnavailable for an address that cannot be used."""
        self.close()
        self._open()
        _connect(self._dealer, self._endpoint)

    def close(self) -> None:
        """Drops the connection and what it brought."""
        self._dealer.close(linger=0)

    def _open(self) -> None:
        self._dealer = dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IPV6, 1)
        # A ROUTER drops what does not fit. The engine's buffer limits how much it sends.
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.inbox = Inbox(dealer)

    async def ask(self, start: int) -> None:
        """Asks for batch `start` and all later ones."""
        await self._dealer.send_multipart((b"", start.to_bytes(8, "big")))


@contextmanager
def replay_client(endpoint: str | None) -> Iterator[ReplayClient | None]:
    """A client, connected; None without an endpoint."""
    if endpoint is None:
        yield None
        return
    context = zmq.asyncio.Context()
    client = ReplayClient(context, endpoint)
    try:
        client.connect()
        yield client
    finally:
        client.close()
        context.term()
