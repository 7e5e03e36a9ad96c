"""What may stand on the wire, byte by byte, and when a connection is used again."""

from __future__ import annotations

import asyncio
import socket

import pytest

from engine_adapter.errors import EngineDied, EngineGarbled, EngineUnavailable
from engine_adapter.http import client
from engine_adapter.http.connection import MAX_HEAD_BYTES, MAX_WAITING_BYTES
from engine_adapter.http.prepare import OutgoingRequest
from tests.engine_adapter.http.raw_engine import Wire, raw_engine

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def post(transport, url, body=b"{}", *headers):
    return await transport.send(OutgoingRequest("POST", url, list(headers), body))


async def fetch(transport, url, method="POST", body=b"{}", headers=()):
    request = OutgoingRequest(method, url, list(headers), body)
    async with await transport.send(request) as response:
        return response.status, await response.read()


def answering(*answers: bytes, pieces: int = 1):
    """Answers the requests of a connection in turn, each answer in that many pieces; then waits."""

    async def serve(wire):
        for answer in answers:
            await wire.until(b"{}") if b"POST" in await wire.head() else None
            size = -(-len(answer) // pieces)
            for at in range(0, len(answer), size):
                await wire.write(answer[at : at + size])
                await asyncio.sleep(0.001 if pieces > 1 else 0)
        await wire.left()

    return serve


def closing(answer: bytes):
    async def serve(wire):
        await wire.head()
        await wire.write(answer)

    return serve


class TestRelay:
    """Pieces that are passed on in the callback that reads them."""

    @pytest.mark.parametrize("pieces", [1, 7, 40])
    async def test_gives_every_byte_in_order_to_a_taker_that_is_often_full(self, transport, pieces):
        answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"3\r\nabc\r\n" * 9 + b"0\r\n\r\n"
        taken, fulls = [], 0

        def take(piece):
            taken.append(piece)
            return len(taken) % 2 == 1

        async with raw_engine(answering(answer, OK, pieces=pieces)) as (url, wires):
            async with await post(transport, url) as response:
                while not await response.relay(take):
                    fulls += 1
            assert b"".join(taken) == b"abc" * 9
            assert fulls == len(taken) // 2 or pieces == 1
            assert await fetch(transport, url) == (200, b"ok")
            assert len(wires) == 1

    async def test_raises_what_the_taker_raises_and_drops_the_connection(self, transport):
        def take(_piece):
            raise ValueError("no")

        async with raw_engine(answering(OK, pieces=40)) as (url, wires):
            with pytest.raises(ValueError, match="no"):
                async with await post(transport, url) as response:
                    await response.relay(take)
            assert (await fetch(transport, url))[1] == b"ok"
            assert len(wires) == 2

    async def test_raises_the_engines_failure_after_its_last_bytes(self, transport):
        taken = []
        async with raw_engine(closing(OK[:-1])) as (url, _), await post(transport, url) as response:
            with pytest.raises(EngineDied):
                await response.relay(lambda piece: taken.append(piece) is None)
        assert b"".join(taken) == b"o"


class TestAnswers:
    @pytest.mark.parametrize("pieces", [1, 7, 1000])
    @pytest.mark.parametrize(
        ("answer", "body"),
        [
            (OK, b"ok"),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-t: 1\r\n\r\n", b"ok"),
            (b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\nHTTP/1.1 100 Go\r\n\r\n" + OK, b"ok"),
            (b"HTTP/1.1 200 OK\r\nconnection: upgrade\r\nupgrade: h2c\r\n" + OK[17:], b"ok"),
            (b"HTTP/1.1 204 None\r\n\r\n", b""),
            (b"HTTP/1.1 304 Same\r\ncontent-length: 9\r\n\r\n", b""),
            (b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok", b"ok"),
        ],
    )
    async def test_keep_the_connection(self, transport, answer, body, pieces):
        async with raw_engine(answering(answer, OK, pieces=pieces)) as (url, wires):
            assert (await fetch(transport, url))[1] == body
            assert await fetch(transport, url) == (200, b"ok")
            assert len(wires) == 1

    @pytest.mark.parametrize(
        "answer",
        [
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
            b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
            OK + b"HTTP/1.1 500 Not asked for\r\ncontent-length: 3\r\n\r\nbad",
            OK + b"\0garbage",
        ],
        ids=["said so", "HTTP/1.0", "two answers", "an answer and garbage"],
    )
    async def test_end_the_connection(self, transport, answer):
        async with raw_engine(answering(answer)) as (url, wires):
            for _ in range(2):
                assert await fetch(transport, url) == (200, b"ok")
            assert len(wires) == 2

    @pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nx: y\r\n\r\n"])
    async def test_without_a_length_end_with_the_connection(self, transport, head):
        async with raw_engine(closing(head + b"some text")) as (url, _):
            assert await fetch(transport, url) == (200, b"some text")

    async def test_that_nobody_asked_for_are_never_taken_for_the_next_ones(self, transport):
        async def serve(wire):
            await wire.head()
            await wire.write(OK)
            await asyncio.sleep(0.02)
            await wire.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother")
            await wire.left()

        async with raw_engine(serve) as (url, wires):
            for _ in range(2):
                assert await fetch(transport, url) == (200, b"ok")
                await asyncio.sleep(0.05)
            assert len(wires) == 2

    @pytest.mark.parametrize(
        "answer", [OK, OK[:-2], b"HTTP/1.1 404 No\r\ntransfer-encoding: chunked\r\n\r\n"]
    )
    async def test_to_head_have_no_body(self, transport, answer):
        async with raw_engine(answering(answer, OK)) as (url, wires):
            assert (await fetch(transport, url, "HEAD", None))[1] == b""
            assert await fetch(transport, url) == (200, b"ok")
            assert len(wires) == (2 if answer is OK else 1)

    async def test_headers_are_lower_case_bytes_without_space_around(self, transport):
        answer = b"HTTP/1.1 200 OK\r\nX-Odd:  za\xc5\xbc \t\r\nNone:\r\nX-Odd: 2\r\ncontent-length: 0\r\n\r\n"
        expected = [(b"x-odd", b"za\xc5\xbc"), (b"none", b""), (b"x-odd", b"2"), (b"content-length", b"0")]
        async with raw_engine(answering(answer)) as (url, _), await post(transport, url) as response:
            assert response.headers.raw == expected

    async def test_a_large_one_is_read_whole(self, transport):
        size = 20 * MAX_WAITING_BYTES
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size)
        async with raw_engine(answering(answer, OK)) as (url, wires):
            assert await fetch(transport, url) == (200, bytes(size))
            assert await fetch(transport, url) == (200, b"ok")
            assert len(wires) == 1


class TestWrongAnswers:
    async def test_what_came_with_bytes_that_are_no_http_is_not_passed_on(self, transport):
        """Some of it may be garbage: an engine's bytes, shifted by what got in between."""

        async def answer(wire):
            await wire.head()
            await wire.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
            await read.wait()
            await wire.write(b"3\r\n\xb8\xb9two\r\n")

        read = asyncio.Event()
        async with raw_engine(answer) as (url, _), await post(transport, url, None) as response:
            assert await response.receive() == b"one"
            read.set()
            with pytest.raises(EngineUnavailable, match="not HTTP"):
                await response.receive()

    @pytest.mark.parametrize(
        ("answer", "why"),
        [
            (b"HTTP/1.1 099 Odd\r\ncontent-length: 0\r\n\r\n", "status 99"),
            (b"HTTP/1.1 600 Odd\r\ncontent-length: 0\r\n\r\n", "status 600"),
            (b"HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", "not HTTP/1.1"),
            (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP/1.1"),
            (b"HTTP/1.1 200 OK\r\nname\r\n\r\n", "not HTTP/1.1"),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", "not HTTP/1.1"),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", "not HTTP/1.1"),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chu\xffnked\r\n\r\n2\r\nok\r\n0\r\n\r\n", "coding 'chu"),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "coding 'gzip"),
            (b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_HEAD_BYTES, "longer than"),
            (b"HTTP/1.1 103 Hm\r\n\r\n" * (MAX_HEAD_BYTES // 16), "longer than"),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nsome\r\nxyz\r\n", "not HTTP/1.1"),
            (b"", "no answer"),
        ],
    )
    async def test_are_a_failed_engine(self, transport, answer, why):
        async with raw_engine(closing(answer)) as (url, _):
            with pytest.raises(EngineUnavailable, match=why) as caught:
                await fetch(transport, url)
            assert isinstance(caught.value, (EngineDied, EngineGarbled))


class TestRequests:
    async def test_leave_at_once(self):
        """Nagle's algorithm would hold back a small write until the one before it is acknowledged."""
        async with raw_engine(answering(OK)) as (url, _):
            connection = await client.Origin(url.rstrip("/"), None, 1.0).connect()
            sock = connection._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            connection.close()

    async def test_that_ask_for_it_end_the_connection(self, transport):
        async with raw_engine(answering(OK)) as (url, wires):
            for _ in range(2):
                headers = [(b"connection", b"close")]
                assert await fetch(transport, url, headers=headers) == (200, b"ok")
            assert len(wires) == 2

    @pytest.mark.parametrize(
        ("method", "told"), [("POST", True), ("PUT", True), ("GET", False), ("DELETE", False)]
    )
    async def test_with_an_empty_body_say_so_where_one_is_usual(self, transport, method, told):
        async with raw_engine(closing(OK)) as (url, wires):
            await fetch(transport, url, method, None)
            assert (b"content-length: 0\r\n" in wires[0].seen) is told


class TestUploads:
    @staticmethod
    async def parts(*parts: bytes):
        for part in parts:
            yield part
            await asyncio.sleep(0)

    async def test_are_chunked_and_the_connection_is_kept(self, transport):
        async def serve(wire):
            for _ in range(2):
                await wire.head()
                await wire.until(b"0\r\n\r\n")
                await wire.write(OK)
            await wire.left()

        async with raw_engine(serve) as (url, wires):
            for _ in range(2):
                async with await post(transport, url, self.parts(b"one", b"", b"two")) as response:
                    assert await response.read() == b"ok"
            assert len(wires) == 1
            assert wires[0].seen.count(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n") == 2

    async def test_of_known_length_are_not(self, transport):
        async def serve(wire):
            await wire.head()
            await wire.until(b"onetwo")
            await wire.write(OK)
            await wire.left()

        async with raw_engine(serve) as (url, wires):
            parts, length = self.parts(b"one", b"two"), (b"content-length", b"6")
            async with await post(transport, url, parts, length) as response:
                assert await response.read() == b"ok"
            assert wires[0].seen.endswith(b"content-length: 6\r\n\r\nonetwo")
            assert b"chunked" not in wires[0].seen

    @pytest.mark.parametrize("length", [b"5", b"7"], ids=["too long", "too short"])
    async def test_of_another_length_than_they_say_are_broken_off(self, transport, length):
        async with raw_engine(Wire.left) as (url, wires):
            with pytest.raises(ValueError, match="does not have"):
                await post(transport, url, self.parts(b"one", b"two"), (b"content-length", length))
            await asyncio.sleep(0.02)
            assert wires[0].seen.partition(b"\r\n\r\n")[2] == (b"one" if length == b"5" else b"onetwo")

    async def test_that_the_engine_does_not_want_are_stopped(self, transport):
        ended = asyncio.Event()

        async def endless():
            try:
                while True:
                    yield b"x" * 1000
                    await asyncio.sleep(0.001)
            finally:
                ended.set()

        async def serve(wire):
            await wire.head()
            await wire.write(b"HTTP/1.1 413 Too large\r\ncontent-length: 2\r\n\r\nno")
            await wire.left()

        async with raw_engine(serve) as (url, wires):
            async with await post(transport, url, endless()) as response:
                assert (response.status, await response.read()) == (413, b"no")
            await asyncio.wait_for(ended.wait(), 5)
            assert await fetch(transport, url) == (413, b"no")
            assert len(wires) == 2

    async def test_wait_for_an_engine_that_reads_slowly(self, transport):
        given = 0

        async def source():
            nonlocal given
            for _ in range(400):
                yield bytes(65536)
                given += 1

        read = asyncio.Event()

        async def serve(wire):
            await wire.head()
            await read.wait()
            while not (await wire.reader.read(1 << 20)).endswith(b"\r\n0\r\n\r\n"):
                pass
            await wire.write(OK)

        async with raw_engine(serve) as (url, _):
            asked = asyncio.create_task(post(transport, url, source()))
            before = -1
            while given != before or not given:
                before = given
                await asyncio.sleep(0.1)
            assert given < 250
            read.set()
            async with await asked as response:
                assert await response.read() == b"ok"
            assert given == 400


class TestIdleConnections:
    async def test_are_closed_when_they_are_old(self, transport, monkeypatch):
        monkeypatch.setattr(client, "KEEPALIVE_S", 0.05)
        async with raw_engine(answering(OK)) as (url, wires):
            await fetch(transport, url)
            await asyncio.wait_for(wires[0].is_left.wait(), 5)

    async def test_that_are_old_are_not_used(self, transport, monkeypatch):
        async with raw_engine(answering(OK)) as (url, wires):
            await fetch(transport, url)
            monkeypatch.setattr(client, "KEEPALIVE_S", 0.0)
            await asyncio.sleep(0.02)
            await fetch(transport, url)
            assert len(wires) == 2

    async def test_the_last_used_is_used_first(self, transport):
        async with raw_engine(answering(OK, OK, OK)) as (url, wires):
            await asyncio.gather(fetch(transport, url), fetch(transport, url))
            for _ in range(2):
                await fetch(transport, url)
            assert sorted(wire.seen.count(b"POST") for wire in wires) == [1, 3]
