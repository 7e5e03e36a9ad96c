"""Connections on real sockets that idle, stall or are too many."""

import asyncio
import contextlib
import resource
import select
import socket
import threading
import time
from functools import partial

import pytest
from structlog.testing import capture_logs

import proxy.http.exchange
import proxy.http.http1
import proxy.http.listeners
import tests.ports
from proxy.api.own_answers import error_response
from proxy.errors import NoEngine, ProxyError
from proxy.http.http1 import Http1Protocol
from proxy.http.listeners import RESERVE, ConnectionLimits, Permission, connection_limit, listen
from tests import kv_world
from tests.ports import in_thread, opened, port_of

WAIT_S = 20
HEAD = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
GET = b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n"
LIMIT = 8
LOST = threading.Event()  # set when the server has lost a connection
FULL = b"kvpin serves as many connections as it can"


async def handler(exchange):
    """`/health` is what the reserve is for; `/busy` never ends; `/much` is more than a socket holds; all
    others give the body back."""
    try:
        if exchange.target == b"/health":
            exchange.start(200, [])
            exchange.finish(b"ok")
            return
        if exchange.is_reserved:
            raise NoEngine(FULL.decode())
        if exchange.target == b"/busy":
            await exchange.until_left()
            return
        body = await exchange.read(1 << 20)
    except ProxyError as error:
        answer = error_response(error)
        exchange.start(answer.status_code, answer.raw_headers)
        exchange.finish(bytes(answer.body))
        return
    exchange.start(200, [])
    exchange.finish(bytes(64 << 20) if exchange.target == b"/much" else body)


@contextlib.contextmanager
def serving(limit=1000, **options):
    class Protocol(Http1Protocol):
        __slots__ = ()

        def connection_lost(self, exc):
            Http1Protocol.connection_lost(self, exc)
            LOST.set()

    port = port_of(handler, limit=limit, **options)
    with in_thread(port, protocol=Protocol) as address, contextlib.ExitStack() as opened:
        yield lambda: opened.enter_context(socket.create_connection(address, timeout=WAIT_S))


def everything(connection):
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def ask(connection, target=b"/health"):
    with contextlib.suppress(ConnectionError):
        connection.sendall(GET % target)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(4096)
    return b""


def is_turned_away(answer):
    head, _, text = answer.partition(b"\r\n\r\n")
    is_told = b"connection: close" in head and b"retry-after: 1" in head and FULL in text
    return is_told and head.startswith(b"HTTP/1.1 503 ")


def fill(connect):
    """Takes all places with requests that never end."""
    for each in [connect() for _ in range(LIMIT)]:
        each.sendall(GET % b"/busy")
    until(lambda: b" 503 " in ask(connect(), b"/"))


def until(holds):
    latest = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < latest
        time.sleep(0.02)


def is_over(connection):
    """Whether the connection ends within 0.05 s."""
    connection.settimeout(0.05)
    with contextlib.suppress(TimeoutError):
        return connection.recv(4096) == b""
    return False


class TestSlowClients:
    def test_a_body_that_stops_gets_a_408_and_its_connection_is_closed(self, monkeypatch):
        monkeypatch.setattr(proxy.http.exchange, "BODY_S", 0.3)
        with serving() as connect:
            connection = connect()
            connection.sendall(HEAD % (b"/", 10) + b"hello")
            answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer
        assert b'"code":"slow_body"' in answer

    def test_a_body_that_drips_after_much_at_once_does_too(self, monkeypatch):
        monkeypatch.setattr(proxy.http.exchange, "BODY_S", 0.3)
        with serving() as connect:
            connection, sent = connect(), 512 * 1024
            connection.sendall(HEAD % (b"/", sent + 10_000) + bytes(sent))
            connection.settimeout(0.05)

            def answer():
                connection.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    return connection.recv(4096).startswith(b"HTTP/1.1 408 ")

            until(answer)

    def test_a_head_that_drips_is_cut_off(self):
        with serving(idle_s=0.2) as connect:
            connection = connect()
            with contextlib.suppress(ConnectionError):
                until(lambda: connection.sendall(b"G") or is_over(connection))

    def test_an_answer_that_is_not_taken_is_broken_off(self, monkeypatch):
        monkeypatch.setattr(proxy.http.http1, "SEND_S", 0.1)
        with serving(idle_s=0.1) as connect:
            connection = connect()
            LOST.clear()
            connection.sendall(GET % b"/much")
            assert LOST.wait(WAIT_S)
            assert len(everything(connection)) < 64 << 20

    def test_an_answer_that_is_taken_slowly_arrives(self, monkeypatch):
        monkeypatch.setattr(proxy.http.http1, "SEND_S", 2)
        with serving(idle_s=0.1) as connect:
            connection, got, begun = connect(), 0, time.monotonic()
            connection.sendall(GET % b"/much")
            while got < 64 << 20:
                got += len(connection.recv(1 << 19)) or pytest.fail(f"it ended after {got} bytes")
                if time.monotonic() - begun < 2.5:
                    time.sleep(0.025)
            assert time.monotonic() - begun > 2.5

    def test_a_stop_does_not_wait_for_half_a_body(self, monkeypatch):
        monkeypatch.setattr(proxy.http.exchange, "STOPPING_S", 0.2)
        monkeypatch.setattr(tests.ports, "GRACE_S", 60.0)
        with contextlib.ExitStack() as opened:
            with serving() as connect:
                connection = opened.enter_context(connect().dup())
                connection.sendall(HEAD % (b"/", 10) + b"hello")
                assert ask(connect()).startswith(b"HTTP/1.1 200 ")  # so the head before it is read
                begun = time.monotonic()
            assert time.monotonic() - begun < WAIT_S
            assert b"kvpin is stopping" in everything(connection)

    async def test_a_stop_does_not_wait_for_half_a_head_that_follows_an_answer(self, monkeypatch):
        monkeypatch.setattr(proxy.http.http1, "STOPPING_S", 0.1)
        monkeypatch.setattr(proxy.http.http1, "LOOK_S", 0.1)
        port = port_of(handler)
        with listen("127.0.0.1", 0) as listener:
            async with opened(port, listener):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(HEAD % (b"/", 10) + b"hello")
                await kv_world.until(lambda: port.answers)
                port.stop()
                await asyncio.sleep(0.2)  # the connection is looked at while its request runs
                writer.write(b"world" + (GET % b"/")[:20])
                async with asyncio.timeout(WAIT_S):
                    assert (await reader.read()).endswith(b"helloworld")
                writer.close()

    async def test_nor_for_one_on_a_connection_whose_handshake_ended_after_it_began(self, monkeypatch):
        monkeypatch.setattr(proxy.http.http1, "STOPPING_S", 0.1)
        monkeypatch.setattr(proxy.http.http1, "LOOK_S", 0.1)
        port = port_of(handler)
        with listen("127.0.0.1", 0) as listener:
            async with opened(port, listener):
                port.stop()  # as with TLS, the connection is made only now
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write((GET % b"/")[:20])
                async with asyncio.timeout(WAIT_S):
                    assert await reader.read() == b""
                writer.close()

    def test_a_client_that_leaves_behind_many_pipelined_requests_is_noticed(self, monkeypatch):
        monkeypatch.setattr(proxy.http.http1, "LOOK_S", 0.1)
        with serving(limit=1) as connect:
            connection = connect()
            connection.sendall(GET % b"/busy" * 20)
            assert b" 503 " in ask(connect(), b"/")
            connection.close()
            until(lambda: b" 200 " in ask(connect(), b"/"))


class TestTooMany:
    def test_the_longest_idle_ones_make_room(self, monkeypatch):
        monkeypatch.setattr(proxy.http.http1, "EVICTABLE_S", 0.0)
        with serving(LIMIT) as connect, capture_logs() as logs:
            idle = [connect() for _ in range(LIMIT)]
            assert ask(idle[0]).startswith(b"HTTP/1.1 200 ")
            half = [connect() for _ in range(2 * LIMIT)]
            for each in half:
                each.sendall(b"POST / HTTP/1.1\r\nhost")
            until(lambda: b" 200 " in ask(connect(), b"/"))  # not while their bytes are unread
            assert is_turned_away(everything(idle[1]))
        assert [each["event"].partition(":")[0] for each in logs] == ["connection limit reached"]

    def test_health_answers_while_all_are_busy_and_requests_are_refused(self):
        with serving(LIMIT) as connect:
            fill(connect)
            for _ in range(3):
                health = ask(connect())
                assert health.startswith(b"HTTP/1.1 200 ")
                assert b"connection: close" in health

    def test_beyond_the_reserve_they_are_told_so(self, monkeypatch):
        with serving(LIMIT) as connect:
            fill(connect)
            monkeypatch.setattr(proxy.http.listeners, "RESERVE", 0)
            told = [connect() for _ in range(5)]  # only the last one waits for its client
            assert [is_turned_away(everything(each)) for each in told] == [True] * 5

    def test_a_kept_connection_whose_next_request_is_due_stays(self, monkeypatch):
        monkeypatch.setattr(proxy.http.http1, "EVICTABLE_S", 60.0)
        with serving(LIMIT) as connect:
            kept = [connect() for _ in range(LIMIT)]
            for _ in range(2):
                assert all(ask(each, b"/").startswith(b"HTTP/1.1 200 ") for each in kept)
                assert ask(connect(), b"/").startswith(b"HTTP/1.1 503 ")
            monkeypatch.setattr(proxy.http.http1, "EVICTABLE_S", 0.0)
            assert ask(connect(), b"/").startswith(b"HTTP/1.1 200 ")
            ((ended,), _, _) = select.select(kept, [], [], 2)
            assert ended.recv(1) == b""  # as idle connections end

    async def test_one_whose_request_is_unread_stays(self):
        made = partial(Http1Protocol, port_of(handler))
        client, accepted = socket.socketpair()
        with client:
            _, connection = await asyncio.get_running_loop().connect_accepted_socket(made, accepted)
            client.sendall(GET % b"/health")
            assert not connection.evict()
            client.setblocking(False)
            assert (await asyncio.get_running_loop().sock_recv(client, 99)).startswith(b"HTTP/1.1 200 ")
            assert connection.evict()


class Waiting:
    def __init__(self, idle_since):
        self.idle_since, self.evicted = idle_since, False

    def evict(self):
        self.evicted = True
        return True


def test_who_is_let_in():
    busy = [Waiting(None) for _ in range(4 + RESERVE)]
    new, old, older = Waiting(9.0), Waiting(2.0), Waiting(1.0)

    def admitted(*there):
        limits = ConnectionLimits(4)
        limits.connections.update(there)
        place = limits.admit(new)
        assert limits.connections == {each for each in (*there, new) if not each.evicted} - (
            {new} if place is Permission.NONE else set()
        )
        return place

    assert admitted(*busy[:3]) is Permission.FREE
    assert admitted(*busy[:4]) is Permission.RESERVED
    assert admitted(*busy) is Permission.NONE
    assert admitted(*busy[:4], old, older) is Permission.FREE
    assert (old.evicted, older.evicted, new.evicted) == (False, True, False)


def test_the_limit_follows_the_files_that_the_machine_allows(monkeypatch):
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert connection_limit() == (4096 - 256) // 2
    assert limits[-1] == (4096, 4096)
    for files, limit in (
        (256, 32),
        (65_536, proxy.http.listeners.MAX_CONNECTIONS),
        (resource.RLIM_INFINITY, 16_384),
    ):
        limits.append((files, files))
        assert connection_limit() == limit
