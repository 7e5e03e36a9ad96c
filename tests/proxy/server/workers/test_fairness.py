"""Workers that share one listening socket: two event loops' worth of doors in one process."""

import asyncio
import contextlib
import os
import socket
from functools import partial

import pytest

from proxy.http.listeners import listen, plainly
from proxy.server.workers.fairness import ConnectionTally, FairAcceptor, tallied


def test_it_is_the_turn_of_those_with_the_fewest_connections(tmp_path):
    one, two = ConnectionTally(tmp_path, 2), ConnectionTally(tmp_path, 2)  # as two processes have them
    one.add(1, 3)
    two.add(2, 2)
    assert [one.is_due(1), one.is_due(2)] == [False, True]
    one.add(1, -1)
    assert [two.is_due(1), two.is_due(2)] == [True, True]
    two.leave(2)
    two.add(2, -2)  # its last connections end
    one.add(1, 98)
    assert one.is_due(1)


def test_one_with_many_connections_takes_some_at_once(tmp_path):
    tally = ConnectionTally(tmp_path, 2)
    for more, at_once in ((0, 1), (7, 1), (1, 2), (56, 9)):
        tally.add(1, more)
        tally.add(2, more)
        assert [tally.is_due(1, beginning) for beginning in range(at_once + 1)] == [*[True] * at_once, False]


def test_while_one_has_engines_it_is_not_the_turn_of_one_that_has_none(tmp_path):
    one, two = ConnectionTally(tmp_path, 2), ConnectionTally(tmp_path, 2)

    def turns():
        return [(each.is_due(number), each.may_take(number)) for number, each in ((1, one), (2, two))]

    one.join(1)
    two.join(2)
    two.add(2, 5)
    assert turns() == [(True, True), (False, True)]
    two.be_ready(2)
    two.add(2, 95)
    assert turns() == [(False, False), (True, True)]
    one.be_ready(1)
    one.be_ready(1)
    assert turns() == [(True, True), (False, True)]
    two.leave(2)
    two.be_ready(2)
    assert turns() == [(True, True), (False, False)]


class Named(asyncio.Protocol):
    """Says whose connection it is."""

    def __init__(self, name):
        self.name = name

    def connection_made(self, transport):
        transport.write(b"%d" % self.name)

    def connection_lost(self, exc):
        pass


@pytest.fixture
async def port(tmp_path):
    """A port with two workers; gives its address, the doors and the tallies."""
    doors, tallies = [], [ConnectionTally(tmp_path, 2) for _ in range(2)]
    with listen("127.0.0.1", 0) as listener:
        for worker, tally in enumerate(tallies, 1):
            protocol = tallied(Named, tally, worker)
            own = socket.socket(fileno=os.dup(listener.fileno()))
            doors.append(FairAcceptor([own], tally, worker, plainly(partial(protocol, worker))))
        yield listener.getsockname(), doors, tallies
    for door in doors:
        door.close()


async def connect(stack, address):
    """Whose connection it is, and what closes it."""
    reader, writer = await asyncio.open_connection(*address)

    async def close():
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    stack.push_async_callback(close)
    return await reader.readexactly(1), close


async def test_each_gets_half_of_the_connections_that_stay(port):
    address, *_ = port
    async with contextlib.AsyncExitStack() as stack:
        opened = [await connect(stack, address) for _ in range(10)]
        assert [name for name, _ in opened].count(b"1") == 5
        for name, close in opened:
            if name == b"1":
                await close()
        await asyncio.sleep(0.05)
        again = [await connect(stack, address) for _ in range(4)]
        assert {name for name, _ in again} == {b"1"}


async def test_one_that_leaves_or_hangs_gets_none_and_none_is_lost(port):
    address, (one, two), _ = port
    one._loop.remove_reader(one._listeners[0])  # it hangs
    async with contextlib.AsyncExitStack() as stack:
        assert {(await connect(stack, address))[0] for _ in range(3)} == {b"2"}
        two.close()
        one._loop.add_reader(one._listeners[0], one._knock, one._listeners[0])
        assert {(await connect(stack, address))[0] for _ in range(3)} == {b"1"}
