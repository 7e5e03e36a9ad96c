"""Doors: each stands before a fake engine, notes what kvpin sends, and does to the answer what a case says.

An `Act` is what happens to one answer. Answers are whole before they are passed on, so a cut or a death comes
at the same byte each time.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

CASE = b"x-case"
"""Requests with this header are those of a client. All others are kvpin's own."""
PROMPTS = re.compile(rb"POST /(v1/(chat/completions|completions|responses|messages|embeddings)|generate) ")


@dataclass(frozen=True, slots=True)
class Act:
    """What happens to an answer.

    Attributes:
        raw: bytes in place of the engine's answer, which is not asked.
        cut: bytes of each piece; 0: one piece.
        stop: bytes after which the connection ends; None: never; negative: so many before the end.
        reset: it ends by RST, not FIN.
        hold: bytes after which the answer waits until the comparison lets it go; None: it does not wait.
    """

    raw: bytes | None = None
    cut: int = 0
    stop: int | None = None
    reset: bool = False
    hold: int | None = None


PASS = Act()


@dataclass(slots=True)
class Doors:
    """All doors of a world, and what came in since `begin`.

    Attributes:
        seen: (engine, head, body) of each request of a case, in order of arrival.
        control: (engine, head, body) of all control calls so far.
        held: answers that wait, in order of arrival. `n_held`: so many have waited since `begin`.
        ports: of the engines.
        closed: engines that answer nothing yet.
        pid: kvpin's.
    """

    acts: deque[Act] = field(default_factory=deque)
    seen: list[tuple[str, bytes, bytes]] = field(default_factory=list)
    control: set[tuple[str, bytes, bytes]] = field(default_factory=set)
    held: deque[asyncio.Event] = field(default_factory=deque)
    ports: dict[str, int] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    pid: int = 0
    busy: int = 0
    n_held: int = 0

    async def open(self, name: str) -> int:
        """A door before an engine that begins later, at `ports[name]`; returns its own port."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._serve(name, reader, writer):
                    pass
            writer.close()

        self.closed.add(name)
        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
        return server.sockets[0].getsockname()[1]

    def begin(self, acts: tuple[Act, ...]) -> None:
        """The next requests are those of another case."""
        self.acts, self.seen, self.n_held = deque(acts), [], 0

    def is_read(self) -> bool:
        """True if all threads of kvpin sleep: it has read what was sent."""
        return all(state in "SI" for state in _states(self.pid))

    def let_go(self) -> None:
        """Lets the oldest answer that waits go on."""
        if self.held:
            self.held.popleft().set()

    async def _serve(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answers a request; False if its connection is over."""
        head = await reader.readuntil(b"\r\n\r\n")
        body = await read_body(reader, head)
        while name in self.closed:  # noqa: ASYNC110 - only at the start
            await asyncio.sleep(0.01)
        act = PASS
        if is_clients := b"\r\n" + CASE + b":" in head.lower():
            act = self.acts.popleft() if self.acts else PASS
        if is_clients or PROMPTS.match(head):
            self.seen.append((name, head, body))
        else:
            self.control.add((name, head, body))
        self.busy += is_clients
        try:
            answer = act.raw if act.raw is not None else await asked(self.ports[name], head, body)
            return await self._act(name, act, answer, reader, writer) or not is_clients
        finally:
            self.busy -= is_clients

    async def _act(
        self, name: str, act: Act, answer: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        sent = answer[: act.stop]

        async def send(part: bytes) -> None:
            for at in range(0, len(part), act.cut or len(part) or 1):
                writer.write(part[at : at + (act.cut or len(part))])
                await writer.drain()
                while act.cut and not self.is_read():  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.0003)

        await send(sent[: act.hold])
        if act.hold is not None:
            if not await self._wait(reader):
                self.seen.append((name, b"(kvpin left)", b""))
                return False
            await send(sent[act.hold :])
        if act.reset:
            await asyncio.sleep(0.02)  # what was sent is read before the connection breaks
            writer.transport.abort()
        head = answer.partition(b"\r\n\r\n")[0].lower()
        return act.stop is None and (b"\r\ncontent-length:" in head or b"\r\ntransfer-encoding:" in head)

    async def _wait(self, reader: asyncio.StreamReader) -> bool:
        """Returns once the comparison lets the answer go; False if kvpin leaves before."""
        self.held.append(gate := asyncio.Event())
        self.n_held += 1
        opened, left = asyncio.create_task(gate.wait()), asyncio.create_task(reader.read(1))
        await asyncio.wait((opened, left), return_when=asyncio.FIRST_COMPLETED)
        for task in (opened, left):
            task.cancel()
        await asyncio.gather(opened, left, return_exceptions=True)
        if gate in self.held:
            self.held.remove(gate)
        return gate.is_set()


def _states(pid: int) -> Iterator[str]:
    """The states of all threads of a process, and of the processes that it began: they tokenise."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from _states(int(child))


async def asked(port: int, head: bytes, body: bytes) -> bytes:
    """The whole answer of a server, as bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(head + body)
    try:
        return await read_answer(reader, is_head=head.startswith(b"HEAD"))
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader, *, is_head: bool = False) -> bytes:
    """The head of an answer and its body as it came."""
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        return head + await read_answer(reader)
    return head if is_head else head + await read_body(reader, head, is_answer=True)


async def read_body(reader: asyncio.StreamReader, head: bytes, *, is_answer: bool = False) -> bytes:
    """The body that belongs to a head, as it came; what there is if the connection ends before."""
    lower, parts = head.lower(), []
    try:
        if found := re.search(rb"\r\ncontent-length: *(\d+)", lower):
            parts.append(await reader.readexactly(int(found[1])))
        elif b"\r\ntransfer-encoding: chunked" in lower:
            while True:
                parts.append(line := await reader.readuntil(b"\r\n"))
                parts.append(await reader.readexactly(int(line, 16) + 2))
                if line == b"0\r\n":
                    break
        elif is_answer and not re.match(rb"http/1.1 (204|304)", lower):
            parts.append(await reader.read())
    except asyncio.IncompleteReadError as error:
        parts.append(error.partial)
    except OSError:
        parts.append(b"(reset)")
    return b"".join(parts)


def joined(answer: bytes) -> bytes:
    """An answer with the chunks of its body joined. Says so if its end is missing."""
    head, gap, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return answer
    parts, whole = [], False
    while body and not whole:
        size, _, rest = body.partition(b"\r\n")
        count = int(size or b"0", 16)
        parts.append(rest[:count])
        whole, body = count == 0, rest[count + 2 :]
    return head + gap + b"".join(parts) + (b"" if whole else b"(the end is missing)")
