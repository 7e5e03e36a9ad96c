"""Compressed bodies of requests: unpacked piece by piece, under the limits of plain ones."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial

import zstandard

from engine_adapter.codes import Code
from engine_adapter.off_loop import off_loop
from proxy.errors import BadRequest, BodyTooLarge, EncodedBody

KNOWN = ("gzip", "deflate", "zstd")
# Characters of a client's content-encoding that an error repeats.
_SHOWN = 64
# Bytes that are unpacked before the limits are looked at again, and about how long that takes.
_STEP, _STEP_MS = 1 << 20, 4.0
# zstandard has no limit on what one call unpacks. A block has at least 3 bytes and at most 128 KiB, so these
# bytes give 11 MiB at most.
_ZSTD_BYTES = 256
# The largest window that HTTP allows (RFC 9659).
_ZSTD_WINDOW = 8 << 20
_GZIP, _ZLIB, _RAW = 31, 15, -15  # `wbits` of zlib
_FAULTS = (zlib.error, zstandard.ZstdError)


async def unpacked(raw: bytes, encoding: str, limit: int, hold: Callable[[int], None]) -> bytes:
    """A body without its content-encoding.

    Args:
        raw: the body as it came, not empty.
        encoding: as the client gave it.
        limit: bytes that the body may have.
        hold: is told how many bytes are here so far, the packed ones included, and may refuse them.

    Raises:
        EncodedBody: kvpin does not read this encoding.
        BodyTooLarge: the body exceeds `limit`. No more than a few MiB beyond it are unpacked.
        BadRequest: it is broken or incomplete.
    """
    name, body = encoding.strip().lower().removeprefix("x-"), bytearray()
    if name not in KNOWN:
        raise EncodedBody(
            f"the body is encoded as {encoding[:_SHOWN]!r}: send it as {', '.join(KNOWN)} or plain JSON"
        )
    pieces = _unzstd(raw) if name == "zstd" else _inflated(raw, name)
    try:
        while piece := await off_loop(partial(_step, pieces), ms=_STEP_MS):
            body += piece
            if len(body) > limit:
                raise BodyTooLarge(f"the body has more than {limit} bytes when it is unpacked, the limit")
            hold(len(raw) + len(body))
    except _FAULTS as error:
        raise BadRequest(f"the body is no {name}: {error}", code=Code.INVALID_JSON) from error
    except EOFError as error:
        raise BadRequest(f"the body's {name} ends too early", code=Code.INVALID_JSON) from error
    return bytes(body)


def _step(pieces: Iterator[bytes]) -> bytearray:
    """The next pieces; empty at the end."""
    taken = bytearray()
    for piece in pieces:
        taken += piece
        if len(taken) >= _STEP:
            break
    return taken


def _inflated(raw: bytes, name: str) -> Iterator[bytes]:
    """Raises EOFError if `raw` is incomplete."""
    if name == "gzip":
        kind = _GZIP
    else:  # some clients leave out the two bytes of zlib's head
        kind = _ZLIB if raw[0] & 0x0F == zlib.DEFLATED and int.from_bytes(raw[:2], "big") % 31 == 0 else _RAW
    while raw:  # a gzip body may have several members
        reader = zlib.decompressobj(kind)
        while not reader.eof:
            if not (piece := reader.decompress(raw, _STEP)) and not reader.eof:
                raise EOFError
            yield piece
            raw = reader.unconsumed_tail
        raw = reader.unused_data


def _unzstd(raw: bytes) -> Iterator[bytes]:
    """Raises EOFError if `raw` is incomplete."""
    at, reading = 0, zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    while at < len(raw):  # a body may have several frames
        reader = reading.decompressobj()
        while not reader.eof:
            if at >= len(raw):
                raise EOFError
            yield reader.decompress(raw[at : at + _ZSTD_BYTES])
            at += _ZSTD_BYTES
        at = min(at, len(raw)) - len(reader.unused_data)
