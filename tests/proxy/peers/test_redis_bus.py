"""A real Valkey server, which is killed and comes back."""

import asyncio
import contextlib
import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError
from structlog.testing import capture_logs

from engine_adapter import HttpTransport
from proxy.core.books import decode_marks
from proxy.peers import peers as peers_module
from proxy.peers import redis_bus
from proxy.peers.bus import BusCallbacks
from proxy.peers.redis_bus import RedisBus
from proxy.server.app import Proxy
from proxy.settings import EngineSettings, ExchangeSettings, Settings
from tests.fakes import FakeEngine, client_of
from tests.kv_world import tokens
from tests.proxy.peers.world import ask, in_step, placer, until, world
from tests.relay import Relay
from tests.valkey import Valkey

ACL = re.findall(r"^ACL SETUSER (.*)$", Path("docs/many.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture
def server():
    server = Valkey()
    yield server
    server.kill()


async def test_what_one_served_the_other_predicts_until_the_server_dies_and_again_after(server, monkeypatch):
    monkeypatch.setattr(redis_bus, "_RETRY_S", 0.05)
    monkeypatch.setattr(peers_module, "LOST_S", 1.0)
    async with (
        world(lambda _: RedisBus(server.url, "n")) as (_, (one, two)),
        client_of(one) as first,
        client_of(two) as second,
    ):
        home = (await ask(first)).headers["x-kvpin-engine"]  # no stream: nobody learns that prefill is free
        await until(lambda: placer(two).index.held(home, "gpu") == 20)
        assert (await ask(second)).headers["x-kvpin-predicted-tokens"] == "320"
        with capture_logs() as logs:
            server.kill()
            await until(lambda: not one.peers.bus.is_connected and not two.peers.bus.is_connected)
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


async def test_one_that_starts_after_all_others_have_gone_knows_what_is_drained(server, monkeypatch):
    monkeypatch.setattr(redis_bus, "_RETRY_S", 0.05)

    def make(_owner):
        return RedisBus(server.url, "n", secret=b"ours")

    async with world(make) as (_, (one, two)):
        one.fleet.book.drain("gpu1:8000", drained=True, now=5.0)
        two.fleet.book.drain("gpu2:8000", drained=True, now=5.0)
        await until(lambda: one.fleet.book.marks() == two.fleet.book.marks())
        server.kill()
        await until(lambda: not one.peers.bus.is_connected and not two.peers.bus.is_connected)
        server.start()  # it has nothing: the orders and the secret are kept there again
        with Redis.from_url(server.url) as redis:
            await until(
                lambda: decode_marks(redis.get("kvpin:n:engines") or b"\x90") == one.fleet.book.marks()
            )
            assert redis.get("kvpin:n:secret") == b"ours"
    with Redis.from_url(server.url) as redis:
        kept = redis.get("kvpin:n:engines")
        async with world(make, 1) as (_, (later,)):
            book = later.fleet.book
            assert book.is_drained("gpu1:8000")
            assert book.is_drained("gpu2:8000")
        redis.set("kvpin:n:engines", b"x")
        with capture_logs() as logs:
            async with world(make, 1) as (_, (again,)):
                assert not again.fleet.book.marks()
                again.fleet.book.merge(decode_marks(kept), now=5.0)
                await until(lambda: redis.get("kvpin:n:engines") == kept)
    (entry,) = [each for each in logs if "cannot be read" in each["event"]]
    assert entry["event"] == "the orders that the exchange keeps cannot be read: they are replaced"


def listed(proxy):
    return list(proxy.fleet.engines)


async def test_an_engine_is_added_by_those_who_have_the_admin_key_and_told_without_secrets(server):
    async with FakeEngine("a") as a, FakeEngine("b") as b, AsyncExitStack() as stack:

        async def start(admin_key):
            exchange = ExchangeSettings.model_validate({"url": server.url})
            proxy = Proxy(
                Settings(engines_file="/none.toml", reuse=True, exchange=exchange, admin_key=admin_key),
                HttpTransport(),
            )
            stack.push_async_callback(proxy.stop)
            proxy.start()
            return proxy

        def added(engine, **more):
            return EngineSettings(kind="openai_compatible", url=engine.url, id=engine.id, **more)

        with capture_logs() as logs:
            one, two, other = [await start(key) for key in ("k", "k", "another")]
            await until(lambda: all(len(each.peers.stats().peers) == 2 for each in (one, two, other)))
            one.engines.add(added(a, api_key="secret"))
            one.engines.add(added(b))
            await until(lambda: listed(two) == ["b"])
            await until(lambda: any("give both the same admin_key" in each["event"] for each in logs))
            assert listed(other) == []
            assert any("is not told by Redis" in each["event"] for each in logs)
            with Redis.from_url(server.url) as redis:
                await until(lambda: redis.exists("kvpin:default:engines"))
                assert b"secret" not in redis.get("kvpin:default:engines")
            await stack.aclose()
            later = await start("k")
            await until(lambda: listed(later) == ["b"])


async def test_a_partition_and_a_delay_lose_no_request_and_heal(server, monkeypatch):
    monkeypatch.setattr(redis_bus, "_RETRY_S", 0.05)
    monkeypatch.setattr(redis_bus, "_TIMEOUT_S", 1.5)
    monkeypatch.setattr(peers_module, "LOST_S", 2.0)
    async with Relay(server.port) as relay:
        urls = iter([f"redis://127.0.0.1:{relay.port}/0", server.url])
        async with (
            world(lambda _: RedisBus(next(urls), "n")) as (_, (one, two)),
            client_of(one) as first,
            client_of(two) as second,
        ):
            relay.cut()
            await until(lambda: not one.peers.bus.is_connected and not two.peers.stats().peers)
            home = (await ask(first)).headers["x-kvpin-engine"]
            assert (await ask(second, tokens(400, 3))).status_code == 200
            assert placer(two).index.held(home, "gpu") in {0, 25}  # not what the first one served
            relay.heal()
            await until(lambda: in_step(one) and in_step(two), 20)
            await until(lambda: placer(two).index.held(home, "gpu") in {20, 45})
            relay.delay_s = 0.2
            held = sum(placer(two).index.held(name, "gpu") for name in "ab")
            await ask(first, tokens(400, 5))
            await until(lambda: sum(placer(two).index.held(name, "gpu") for name in "ab") == held + 25, 20)
            relay.delay_s = 0.0
            await until(lambda: in_step(one) and in_step(two), 20)


@contextlib.asynccontextmanager
async def connected(*exchanges):
    """What each of them hears."""
    async with asyncio.TaskGroup() as group:
        heard = [[] for _ in exchanges]
        tasks = [
            group.create_task(each.run(BusCallbacks(ear.append, lambda: None)))
            for each, ear in zip(exchanges, heard, strict=True)
        ]
        await until(lambda: all(each.is_connected for each in exchanges))
        yield heard
        for task in tasks:
            task.cancel()


async def test_namespaces_do_not_hear_each_other(server):
    one, other = RedisBus(server.url, "a"), RedisBus(server.url, "b")
    async with connected(one, other) as heard:
        assert one.is_alone
        assert other.is_alone
        one.publish(b"one")
        one.publish(b"two")
        await until(lambda: heard[0] == [b"one", b"two"])  # its own come back: peers ignore them
        await until(lambda: one._waiting_bytes == 0)
        await one.aclose()
        assert heard[1] == []


async def test_without_a_server_nothing_is_kept_and_too_much_is_dropped(monkeypatch):
    exchange = RedisBus("redis://127.0.0.1:1/0", "n")
    exchange.publish(b"x")
    assert not exchange._outbox
    exchange.is_connected = True
    monkeypatch.setattr(redis_bus, "OUTBOX_BYTES", 10)
    exchange.publish(bytes(8))
    exchange.publish(bytes(8))
    assert exchange.dropped == 1


async def test_what_waited_when_the_server_died_is_dropped_and_what_comes_after_arrives(server, monkeypatch):
    monkeypatch.setattr(redis_bus, "_RETRY_S", 0.05)
    one, two = RedisBus(server.url, "n"), RedisBus(server.url, "n")
    async with connected(one, two) as heard:
        server.pause()
        one.publish(b"asked")
        await until(lambda: not one._outbox)  # the server is asked to take it, and does not answer
        one.publish(b"waits")
        server.kill()
        await until(lambda: not one.is_connected and not two.is_connected)
        server.start()
        await until(lambda: one.is_connected and two.is_connected)
        one.publish(b"after")
        await until(lambda: b"after" in heard[1])


async def test_a_bus_that_is_stopped_while_it_connects_ends(server):
    for moment in range(80):  # redis may swallow a cancellation: without a look at it, one of ten hangs
        task = asyncio.create_task(RedisBus(server.url, "n").run(BusCallbacks(lambda _: None, lambda: None)))
        await asyncio.sleep(moment * 0.0002)
        task.cancel()
        ended, _ = await asyncio.wait([task], timeout=2)
        assert ended, f"after {moment * 0.2:.1f} ms"


async def test_a_connection_that_the_server_closes_in_its_handshake_is_made_again(monkeypatch):
    """Where uvloop finds the socket closed, it raises RuntimeError."""
    made, errors = asyncio.Event(), iter([RuntimeError("the handler is closed")])

    async def serve(*_):
        for error in errors:
            raise error
        made.set()

    monkeypatch.setattr(redis_bus, "_RETRY_S", 0.01)
    monkeypatch.setattr(RedisBus, "_serve", serve)
    task = asyncio.create_task(RedisBus("redis://h", "n").run(BusCallbacks(lambda _: None, lambda: None)))
    async with asyncio.timeout(5):
        await made.wait()
    task.cancel()


def test_of_all_kvpins_only_the_other_workers_are_reached():
    sockets = ["/run/kvpin-x/worker-2.http"]
    worker = RedisBus("redis://h", "n", Path("/run/kvpin-x/worker-1.http"), sockets)
    assert worker.http_socket.name == "worker-1.http"
    assert worker.reaches(sockets[0])
    assert not worker.reaches("/run/kvpin-y/worker-2.http")
    assert not RedisBus("redis://h", "n").reaches(sockets[0])


async def test_a_user_without_the_key_is_told_once_and_hears_the_others(server):
    with Redis.from_url(server.url) as redis:
        redis.execute_command("ACL SETUSER", *ACL[0].replace("~kvpin:default:engines", "").split())
    own = server.url.replace("://", "://kvpin:PASSWORD@")
    with capture_logs() as logs:
        async with world(lambda _: RedisBus(own, "default", secret=b"s")) as (_, (one, two)):
            one.fleet.book.drain("gpu1:8000", drained=True, now=5.0)
            await until(lambda: two.fleet.book.is_drained("gpu1:8000"))
    told = [
        each["key"] for each in logs if each["event"].startswith("orders about engines are not kept in Redis")
    ]
    assert told == ["kvpin:default:engines"] * 2  # once each


async def test_a_user_without_the_secret_still_keeps_orders(server):
    with Redis.from_url(server.url) as redis:
        redis.execute_command("ACL SETUSER", *ACL[0].replace("~kvpin:default:secret", "").split())
        own = server.url.replace("://", "://kvpin:PASSWORD@")
        async with world(lambda _: RedisBus(own, "default", secret=b"s"), 1) as (_, (one,)):
            one.fleet.book.drain("gpu1:8000", drained=True, now=5.0)
            await until(lambda: redis.exists("kvpin:default:engines"))
        async with world(lambda _: RedisBus(own, "default", secret=b"s"), 1) as (_, (later,)):
            assert later.fleet.book.is_drained("gpu1:8000")


async def test_the_documented_users_keep_the_channel_to_kvpin(server):
    with Redis.from_url(server.url) as redis:
        for user in ACL:
            redis.execute_command("ACL SETUSER", *user.split())
    own = server.url.replace("://", "://kvpin:PASSWORD@")
    async with world(lambda _: RedisBus(own, "default")) as (_, (one, two)):
        await until(lambda: in_step(one) and in_step(two))
        with Redis.from_url(server.url) as stranger, Redis.from_url(own) as kvpin:
            for command in (("PUBLISH", "kvpin:default", "x"), ("PUBLISH", "app:x", "x"), ("GET", "x")):
                allowed = {stranger: command[1] != "kvpin:default", kvpin: command[1] == "kvpin:default"}
                for user, may in allowed.items():
                    with contextlib.nullcontext() if may else pytest.raises(NoPermissionError):
                        user.execute_command(*command)
