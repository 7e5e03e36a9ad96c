"""Sockets read from an event loop. What is made of their messages: test_subscriber.py."""

from __future__ import annotations

import asyncio

import pytest
import zmq
import zmq.asyncio

from engine_adapter.errors import EngineUnavailable
from engine_adapter.events import zmq_inbox
from engine_adapter.events.zmq_inbox import replay_client, subscription

WAIT_S = 10.0


@pytest.fixture
async def bound():
    """Makes sockets of a kind that are bound to a port of their own; returns one and its address."""
    context = zmq.asyncio.Context()
    sockets = []

    def make(kind):
        sockets.append(context.socket(kind))
        return sockets[-1], f"tcp://127.0.0.1:{sockets[-1].bind_to_random_port('tcp://127.0.0.1')}"

    yield make
    for socket in sockets:
        socket.close(linger=0)
    context.term()


async def subscribed(pub):
    await asyncio.wait_for(pub.recv(), WAIT_S)


async def test_a_flood_leaves_turns_to_others(bound, monkeypatch):
    monkeypatch.setattr(zmq_inbox, "_TURN_S", 0.0)
    pub, endpoint = bound(zmq.XPUB)
    with subscription(endpoint, "") as inbox:
        await subscribed(pub)
        for _ in range(10):
            await pub.send_multipart([b"kv", b"1"])
        assert await inbox.receive(WAIT_S) is not None
        turns = []
        for _ in range(9):
            asyncio.get_running_loop().call_soon(turns.append, 1)
            assert await inbox.receive(WAIT_S) is not None
    assert len(turns) == 9


async def test_nothing_is_passed_on_after_the_connection_dropped(bound):
    pub, endpoint = bound(zmq.XPUB)
    with subscription(endpoint, "") as inbox:
        await subscribed(pub)
        await pub.send_multipart([b"kv", b"1"])
        assert await inbox.receive(WAIT_S) == [b"kv", b"1"]
        pub.close(linger=0)
        for _ in range(2):
            with pytest.raises(EngineUnavailable, match="closed its event stream"):
                await inbox.receive(WAIT_S)


@pytest.mark.parametrize("kind", [zmq.XPUB, zmq.ROUTER])
async def test_a_message_of_any_length_does_not_fill_the_memory(bound, monkeypatch, kind):
    monkeypatch.setattr(zmq_inbox, "MAX_MESSAGE_BYTES", 1000)
    hostile, endpoint = bound(kind)
    if kind == zmq.XPUB:
        with subscription(endpoint, "") as inbox:
            await subscribed(hostile)
            await hostile.send_multipart((b"", bytes(1001)))
            with pytest.raises(EngineUnavailable):
                await inbox.receive(WAIT_S)
        return
    with replay_client(endpoint) as client:
        await client.ask(0)
        asker, *_ = await hostile.recv_multipart()
        await hostile.send_multipart((asker, b"", bytes(1001)))
        assert await client.inbox.receive(0.05) is None


@pytest.mark.parametrize("endpoint", ["", "tcp://gpu7", "nowhere"])
def test_an_address_that_is_none_is_an_engine_that_is_not_there(endpoint):
    for connecting in (subscription(endpoint, ""), replay_client(endpoint)):
        with pytest.raises(EngineUnavailable, match="cannot connect to its KV events"), connecting:
            pass
