"""Heads that are odd or endless, connections that are idle, flood or are never read, unfinished bodies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator

from tests.hostile.attacker import (
    ANY,
    CLOSED,
    HELD,
    LATE,
    MIB,
    REFUSED,
    UNKNOWN,
    Attack,
    Attacker,
    Run,
    each,
)
from tests.hostile.client import CHAT, chat, connection, head_of, post, write
from tests.hostile.place import BAD, BROKEN, LIMITED

_LONG = 60_000
_TARGETS = (
    "/" + "a" * _LONG, "//evil/v1/models", "http://evil/v1/models", "/v1/%00", "/v1/../admin/v1/stats", "*",
    "/v1/models?" + "a=b&" * 15_000, "/%2e%2e/admin/v1/engines", "/v1/files/..%2f..%2fkv/flush",
)  # fmt: skip
_HEADERS = (
    ("transfer-encoding: chunked", "content-length: 5"),
    ("content-length: 3", "content-length: 4"),
    ("content-length: -1",),
    ("content-length: 99999999999999999999",),
    ("transfer-encoding: xchunked",),
    ("transfer-encoding : chunked",),
    ("host: evil", "content-length: 0"),
    ("content-encoding: gzip", "content-length: 0"),
    ("expect: 100-continue", "content-length: 9999999999"),
    *(
        (f"{name}: {'9' * _LONG}", "content-length: 0")
        for name in ("x-request-id", "x-kvpin-priority", "x-api-key")
    ),
)
_UPGRADE = (
    "upgrade: websocket", "connection: upgrade", "sec-websocket-version: 13",
    f"sec-websocket-key: {'A' * 22}==",
)  # fmt: skip


async def _endless_heads(a: Attacker) -> None:
    for unit in (b"x: y\r\n", b"x" * 1000, b" " * 1000):
        await a.ask(b"GET / HTTP/1.1\r\n", unit * (a.size(50) // len(unit)))
    await a.ask(b"GET /", b"x" * a.size(50), b" HTTP/1.1\r\n\r\n")


def _odd_heads(a: Attacker) -> Iterator[bytes]:
    for method in ("CONNECT", "PRI", "PROPFIND", "x" * _LONG):
        yield head_of(method, CHAT, key=BAD)
    for target in _TARGETS:
        yield head_of("GET", target, key=BAD)
    for headers in _HEADERS:
        yield head_of("POST", CHAT, *headers, key=BAD)
    for number in range(a.many(300)):
        yield head_of("POST", f"/v1/{number}", "content-length: 0", f"x-{number}: y", key=BAD)


def _traces(_: Attacker) -> Iterator[bytes]:
    for method, target in itertools.product(("TRACE", "TRACK"), (CHAT, "/v1/files", "/v1/x", "/tokenize")):
        yield head_of(method, f"{target}?model={BROKEN}", "content-length: 0", key=BAD)


async def _key_in_a_trailer(a: Attacker) -> None:
    body = chat(BROKEN, "hi")
    chunks = b"%x\r\n%b\r\n0\r\nauthorization: Bearer %b\r\n\r\n" % (len(body), body, BAD.encode())
    await a.ask(head_of("POST", CHAT, "transfer-encoding: chunked"), chunks)


async def _idle(a: Attacker) -> None:
    begun = (b"", b"POST / HTTP/1.1\r\nhost: [::1]\r\n", head_of("POST", CHAT, "content-length: 99", key=BAD))
    await a.hold([begun[number % 3] for number in range(a.many(600))], 10)


async def _resets(a: Attacker) -> None:
    request = post(CHAT, chat(BROKEN, "hi", stream=True), key=BAD)
    for number in range(a.many(2_000)):
        async with connection(a.place.port) as (_, writer):
            await write(writer, [request[: -(number % 3) or None]])
        a.answers[CLOSED] += 1


async def _deaf(a: Attacker, requests: Iterator[bytes]) -> None:
    """Sends requests and reads nothing."""
    async with connection(a.place.port) as (reader, writer):
        reader._transport.pause_reading()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1 if a.small else 5):
                await write(writer, requests)
                await asyncio.sleep(5)
    a.answers[HELD] += 1


async def _never_read(a: Attacker) -> None:
    request = post(CHAT, chat(BROKEN, f"many events:{a.size(30) // MIB}", stream=True), key=BAD)
    await asyncio.gather(*(_deaf(a, iter([request])) for _ in range(a.many(60))))


async def _pipeline(a: Attacker) -> None:
    await _deaf(a, itertools.repeat(post(CHAT, chat(BROKEN, "hi"), key=BAD), 100_000))


async def _sockets(a: Attacker) -> None:
    frame = b"\x82\x7f" + b"\xff" * 65_536
    names = itertools.islice(itertools.cycle(("realtime", "responses", "x")), a.many(60))
    offers = (head_of("GET", f"/v1/{name}?model={BROKEN}", *_UPGRADE, key=BAD) for name in names)
    await a.hold((offer + frame for offer in offers), 3)


# --- unfinished bodies

FORMS = "/v1/audio/transcriptions"
_FORM = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
_FORM_END = b'\r\n--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nbroken\r\n--b--\r\n'
_FORM_TYPE = "content-type: multipart/form-data; boundary=b"
_CHUNKED = head_of("POST", CHAT, "transfer-encoding: chunked", key=BAD)


def form(size: int) -> bytes:
    """A request with a whole form whose file has `size` bytes and comes before the model's name."""
    return post(FORMS, _FORM + b"x" * size + _FORM_END, _FORM_TYPE, key=BAD)


def _held(target: str, begin: bytes, *headers: str) -> Run:
    """The last byte of 20 bodies does not come, by a tenant with one request at a time."""

    async def run(a: Attacker) -> None:
        whole = post(target, begin + b"x" * a.size(60), *headers, key=LIMITED)
        await a.hold(itertools.repeat(whole[:-1], 20), 5)

    return run


async def _drip(a: Attacker) -> None:
    begin = head_of("POST", CHAT, "content-length: 1048576", key=BAD) + b"{"
    await a.hold(itertools.repeat(begin, a.many(300)), 75, drip=b" ")


async def _chunks_of_a_byte(a: Attacker) -> None:
    body = chat(BROKEN, "x" * a.size(4))
    await a.ask(_CHUNKED, b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")


async def _chunk_extension(a: Attacker) -> None:
    await a.ask(_CHUNKED, b"1;x=", b"y" * a.size(60))


async def _trailers(a: Attacker) -> None:
    line = b"x: %b\r\n" % (b"y" * 30)
    await a.ask(_CHUNKED, b"2\r\n{}\r\n0\r\n", line * (a.size(60) // len(line)))


ATTACKS = (
    Attack("heads without end", frozenset({400, 431, CLOSED}), _endless_heads),
    Attack("600 connections that do nothing", REFUSED | {HELD, CLOSED}, _idle),
    Attack("a key in a trailer", frozenset({401}), _key_in_a_trailer),
    Attack("TRACE", REFUSED | UNKNOWN, each(_traces)),
    Attack("odd heads", ANY | UNKNOWN | {CLOSED, LATE, 414, 417}, each(_odd_heads)),
    Attack("2,000 clients that reset", frozenset({CLOSED}), _resets),
    Attack("60 clients that never read", frozenset({HELD}), _never_read),
    Attack("a pipeline without reading", frozenset({HELD}), _pipeline),
    Attack("WebSockets that flood", ANY | UNKNOWN | {HELD, CLOSED, 426, 502}, _sockets),
    Attack("20 bodies of 60 MiB held back", REFUSED | {HELD}, _held(CHAT, b'{"model":"broken","messages":"')),
    Attack("20 forms of 60 MiB held back", REFUSED | {HELD}, _held(FORMS, _FORM, _FORM_TYPE)),
    Attack("300 bodies that drip", REFUSED | {HELD}, _drip),
    Attack("forms of 60 MiB", ANY, each(lambda a: itertools.repeat(form(a.size(60)), 8), 8)),
    Attack("bodies in chunks of a byte", ANY | {CLOSED}, _chunks_of_a_byte),
    Attack("a chunk extension without end", REFUSED | {CLOSED}, _chunk_extension),
    Attack("trailers without end", REFUSED | {CLOSED}, _trailers),
)  # fmt: skip
