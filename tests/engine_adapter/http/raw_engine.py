"""An engine whose bytes a test writes itself, and which notes what it reads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

Serve = Callable[["Wire"], Awaitable[None]]


class Wire:
    """One accepted connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.seen = b""
        self.is_left = asyncio.Event()

    async def head(self) -> bytes:
        return await self.until(b"\r\n\r\n")

    async def until(self, end: bytes) -> bytes:
        got = await self.reader.readuntil(end)
        self.seen += got
        return got

    async def left(self) -> bytes:
        """What comes until the peer closes."""
        rest = b""
        with contextlib.suppress(ConnectionError):
            rest = await self.reader.read()
        self.seen += rest
        self.is_left.set()
        return rest

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


@contextlib.asynccontextmanager
async def raw_engine(serve: Serve) -> AsyncIterator[tuple[str, list[Wire]]]:
    """Gives its address and its connections. A connection is closed when `serve` returns."""
    wires: list[Wire] = []
    tasks: set[asyncio.Task] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        wires.append(Wire(reader, writer))
        try:
            # `start_server` logs a task that was cancelled as a crash.
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                await serve(wires[-1])
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, family=socket.AF_INET)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", wires
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the event loop closes sockets in its next cycle
