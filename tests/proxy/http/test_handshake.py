"""TLS handshakes on real sockets: silent, late, broken off, and in one piece with the first request."""

import contextlib
import logging
import socket
import ssl
import time
from functools import partial

import pytest
import trustme
from structlog.testing import capture_logs

import proxy.http.tls
import tests.ports
from proxy.http.http1 import Http1Protocol
from proxy.http.listeners import RESERVE
from proxy.http.tls import HANDSHAKE_S, shake_hands
from tests.ports import in_thread, port_of

WAIT_S = 60
LIMIT = 4
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def handler(exchange):
    exchange.start(200, [])
    exchange.finish(b"ok")


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def trusts(authority):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture
def port():
    return port_of(handler, limit=LIMIT)


@pytest.fixture
def begin_on(authority):
    """What begins a connection of a port with TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    return lambda port: partial(shake_hands, context, port.limits, partial(Http1Protocol, port))


@pytest.fixture
def connect(port, begin_on):
    """Opens a connection to a port with TLS and few places, and says nothing on it."""
    with in_thread(port, begin_on) as address, contextlib.ExitStack() as opened:
        yield lambda: opened.enter_context(socket.create_connection(address, timeout=WAIT_S))


def ask(connection, trusts):
    with trusts.wrap_socket(connection, server_hostname="127.0.0.1") as spoken:
        spoken.sendall(GET)
        return spoken.recv(4096)


def is_over(connection):
    """Waits for the end of a connection, clean or not."""
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    return True


def test_silent_ones_make_room_when_they_are_many(connect, trusts):
    with capture_logs() as logs:
        silent = [connect() for _ in range(2 * (LIMIT + RESERVE))]
        assert ask(connect(), trusts).startswith(b"HTTP/1.1 200 ")
        assert all(is_over(each) for each in silent[: LIMIT + RESERVE])
    assert "connection limit reached" in logs[0]["event"]


def test_a_handshake_has_its_time(connect, trusts, monkeypatch, caplog):
    monkeypatch.setattr(proxy.http.tls, "HANDSHAKE_S", 0.2)
    with caplog.at_level(logging.WARNING):
        assert is_over(connect())
    assert not caplog.records
    monkeypatch.undo()
    assert ask(connect(), trusts).startswith(b"HTTP/1.1 200 ")


def test_a_stop_waits_a_few_seconds_for_one_that_is_silent(port, begin_on, monkeypatch):
    monkeypatch.setattr(proxy.http.tls, "STOPPING_S", 0.2)
    monkeypatch.setattr(tests.ports, "GRACE_S", 60.0)
    with contextlib.ExitStack() as opened:
        with in_thread(port, begin_on) as address:
            silent = opened.enter_context(socket.create_connection(address, timeout=WAIT_S))
            while not port.limits.connections:
                time.sleep(0.01)
            begun = time.monotonic()
        assert 0.2 <= time.monotonic() - begun < HANDSHAKE_S
        assert is_over(silent)


def test_what_speaks_no_tls_ends_quietly(connect, trusts, caplog):
    with caplog.at_level(logging.WARNING):
        plain = connect()
        plain.sendall(GET)
        assert is_over(plain)
        connect().close()
        assert ask(connect(), trusts).startswith(b"HTTP/1.1 200 ")
    assert not caplog.records


def test_a_request_may_come_with_the_end_of_the_handshake(connect, trusts):
    connection, received, to_send = connect(), ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusts.wrap_bio(received, to_send, server_hostname="127.0.0.1")

    def until_done(step):
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                connection.sendall(to_send.read())
                received.write(connection.recv(65536))

    until_done(client.do_handshake)
    client.write(GET)
    connection.sendall(to_send.read())
    assert until_done(lambda: client.read(4096)).startswith(b"HTTP/1.1 200 ")
