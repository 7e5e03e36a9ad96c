"""A relay between an engine's event sockets and kvpin that can pass, lose, delay or cut.

Events pass a ZMQ relay, so that single batches can be lost; replays pass a TCP relay.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum

import zmq

from tests.live.server_world import RunningServer, free_port
from tests.vllm_live.vllm_world import EVENT_PORTS

_POLL_MS = 10


class Mode(Enum):
    PASS = "pass"
    LOSE = "lose"  # like a publisher with a slow subscriber: silently
    HOLD = "hold"  # delivered later
    CUT = "cut"  # connections drop, new ones are refused, messages are lost


class EventRelay:
    """Republishes what `source` publishes.

    Attributes:
        endpoint: its address.
        mode: what it does now.
    """

    def __init__(self, source: str, port: int) -> None:
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.mode = Mode.PASS
        self._source = source
        self._end = threading.Event()

    def run(self) -> None:
        """Relays until `stop`."""
        with zmq.Context() as context, context.socket(zmq.SUB) as sub:
            sub.setsockopt(zmq.RCVHWM, 0)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            sub.connect(self._source)
            while not self._end.is_set():
                with self._published(context) as pub:
                    held: list[list[bytes]] = []
                    while self.mode is not Mode.CUT and not self._end.is_set():
                        self._step(sub, pub, held)
                while self.mode is Mode.CUT and not self._end.is_set():
                    if sub.poll(_POLL_MS):
                        sub.recv_multipart()

    def stop(self) -> None:
        self._end.set()

    def _step(self, sub: zmq.Socket, pub: zmq.Socket, held: list[list[bytes]]) -> None:
        if sub.poll(_POLL_MS):
            held.append(sub.recv_multipart())
        if self.mode is Mode.LOSE:
            held.clear()
        while held and self.mode is Mode.PASS:
            pub.send_multipart(held.pop(0))

    @contextmanager
    def _published(self, context: zmq.Context) -> Iterator[zmq.Socket]:
        """A socket bound to the endpoint, once the previous one has released it."""
        with context.socket(zmq.PUB) as pub:
            pub.setsockopt(zmq.LINGER, 0)
            pub.setsockopt(zmq.SNDHWM, 0)
            while not self._end.wait(_POLL_MS / 1000):
                with suppress(zmq.ZMQError):
                    pub.bind(self.endpoint)
                    break
            yield pub


class TcpRelay:
    """Forwards connections to a port of this machine; knows the modes PASS, HOLD and CUT.

    Attributes:
        port: its port.
        mode: what it does now.
    """

    def __init__(self, source_port: int, port: int) -> None:
        self.port = port
        self.mode = Mode.PASS
        self._source_port = source_port
        self._end = threading.Event()

    def run(self) -> None:
        """Relays until `stop`."""
        asyncio.run(self._serve())

    def stop(self) -> None:
        self._end.set()

    async def _serve(self) -> None:
        connections: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = asyncio.create_task(self._forward(reader, writer))
            connections.add(connection)
            await asyncio.wait([connection])
            connections.discard(connection)
            writer.close()

        async with await asyncio.start_server(connected, "127.0.0.1", self.port):
            while not self._end.is_set():
                await asyncio.sleep(_POLL_MS / 1000)
                for connection in connections if self.mode is Mode.CUT else ():
                    connection.cancel()
            while connections:
                for connection in connections:
                    connection.cancel()
                await asyncio.sleep(_POLL_MS / 1000)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # the engine is down
            from_source, to_source = await asyncio.open_connection("127.0.0.1", self._source_port)
            ways = [
                asyncio.create_task(self._pump(reader, to_source)),
                asyncio.create_task(self._pump(from_source, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                to_source.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                while self.mode is Mode.HOLD:  # noqa: ASYNC110 - another thread sets it
                    await asyncio.sleep(_POLL_MS / 1000)
                writer.write(data)
                await writer.drain()


@dataclass(frozen=True, slots=True)
class Link:
    """kvpin's path to an engine's event sockets."""

    events: EventRelay
    replay: TcpRelay

    @property
    def options(self) -> str:
        """The `--engine` options for this path."""
        return f"events={self.events.endpoint},replay=tcp://127.0.0.1:{self.replay.port}"

    def set(self, events: Mode, replay: Mode) -> None:
        self.events.mode, self.replay.mode = events, replay


@contextmanager
def running_link(server: RunningServer) -> Iterator[Link]:
    """A path that passes everything at first; it ends with the block."""
    port = free_port(EVENT_PORTS)
    events = EventRelay(f"tcp://127.0.0.1:{server.event_port}", port)
    replay = TcpRelay(server.event_port + 1, port + 1)
    with _thread(events.run, events.stop), _thread(replay.run, replay.stop):
        yield Link(events, replay)


@contextmanager
def _thread(run: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join()
