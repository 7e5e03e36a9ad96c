"""What attacks are made of: an `Attacker` sends bytes to kvpin and counts the answers, as an `Attack` says.

An attack names the answers that may come. Any other is a fault of kvpin, and so is what it reports itself by
`Attacker.fault`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from tests.hostile.client import Answer, ask, connection, post, read, write
from tests.hostile.place import BAD, Place

MIB = 1 << 20
SERVED = frozenset({200})
BUSY = frozenset({429, 503})
REFUSED = frozenset({400, 408, 413, 415, 422, 431}) | BUSY
ANY = SERVED | REFUSED
UNKNOWN = frozenset({401, 403, 404, 405, 501})
CLOSED, LATE, HELD = 0, -1, -2
"""In place of a status: closed without an answer; none came in time; open to the end of the attack."""


@dataclass(slots=True)
class Attacker:
    """Attacks one place.

    Attributes:
        small: sizes and counts are reduced, for a test.
        answers: how often each status came.
        faults: what kvpin did wrong.
    """

    place: Place
    small: bool
    answers: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def size(self, mib: int) -> int:
        """Bytes of a body of up to `mib` MiB."""
        return (max(mib // 6, 1) if self.small else mib) * MIB

    def many(self, count: int) -> int:
        """How many where `count` are meant."""
        return max(count // 10, 2) if self.small else count

    def fault(self, what: str) -> None:
        """Notes a fault of kvpin."""
        if what not in self.faults:
            self.faults.append(what)

    async def ask(self, *pieces: bytes, seconds: float = 90.0) -> Answer:
        """Sends one request and counts its answer."""
        answer = await ask(self.place.port, *pieces, seconds=seconds)
        self.answers[answer.status] += 1
        return answer

    async def flood(self, requests: Iterable[bytes], at_once: int = 32) -> None:
        """Sends requests, each on a connection of its own."""
        left = iter(requests)

        async def sender() -> None:
            for request in left:
                await self.ask(request)

        await asyncio.gather(*(sender() for _ in range(at_once)))

    async def hold(self, requests: Iterable[bytes], seconds: float, drip: bytes = b"") -> None:
        """Sends what is no whole request on each connection, and keeps them all open. Every second each sends
        `drip` more."""
        seconds = min(seconds, 2.0) if self.small else seconds

        async def holder(request: bytes) -> None:
            async with connection(self.place.port) as (reader, writer):
                answer = asyncio.create_task(read(reader))
                try:
                    async with asyncio.timeout(seconds):
                        await write(writer, [request])
                        while not answer.done():
                            await asyncio.wait([answer], timeout=1)
                            await write(writer, [drip])
                except TimeoutError:
                    pass
                self.answers[answer.result().status if answer.done() else HELD] += 1
                answer.cancel()

        with contextlib.suppress(ConnectionError):
            await asyncio.gather(*map(holder, requests))


Run = Callable[[Attacker], Awaitable[None]]
Make = Callable[[int], bytes]
"""Makes a body of about so many bytes."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        name: what it does.
        expects: statuses that may come.
        run: makes it.
        has_keys: kvpin's clients need keys.
        needs_clock: kvpin's clock must be one that can be set.
    """

    name: str
    expects: frozenset[int]
    run: Run
    has_keys: bool = True
    needs_clock: bool = False


def bodies(target: str, make: Make, mib: int, count: int = 1, key: str = BAD) -> Run:
    """Sends `count` equal bodies of about `mib` MiB at once."""

    async def run(a: Attacker) -> None:
        request = post(target, make(a.size(mib)), key=key)
        await a.flood(itertools.repeat(request, count), at_once=count)

    return run


def each(requests: Callable[[Attacker], Iterable[bytes]], at_once: int = 32) -> Run:
    """Sends different requests."""

    async def run(a: Attacker) -> None:
        await a.flood(requests(a), at_once)

    return run


def same(request: bytes, count: int, at_once: int = 32) -> Run:
    """Sends one request `count` times."""
    return each(lambda a: itertools.repeat(request, a.many(count)), at_once)
