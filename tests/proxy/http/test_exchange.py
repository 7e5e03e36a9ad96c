"""What an exchange writes, piece by piece. How requests are read is tested on sockets in test_http1.py."""

import tracemalloc

import pytest

from engine_adapter import Headers
from proxy.http.exchange import Exchange
from tests.ports import port_of

HEAD = b"HTTP/1.1 200 OK\r\ndate: now\r\nx-a: 1\r\n"


class Connection:
    is_of_peer = False

    def __init__(self):
        self.transport = self.port = self
        self.date = b"date: now\r\n"
        self.is_full = False
        self.writes = []
        self.ended = []

    def write(self, data):
        self.writes.append(data)

    def pause_reading(self):
        pass

    def answered(self, exchange):
        self.ended.append(exchange)


@pytest.fixture
def connection():
    return Connection()


def exchange_on(connection, method="GET", *, is_1_0=False):
    return Exchange(connection, method, b"/", Headers([]), is_1_0=is_1_0, keep_alive=True)


def test_head_and_body_are_one_write_with_a_length(connection):
    exchange = exchange_on(connection)
    exchange.start(200, [(b"x-a", b"1")])
    assert connection.writes == []
    exchange.finish(b"hello")
    assert connection.writes == [HEAD + b"content-length: 5\r\n\r\nhello"]
    assert connection.ended == [exchange]


def test_head_and_first_chunk_are_one_write_and_each_other_chunk_is_one(connection):
    exchange = exchange_on(connection)
    exchange.start(200, [(b"x-a", b"1")])
    for chunk in (b"one", b"", b"two"):
        exchange.write(chunk)
    exchange.finish()
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    assert connection.writes == [head + b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n"]


@pytest.mark.parametrize("is_1_0", [False, True])
def test_nothing_follows_the_end(connection, is_1_0):
    """The client would take it for the next answer."""
    exchange = exchange_on(connection, is_1_0=is_1_0)
    exchange.start(200, [])
    exchange.write(b"one")
    exchange.finish()
    sent = [*connection.writes]
    with pytest.raises(RuntimeError, match="after its end"):
        exchange.write(b"two")
    assert connection.writes == sent


def test_the_length_of_a_body_that_is_not_sent_is_passed_on(connection):
    exchange = exchange_on(connection, "HEAD")
    exchange.start(200, [(b"content-length", b"5")])
    exchange.finish()
    assert connection.writes == [b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-length: 5\r\n\r\n"]


@pytest.mark.parametrize("value", [b"a\r\nx: y", b"a\nx", b"a\rx", b"a\0x"])
def test_no_header_smuggles_another_in(connection, value):
    exchange = exchange_on(connection)
    with pytest.raises(ValueError, match="line break"):
        exchange.start(200, [(b"x-a", value)])
    assert (exchange.started, connection.writes) == (False, [])


def test_who_has_left_is_sent_nothing(connection):
    exchange = exchange_on(connection)
    told = []
    exchange.on_left = lambda: told.append(exchange.left)
    exchange.leave()
    exchange.start(200, [])
    exchange.write(b"one")
    exchange.finish()
    assert (told, connection.writes) == ([True], [])


async def test_a_body_in_small_pieces_takes_little_more_than_its_length(connection):
    exchange, pieces = exchange_on(connection, "POST"), 50_000
    tracemalloc.start()
    for _ in range(pieces):
        exchange.feed(bytes(bytearray(b"ab")))  # an object of its own, as the parser gives it
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    exchange.feed(b"c" * 1000)
    exchange.feed(b"d")
    exchange.feed_end()
    assert taken < 3 * 2 * pieces
    assert await exchange.read(1 << 20) == b"ab" * pieces + b"c" * 1000 + b"d"


def test_the_date_is_that_of_the_second(monkeypatch):
    port, now = port_of(None), 784_111_777.2
    monkeypatch.setattr("proxy.http.http1.time.time", lambda: now)
    dated = port.date
    assert dated == b"date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"  # the example of RFC 9110
    now += 0.5
    assert port.date is dated
    now += 1.0
    assert port.date == b"date: Sun, 06 Nov 1994 08:49:38 GMT\r\n"
