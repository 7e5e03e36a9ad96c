"""Requests as bytes, and bare connections that carry them: what attackers and innocent clients send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
COUNT, INPUT_TOKENS = f"{MESSAGES}/count_tokens", f"{RESPONSES}/input_tokens"
_KEPT = 1 << 16
_PIECE = 1 << 20


@dataclass(slots=True)
class Answer:
    """An answer: the beginning of its bytes, and whether it came to its end.

    Attributes:
        status: 0 if the connection was closed without an answer, -1 if none came in time.
        raw: the first 64 KiB, head included.
        size: bytes in all.
        tail: the last bytes.
    """

    status: int = 0
    raw: bytearray = field(default_factory=bytearray)
    size: int = 0
    tail: bytes = b""

    @property
    def head(self) -> str:
        """Status line and headers, in lower case."""
        return self.raw.partition(b"\r\n\r\n")[0].decode("latin-1").lower()

    @property
    def is_whole(self) -> bool:
        """True if it came to its end."""
        head, end, _ = self.raw.partition(b"\r\n\r\n")
        if not end or self.status < 200:
            return False
        if (length := re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)) is not None:
            return self.size >= len(head) + 4 + int(length[1])
        return self.status in {204, 304} or self.tail.endswith(b"0\r\n\r\n")

    def take(self, data: bytes) -> None:
        """Bytes came."""
        self.raw += data[: max(_KEPT - len(self.raw), 0)]
        self.size += len(data)
        self.tail = (self.tail + data)[-200:]
        if not self.status and len(self.raw) >= 12:
            self.status = int(self.raw[9:12]) if self.raw[9:12].isdigit() else 0


def head_of(method: str, target: str, *headers: str, key: str = "", host: str = "127.0.0.1") -> bytes:
    """The head of a request."""
    own = [f"host: {host}", *([f"authorization: Bearer {key}"] if key else ())]
    return "\r\n".join([f"{method} {target} HTTP/1.1", *own, *headers, "", ""]).encode("latin-1")


def post(target: str, body: bytes, *headers: str, key: str = "", host: str = "127.0.0.1") -> bytes:
    """A whole POST of JSON."""
    own = () if any(h.startswith("content-type") for h in headers) else ("content-type: application/json",)
    return head_of("POST", target, *own, f"content-length: {len(body)}", *headers, key=key, host=host) + body


def chat(model: str, content: object, **fields: object) -> bytes:
    """The body of a chat of one message."""
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}], **fields}).encode()


def around(model: str, name: str, filling: bytes, **fields: object) -> bytes:
    """The body of a chat with a field whose value is `filling`, which need not be JSON."""
    return chat(model, "hi", max_tokens=2, **fields)[:-1] + b',"%b":%b}' % (name.encode(), filling)


@contextlib.asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to kvpin. It is reset at the end: nothing of it stays."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        yield reader, writer
    finally:
        reset = struct.pack("ii", 1, 0)
        with contextlib.suppress(OSError):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        writer.transport.abort()


async def write(writer: asyncio.StreamWriter, pieces: Iterable[bytes]) -> None:
    """Sends pieces as fast as kvpin takes them. Ends early where kvpin does not listen any more."""
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            for at in range(0, len(piece), _PIECE):
                writer.write(memoryview(piece)[at : at + _PIECE])
                await writer.drain()


async def read(reader: asyncio.StreamReader) -> Answer:
    """Reads one answer. The connection may end before it."""
    answer = Answer()
    with contextlib.suppress(ConnectionError):
        while not answer.is_whole and (data := await reader.read(1 << 20)):
            answer.take(data)
    return answer


async def ask(port: int, *pieces: bytes, seconds: float = 60.0) -> Answer:
    """Sends a request and reads its answer, which may come before all is sent."""
    try:
        async with asyncio.timeout(seconds), connection(port) as (reader, writer):
            sending = asyncio.create_task(write(writer, pieces))
            try:
                return await read(reader)
            finally:
                sending.cancel()
    except TimeoutError:
        return Answer(-1)
    except ConnectionError:
        return Answer()
