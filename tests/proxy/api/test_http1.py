import socket
import time

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from proxy.api.http1 import Http1Protocol
from tests.engines import served

OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await request.body())


@pytest.fixture(scope="module")
def server():
    with served(Starlette(routes=[Route("/", echo, methods=["POST"])]), http=Http1Protocol, ws="none") as url:
        yield "127.0.0.1", int(url.rpartition(":")[2])


def everything(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(4096), b""))


def answered(connection: socket.socket) -> bytes:
    """One answer that ends with the echo."""
    answer = b""
    while not answer.endswith(b"hello"):
        chunk = connection.recv(4096)
        assert chunk, answer
        answer += chunk
    return answer


@pytest.mark.parametrize("offer", [OFFER, b"connection: upgrade\r\nupgrade: websocket\r\n"])
@pytest.mark.parametrize("cut", [1, 30, 100, -8, -5, -2, None])
def test_an_offered_upgrade_is_declined_by_an_answer(server, offer, cut):
    request = HEAD + offer + b"\r\nhello"
    with socket.create_connection(server, timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            for part in (request[:cut], request[cut:] if cut is not None else b""):
                connection.sendall(part)
                time.sleep(0.01)  # so that the parts come apart
            assert answered(connection).startswith(b"HTTP/1.1 200")


def test_pipelined_offers_are_all_answered(server):
    with socket.create_connection(server, timeout=10) as connection:
        connection.sendall((HEAD + OFFER + b"\r\nhello") * 2 + HEAD + b"connection: close\r\n\r\nhello")
        assert everything(connection).count(b"HTTP/1.1 200") == 3


def test_there_are_no_tunnels(server):
    with socket.create_connection(server, timeout=10) as connection:
        connection.sendall(b"CONNECT localhost:22 HTTP/1.1\r\nhost: localhost:22\r\n\r\n")
        assert everything(connection).startswith(b"HTTP/1.1 400")


def test_other_connections_go_on(server):
    with socket.create_connection(server, timeout=10) as connection:
        for _ in range(2):
            connection.sendall(HEAD + b"\r\nhello")
            assert b"connection: close" not in answered(connection)


def test_what_is_no_http_is_refused(server):
    with socket.create_connection(server, timeout=10) as connection:
        connection.sendall(b"hello\r\n\r\n")
        assert everything(connection).startswith(b"HTTP/1.1 400")
