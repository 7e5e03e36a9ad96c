"""A relay between kvpin and an engine in `chaos.py` that spoils answers.

`Relay` passes on TCP connections, `EventRelay` the messages of a ZMQ publisher. A fault holds from `spoil` to
`heal`; a connection that it hit stays broken.
"""

from __future__ import annotations

import asyncio
import enum
import random
import re
import socket
import struct
from collections.abc import Coroutine
from contextlib import suppress

import zmq

HOST = "127.0.0.1"
# Of pieces of an answer that a fault which ends a connection hits: some streams are well under way by then.
HIT_SHARE = 0.1
SLOW_S = (0.05, 0.8)
GARBAGE_BYTES = (8, 64)
_READ_BYTES = 1 << 16
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_SAID = b'{"error":{"message":"chaos","type":"server_error"}}'
_FAILED = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
)


class Spoil(enum.Enum):
    """The faults of answers."""

    SLOW = "slow answers"
    RESET = "resets in mid-answer"
    CUT = "answers that end too early"
    GARBAGE = "garbage in answers"
    FAIL = "status 500"
    SILENT = "half-open sockets"
    STALL = "engines that go silent in mid-answer"


class Relay:
    """A port before an engine's."""

    def __init__(self, engine_port: int, dice: random.Random) -> None:
        self._engine_port = engine_port
        self._dice = dice
        self._spoil: Spoil | None = None
        self._healed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{HOST}:{self.port}"

    async def start(self) -> None:
        """Listens."""
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Ends all connections."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def spoil(self, how: Spoil) -> None:
        """Spoils answers from now on."""
        self._spoil = how
        self._healed.clear()

    def heal(self) -> None:
        """Passes on answers as they are."""
        self._spoil = None
        self._healed.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            if self._spoil is Spoil.SILENT:
                await self._healed.wait()
                return
            up_reader, up_writer = await asyncio.open_connection(HOST, self._engine_port)
            try:
                await _first_of(self._requests(reader, up_writer, writer), self._answers(up_reader, writer))
            finally:
                up_writer.transport.abort()
        except (
            OSError,
            asyncio.CancelledError,
        ):  # what is cancelled ends here: asyncio would call it a crash
            pass
        finally:
            writer.transport.abort()

    async def _requests(
        self, reader: asyncio.StreamReader, up_writer: asyncio.StreamWriter, writer: asyncio.StreamWriter
    ) -> None:
        """Passes requests on; answers them itself while the engine is to fail."""
        while data := await reader.read(_READ_BYTES):
            if self._spoil is Spoil.FAIL and data.startswith(b"POST /v1/"):
                await _rest_of(data, reader)
                writer.write(_FAILED % (len(_SAID), _SAID))
                continue
            up_writer.write(data)
            await up_writer.drain()

    async def _answers(self, up_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes answers on, spoiled by the present fault."""
        while data := await up_reader.read(_READ_BYTES):
            is_hit = self._dice.random() < HIT_SHARE
            at = self._dice.randrange(len(data))
            match self._spoil:
                case Spoil.SLOW:
                    await asyncio.sleep(self._dice.uniform(*SLOW_S))
                case Spoil.SILENT:
                    await self._healed.wait()
                    return
                case Spoil.STALL if is_hit:
                    writer.write(data[:at])
                    await asyncio.Event().wait()  # until the other side hangs up
                case Spoil.CUT if is_hit:
                    writer.write(data[:at])
                    writer.close()
                    await writer.wait_closed()
                    return
                case Spoil.RESET if is_hit:
                    writer.write(data[:at])
                    _reset_on_close(writer)
                    return
                case Spoil.GARBAGE if is_hit:
                    garbage = self._dice.randbytes(self._dice.randint(*GARBAGE_BYTES))
                    data = data[:at] + garbage + data[at:]
            writer.write(data)
            await writer.drain()
        writer.close()
        await writer.wait_closed()


async def _first_of(*works: Coroutine[None, None, None]) -> None:
    """Runs all until the first ends. Raises its error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _rest_of(data: bytes, reader: asyncio.StreamReader) -> None:
    """Reads a request to its end."""
    while b"\r\n\r\n" not in data:
        data += await reader.read(_READ_BYTES)
    length = _LENGTH.search(data)
    missing = (int(length[1]) if length else 0) - (len(data) - data.index(b"\r\n\r\n") - 4)
    if missing > 0:
        with suppress(asyncio.IncompleteReadError):
            await reader.readexactly(missing)


def _reset_on_close(writer: asyncio.StreamWriter) -> None:
    """Lets the connection end with RST instead of FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class EventRelay:
    """A publisher that passes on the KV events of an engine. Replays are asked of the engine itself.

    Attributes:
        spoils: messages are lost, doubled and swapped.
    """

    def __init__(self, source: str, dice: random.Random) -> None:
        self._dice = dice
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._sub.connect(source)
        self._pub = self._context.socket(zmq.PUB)
        self.endpoint = f"tcp://{HOST}:{self._pub.bind_to_random_port(f'tcp://{HOST}')}"
        self._held: list[bytes] | None = None
        self.spoils = False

    def start(self) -> None:
        """Passes messages on from now on, on this event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sub.fileno(), self._pass_on)
        self._pass_on()

    def stop(self) -> None:
        """Ends it."""
        self._loop.remove_reader(self._sub.fileno())
        self._context.destroy(linger=0)

    def _pass_on(self) -> None:
        """ZMQ's file tells only of changes: everything that is there must be read."""
        with suppress(zmq.Again):
            while True:
                for message in self._spoiled(self._sub.recv_multipart(zmq.NOBLOCK)):
                    self._pub.send_multipart(message)

    def _spoiled(self, message: list[bytes]) -> list[list[bytes]]:
        held, self._held = self._held, None
        messages = [message] if held is None else [message, held]
        if self.spoils:
            fate = self._dice.random()
            if fate < 0.3:
                return messages[1:]
            if fate < 0.5:
                return [*messages, message]
            if fate < 0.7 and held is None:
                self._held = message
                return []
        return messages
