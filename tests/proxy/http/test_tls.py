"""HTTPS on kvpin's own port, as a process: its certificate, its clients' certificates, their renewal. TLS
handshakes on real sockets: silent, late, broken off, and in one piece with the first request."""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
import time
from functools import partial

import httpx
import pytest
import trustme
from structlog.testing import capture_logs

import proxy.http.tls
import tests.ports
from proxy.http.http1 import Http1Protocol
from proxy.http.listeners import RESERVE, listen
from proxy.http.tls import HANDSHAKE_S, server_context, shake_hands
from proxy.settings import SettingsError, TlsSettings
from tests.fakes import FakeEngine
from tests.ports import in_thread, port_of


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def files(tmp_path, authority):
    """A certificate of this machine, its key, and the authority that also signed the client's."""
    paths = {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "ca", "client")}
    write(authority, paths)
    authority.cert_pem.write_to_path(paths["ca"])
    authority.issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(paths["client"])
    return paths


def write(authority, paths):
    issued = authority.issue_cert("127.0.0.1", "localhost")
    paths["key"].write_bytes(issued.private_key_pem.bytes())
    paths["cert"].write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))


async def test_https_with_client_certificates_that_are_renewed_without_a_restart(files, authority, tmp_path):
    trusts = ssl.create_default_context(cafile=str(files["ca"]))
    shows = ssl.create_default_context(cafile=str(files["ca"]))
    shows.load_cert_chain(files["client"])
    config, log = tmp_path / "kvpin.toml", tmp_path / "log"
    async with FakeEngine("a") as engine:
        with listen("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        config.write_text(
            f'port = {port}\n[tls]\ncert = "{files["cert"]}"\nkey = "{files["key"]}"\n'
            f'client_ca = "{files["ca"]}"\n[[engines]]\nkind = "openai_compatible"\nurl = "{engine.url}"\n'
        )
        command = ["-m", "proxy.cli", "serve", "--config", str(config), "--log-format", "json"]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdout=output, stderr=output
            )
        try:
            await logged(log, "engine is ready")
            async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=shows) as client:
                ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
                answer = await client.post("/v1/chat/completions", json=ask)
                assert answer.content.endswith(b"data: [DONE]\n\n")
                assert f"https://127.0.0.1:{port}/v1" in (await client.get("/")).text
            async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=trusts) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get("/health/live")
            before = await asyncio.to_thread(serial, port, shows)
            write(authority, files)
            process.send_signal(signal.SIGHUP)
            await logged(log, "settings reloaded")
            assert await asyncio.to_thread(serial, port, shows) != before
            files["key"].write_bytes(b"none")
            process.send_signal(signal.SIGHUP)
            await logged(log, "settings not reloaded: the old ones stay")
            assert await asyncio.to_thread(serial, port, shows) is not None
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def logged(log, text):
    async with asyncio.timeout(120):
        while text not in log.read_text():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)


def serial(port, context):
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        return connection.getpeercert()["serialNumber"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cert": "/nowhere"}, r"tls.cert: '/nowhere' cannot be read: No such file"),
        ({"key": "ca"}, r"do not go together as a PEM certificate and its unencrypted private key"),
        ({"client_ca": "key"}, r"tls.client_ca: '.*key.pem' holds no certificates in PEM form"),
    ],
)
def test_files_that_cannot_be_used_are_named(files, change, said):
    values = {
        name: files.get(value, value) for name, value in {"cert": "cert", "key": "key", **change}.items()
    }
    with pytest.raises(SettingsError, match=said):
        server_context(TlsSettings(**values))


WAIT_S = 60
LIMIT = 4
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def handler(exchange):
    exchange.start(200, [])
    exchange.finish(b"ok")


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
