"""The protocol on real sockets: what a connection does with requests, well-formed and not."""

import asyncio
import contextlib
import re
import select
import socket
import threading
import time

import pytest

from proxy.http.http1 import MAX_HEAD, Http1Protocol
from proxy.http.listeners import listen
from tests.ports import in_thread, opened, port_of

OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"
GET = b"GET %b HTTP/1.1\r\nhost: localhost\r\n%b\r\n"
CHUNKED = b"POST /upload HTTP/1.1\r\nhost: x\r\n%btransfer-encoding: chunked\r\n\r\n"
LAST = GET % (b"/say", b"connection: close\r\n")
IDLE_S = 0.5
MAY_END = threading.Event()


def answer(exchange, body=b"", status=200, headers=()):
    exchange.start(status, list(headers))
    exchange.finish(body)


async def echo(exchange):
    body = await exchange.read(1 << 20)
    answer(exchange, body, headers=[(b"content-length", b"%d" % len(body))])


async def say(exchange):
    said = exchange.method, exchange.target.decode(), dict(exchange.headers)
    answer(exchange, repr(said).encode())


async def upload(exchange):
    pieces = [piece async for piece in exchange.chunks()]
    answer(exchange, b"".join(pieces) + b" " + repr(dict(exchange.headers)).encode())


async def refuse(exchange):
    answer(exchange, b"too long", 413)


async def nothing(exchange):
    answer(exchange, status=204)


async def stream(exchange):
    exchange.start(200, [(b"content-type", b"text/plain")])
    for word in (b"one ", b"two ", b"", b"three"):
        exchange.write(word)
        await asyncio.sleep(0.1)
    exchange.finish()


async def much(exchange):
    exchange.start(200, [])
    for _ in range(64):
        exchange.write(b"x" * 262_144)
        if exchange.is_full:
            await exchange.drain()
    exchange.finish()


async def huge(exchange):
    answer(exchange, b"x" * (32 << 20))


async def stuck(exchange):
    await asyncio.to_thread(MAY_END.wait)
    answer(exchange, b"%d0" % exchange._arrived)


async def endless(exchange):
    await exchange.until_left()


async def crash(exchange):
    exchange.start(200, [])
    exchange.write(b"so far so good")
    raise RuntimeError("a bug")


HANDLERS = (say, upload, refuse, nothing, stream, much, huge, stuck, endless, crash)
BY_PATH = {b"/" + each.__name__.encode(): each for each in HANDLERS}


async def handler(exchange):
    await BY_PATH.get(exchange.target.partition(b"?")[0], echo)(exchange)


@pytest.fixture(scope="module")
def server():
    with in_thread(port_of(handler, idle_s=IDLE_S)) as address:
        yield address


@pytest.fixture
def connection(server):
    with socket.create_connection(server, timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


def everything(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def until(connection: socket.socket, end: bytes) -> bytes:
    answer = b""
    while not answer.endswith(end):
        chunk = connection.recv(4096)
        assert chunk, answer
        answer += chunk
    return answer


def send_until_it_stops(connection: socket.socket, data: bytes, limit: int) -> int:
    """Sends data again and again until it is not read for 0.2 s; returns how many bytes."""
    connection.settimeout(0.2)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < limit:
            sent += connection.send(data)
    connection.settimeout(60)
    return sent


class TestOffers:
    @pytest.mark.parametrize("offer", [OFFER, b"connection: upgrade\r\nupgrade: websocket\r\n"])
    @pytest.mark.parametrize("cut", [1, 30, 100, -8, -5, -2, None])
    def test_an_offered_upgrade_is_declined_by_an_answer(self, connection, offer, cut):
        request = HEAD + offer + b"\r\nhello"
        for _ in range(2):
            for part in (request[:cut], request[cut:] if cut is not None else b""):
                connection.sendall(part)
                time.sleep(0.01)  # so that the parts come apart
            assert until(connection, b"hello").startswith(b"HTTP/1.1 200")

    def test_a_thousand_pipelined_offers_are_all_answered(self, connection):
        bare = b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: a\r\nconnection: upgrade\r\n\r\n"
        connection.sendall(bare * 1000 + HEAD + b"connection: close\r\n\r\nhello")
        assert everything(connection).count(b"HTTP/1.1 200") == 1001


class TestRequests:
    def test_pipelined_requests_are_answered_in_order(self, connection):
        slow, plain = GET % (b"/stream", b""), HEAD + b"\r\nhello"
        connection.sendall(slow + plain + slow + LAST)
        answers = everything(connection)
        order = re.findall(rb"three|hello|'GET', ", answers)
        assert order == [b"three", b"hello", b"three", b"'GET', "]
        assert answers.count(b"HTTP/1.1 200 OK") == 4

    def test_many_pipelined_requests_are_not_all_taken_at_once(self, connection):
        long = b"GET /say HTTP/1.1\r\nhost: x\r\nx-long: %b\r\n\r\n" % (b"y" * 60_000)
        connection.sendall(GET % (b"/endless", b""))
        assert send_until_it_stops(connection, long, 64 << 20) < 32 << 20

    def test_a_client_that_reads_no_answers_is_not_read(self, connection):
        request = GET % (b"/say", b"x-long: %b\r\n" % (b"y" * 1000))
        sent = send_until_it_stops(connection, request * 100, 32 << 20)
        assert sent < 16 << 20
        # What was read is answered.
        assert everything(connection).count(b"HTTP/1.1 200") == sent // len(request)

    def test_nothing_is_read_behind_a_request_that_ends_the_connection(self, connection):
        connection.sendall(LAST + HEAD + b"\r\nhello")
        assert everything(connection).count(b"HTTP/1.1") == 1

    @pytest.mark.parametrize("target", [b"/say?a=1", b"/say?a=1#part", b"http://other:80/say?a=1"])
    def test_path_and_query_are_the_target(self, connection, target):
        connection.sendall(GET % (target, b"connection: close\r\n"))
        assert b"('GET', '/say?a=1', {" in everything(connection)

    def test_a_chunked_body_is_whole_and_its_trailers_are_no_headers(self, connection):
        connection.sendall(CHUNKED % b"connection: close\r\n" + b"5\r\nhello\r\n")
        time.sleep(0.05)
        connection.sendall(b"6\r\n world\r\n0\r\nx-late: 1\r\n\r\n")
        answer = everything(connection)
        assert b"\r\n\r\nhello world {" in answer
        assert b"x-late" not in answer

    def test_a_reader_that_does_not_read_slows_the_client_down(self, connection):
        size = 64 << 20
        connection.sendall(b"POST /stuck HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
        MAY_END.clear()
        assert send_until_it_stops(connection, bytes(262_144), size) < size / 2
        MAY_END.set()
        kept = int(until(connection, b"0").rpartition(b"\r\n\r\n")[2])
        assert 65_536 < kept / 10 < 10 << 20

    def test_a_client_that_waits_is_told_to_go_on(self, connection):
        connection.sendall(HEAD + b"expect: 100-continue\r\nconnection: close\r\n\r\n")
        assert until(connection, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"hello")
        assert everything(connection).endswith(b"\r\n\r\nhello")

    def test_a_client_that_is_refused_is_not(self, connection):
        head = b"POST /refuse HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n"
        connection.sendall(head)
        answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in answer

    def test_the_rest_of_a_refused_body_is_dropped(self, connection):
        connection.sendall(b"POST /refuse HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhello")
        assert until(connection, b"too long").startswith(b"HTTP/1.1 413 ")
        connection.sendall(b"world" + HEAD + b"\r\nhello")
        assert until(connection, b"hello").startswith(b"HTTP/1.1 200 ")

    def test_a_refused_client_gets_its_answer_although_it_sends_on_and_its_connection_ends(self, connection):
        size = 16 << 20
        head = b"POST /refuse HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        connection.sendall(head % size)
        assert until(connection, b"too long").startswith(b"HTTP/1.1 413 ")
        connection.sendall(bytes(size))
        assert everything(connection) == b""

    def test_a_body_in_chunks_of_a_byte_is_refused_after_many(self, connection):
        connection.sendall(CHUNKED % b"" + b"1\r\nx\r\n" * 16_384 + b"0\r\n\r\n")
        assert until(connection, b"}").count(b"x" * 16_384) == 1
        connection.sendall(CHUNKED % b"" + b"1\r\nx\r\n" * 16_500)
        assert everything(connection).startswith(b"HTTP/1.1 400 ")

    def test_the_longer_a_body_the_more_pieces_it_may_have(self, connection):
        chunk = b"200\r\n%b\r\n" % bytes(512)
        connection.sendall(CHUNKED % b"connection: close\r\n" + chunk * 40_000 + b"0\r\n\r\n")
        assert everything(connection).startswith(b"HTTP/1.1 200 ")


class TestAnswers:
    def test_a_stream_is_sent_in_chunks_as_it_comes(self, connection):
        connection.sendall(GET % (b"/stream", b""))
        first = until(connection, b"4\r\none \r\n")
        assert b"transfer-encoding: chunked" in first
        assert re.search(rb"\r\ndate: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\n", first)
        assert until(connection, b"0\r\n\r\n") == b"4\r\ntwo \r\n5\r\nthree\r\n0\r\n\r\n"

    def test_to_http_1_0_it_ends_with_the_connection(self, connection):
        connection.sendall(b"GET /stream HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        head, _, body = everything(connection).partition(b"\r\n\r\n")
        assert body == b"one two three"
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head

    def test_head_and_no_content_have_no_body(self, connection):
        connection.sendall(b"HEAD /stream HTTP/1.1\r\nhost: x\r\n\r\n" + GET % (b"/nothing", b"") + LAST)
        head, nothing, rest = everything(connection).split(b"\r\n\r\n", 2)
        for each in (head, nothing):
            assert b"transfer-encoding" not in each
            assert b"content-length" not in each
        assert nothing.startswith(b"HTTP/1.1 204 ")
        assert b"'/say'" in rest

    def test_a_slow_client_slows_the_handler_down_and_gets_everything(self, connection):
        connection.sendall(GET % (b"/much", b"connection: close\r\n"))
        time.sleep(0.2)
        assert everything(connection).count(b"x") == 64 * 262_144

    def test_an_answer_that_breaks_off_is_not_ended(self, connection):
        connection.sendall(GET % (b"/crash", b""))
        answer = everything(connection)
        assert answer.endswith(b"so far so good\r\n")


class TestRefusals:
    @pytest.mark.parametrize(
        "request_bytes",
        [
            b"hello\r\n\r\n",
            b"GET * HTTP/1.1\r\nhost: x\r\n\r\n",
            b"CONNECT localhost:22 HTTP/1.1\r\nhost: localhost:22\r\n\r\n",
            HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        ],
    )
    def test_what_is_no_http_is_refused(self, connection, request_bytes):
        connection.sendall(request_bytes)
        answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1") == 1

    def test_an_answer_that_runs_ends_before_what_is_no_http(self, connection):
        connection.sendall(GET % (b"/stream", b"") + b"hello\r\n\r\n")
        answer = everything(connection)
        assert answer.endswith(b"0\r\n\r\n")
        assert b"HTTP/1.1 400" not in answer

    def test_a_refusal_is_not_taken_for_the_answer_to_a_request_that_waits(self, connection):
        connection.sendall(GET % (b"/huge", b"") + GET % (b"/say", b""))
        time.sleep(0.2)  # the answer fills the socket
        connection.sendall(b"hello\r\n\r\n")
        time.sleep(0.1)
        answers = everything(connection)
        assert answers.count(b"x") >= 32 << 20
        assert b"HTTP/1.1 400" not in answers

    @pytest.mark.parametrize(
        "rest",
        [
            b"x-long: %b\r\n\r\n" % (b"a" * (MAX_HEAD + 100)),
            b"x-long: %b\r\ncontent-length: 5\r\n\r\nhello" % (b"a" * (MAX_HEAD + 100)),
            b"a: \r\n" * (MAX_HEAD // 4) + b"\r\n",
        ],
        ids=["a long header", "before a body", "tiny headers"],
    )
    def test_a_long_head_in_one_piece(self, connection, rest):
        connection.sendall(b"POST /say HTTP/1.1\r\nhost: x\r\n" + rest)
        answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert answer.count(b"HTTP/1.1") == 1

    @pytest.mark.parametrize("piece", [b"x: %b\r\n" % (b"y" * 1000), b"z" * 1000])
    def test_a_head_without_end(self, connection, piece):
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nx-long: ")
        for _ in range(MAX_HEAD // 1000 + 1):
            connection.sendall(piece)
        assert connection.recv(100).startswith(b"HTTP/1.1 431 ")

    @pytest.mark.parametrize(
        ("begin", "piece"),
        [
            (b"5\r\nhello\r\n0\r\n", b"x: %b\r\n" % (b"y" * 1000)),
            (b"5\r\nhello\r\n0\r\nx-long: ", b"z" * 1000),
            (b"5\r\nhello\r\n5;", b"z" * 1000),
        ],
        ids=["trailers", "a trailer", "a chunk's extension"],
    )
    def test_what_stands_beside_a_body_has_an_end(self, connection, begin, piece):
        connection.sendall(CHUNKED % b"" + begin)
        sent = 0
        while sent < 8 * MAX_HEAD and not select.select([connection], [], [], 0.001)[0]:
            connection.sendall(piece)
            sent += len(piece)
        assert connection.recv(100).startswith(b"HTTP/1.1 431 ")

    def test_a_long_body_is_no_long_head(self, connection):
        body = b"hello" * 100_000
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        for start in range(0, len(head + body), 50_000):
            connection.sendall((head + body)[start : start + 50_000])
            time.sleep(0.001)
        assert everything(connection).endswith(b"\r\n\r\n" + body)


def test_an_idle_connection_is_closed(connection):
    connection.sendall(HEAD + b"\r\nhello")
    until(connection, b"hello")
    begun = time.monotonic()
    assert everything(connection) == b""
    assert time.monotonic() - begun > IDLE_S * 0.8


def test_the_rest_of_a_refused_body_may_not_drip_for_ever(connection):
    connection.sendall(b"POST /refuse HTTP/1.1\r\nhost: localhost\r\ncontent-length: 40000\r\n\r\n")
    until(connection, b"too long")
    connection.settimeout(IDLE_S / 10)
    closed, latest = False, time.monotonic() + 60
    with contextlib.suppress(ConnectionError):
        while not closed:
            assert time.monotonic() < latest
            connection.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                closed = connection.recv(4096) == b""


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [(b"1", 0, 400), (b"1", 1, 200), (b"1", 2, 400), (b"0", 0, 200), (b"0", 1, 200), (b"0", 2, 400)],
)
def test_a_request_names_one_host(connection, version, hosts, status):
    head = b"GET /say HTTP/1.%b\r\n%bconnection: close\r\n\r\n" % (version, b"Host: a\r\n" * hosts)
    connection.sendall(head)
    assert everything(connection).startswith(b"HTTP/1.1 %d " % status)


async def test_a_tls_connection_that_is_lost_before_its_protocol_is_told_ends_like_others():
    class Lost(asyncio.Transport):
        def close(self):
            ended.append("closed")

        def is_closing(self):
            return False

    ended, connection = [], Http1Protocol(port_of(say))
    connection.connection_made(Lost())
    connection.close_if_idle(0.0)
    connection._is_new = False
    assert connection.evict()
    assert ended == ["closed", "closed"]
    connection.connection_lost(None)


async def test_a_connection_that_is_idle_is_closed_but_not_while_a_request_is_on_its_way():
    port, listener = port_of(say), listen("127.0.0.1", 0)

    async def until(holds):
        async with asyncio.timeout(30):
            while not holds():  # noqa: ASYNC110 - a test
                await asyncio.sleep(0.001)

    async with opened(port, listener):
        with socket.create_connection(listener.getsockname()) as client:
            await until(lambda: port.limits.connections)
            (connection,) = port.limits.connections

            def is_closed(for_s=0.0):
                connection.close_if_idle(for_s)
                return connection.transport.is_closing()

            assert not is_closed(for_s=60)
            client.sendall(b"GET /say HTTP/1.1\r\n")
            assert not is_closed()  # the loop has not read it yet
            await until(lambda: connection._head_bytes)
            assert not is_closed()
            client.sendall(b"host: localhost\r\n\r\n")
            assert (await asyncio.to_thread(client.recv, 65536)).startswith(b"HTTP/1.1 200")
            assert is_closed()
