"""What is around kvpin: its disk, its clock, and the channel that it shares with other kvpins."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
from collections.abc import Iterator

from tests.hostile.attacker import ANY, MIB, SERVED, Attack, Attacker
from tests.hostile.client import CHAT, chat, post
from tests.hostile.connections import form
from tests.hostile.place import BAD, BROKEN, TINY
from tests.hostile.strangers import names

_CHANNEL = "kvpin:hostile"
_FORGED = 77
_JUMPS_S = (7_200, 0, -7_200, 0, 365 * 86_400, 0)
_ASK = post(CHAT, chat(BROKEN, "hi"), key=BAD)


@contextlib.contextmanager
def _full_disk(pid: int) -> Iterator[None]:
    """No file of the process may grow."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


async def _full_temporary_directory(a: Attacker) -> None:
    with _full_disk(a.place.pid):
        await a.flood(itertools.repeat(form(3 * MIB), a.many(30)), 4)
        await a.flood(itertools.repeat(_ASK, a.many(30)), 4)


async def _no_state_dir(a: Attacker) -> None:
    """A file takes its place, so that nobody can write there, whatever rights he has."""
    away = a.place.state_dir.with_name("away")
    a.place.state_dir.rename(away)
    a.place.state_dir.write_text("no directory")
    try:
        await a.flood(names(a))
        await asyncio.sleep(1 if a.small else 65)  # it is written once a minute
    finally:
        a.place.state_dir.unlink()
        away.rename(a.place.state_dir)


async def _clock_jumps(a: Attacker) -> None:
    assert a.place.clock is not None
    for seconds in _JUMPS_S:
        a.place.clock.write_text(f"{seconds:+d}")
        for model in (BROKEN, TINY):
            await a.ask(post(CHAT, chat(model, "hi", max_tokens=2), key=BAD))
        await asyncio.sleep(1.5)  # the file is looked at once a second


def _frames(a: Attacker) -> Iterator[bytes]:
    """Noise, huge and broken frames, and those of kvpins that are not there."""
    from proxy.core.books import IssuedKey, signed
    from proxy.core.peers.messages import (
        VERSION,
        KvpinState,
        Leaving,
        Placing,
        RequestState,
        UseReport,
        frame_of,
    )
    from proxy.core.placement.load import Work
    from proxy.core.quotas import Use

    yield from (b"", os.urandom(99), VERSION, VERSION + bytes(8), VERSION + os.urandom(200))
    yield b"\xff" * a.size(60)
    yield VERSION + _FORGED.to_bytes(8, "little") + b"\x91" * a.size(6)
    key = signed([IssuedKey("key-1", "nobody", bytes(32), "evil", 0.0)], b"", 0.0)
    forged = (KvpinState("evil \x1b[2J", [], "/nowhere", keys=key), UseReport("nobody", Use(9, 9, 9)))
    yield from (frame_of(_FORGED, [message]) for message in forged)
    placing = Placing("well", os.urandom(a.size(6)), 10**9, streams=True, known=True, session=None)
    for number in range(8):
        yield frame_of(_FORGED, [RequestState(number, Work(10**9), placing=placing)])
    yield frame_of(_FORGED, [Leaving()])
    for number in range(a.many(3_000)):
        yield frame_of(1_000 + number, [KvpinState(f"kvpin {number}", [], None)])


async def _poisoned_channel(a: Attacker) -> None:
    from redis import Redis

    with contextlib.closing(Redis.from_url(a.place.valkey)) as redis:
        for frame in _frames(a):
            await asyncio.to_thread(redis.publish, _CHANNEL, frame)
    await asyncio.sleep(1)
    await a.ask(_ASK)


ATTACKS = (
    Attack("a full temporary directory", frozenset({200, 503, 507}), _full_temporary_directory),
    Attack("no state directory", ANY | {404}, _no_state_dir),
    Attack("a poisoned exchange", SERVED, _poisoned_channel),
    Attack("clock jumps", SERVED, _clock_jumps, needs_clock=True),
)
