"""Bodies that are held back, drip, come in odd pieces, or never end."""

from __future__ import annotations

import itertools

from tests.hostile.attacker import ANY, CLOSED, HELD, REFUSED, Attack, Attacker, Run, each
from tests.hostile.client import CHAT, chat, head_of, post
from tests.hostile.place import BAD, BROKEN, LIMITED

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
    Attack("20 bodies of 60 MiB held back", REFUSED | {HELD}, _held(CHAT, b'{"model":"broken","messages":"')),
    Attack("20 forms of 60 MiB held back", REFUSED | {HELD}, _held(FORMS, _FORM, _FORM_TYPE)),
    Attack("300 bodies that drip", REFUSED | {HELD}, _drip),
    Attack("forms of 60 MiB", ANY, each(lambda a: itertools.repeat(form(a.size(60)), 8), 8)),
    Attack("bodies in chunks of a byte", ANY | {CLOSED}, _chunks_of_a_byte),
    Attack("a chunk extension without end", REFUSED | {CLOSED}, _chunk_extension),
    Attack("trailers without end", REFUSED | {CLOSED}, _trailers),
)  # fmt: skip
