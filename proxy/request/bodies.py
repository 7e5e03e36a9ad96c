"""The JSON body of a request, parsed one level deep.

    bytes → whole characters → how many values, fields and bytes of text → top-level fields → lengths of the
    lists of a prompt

Each of these is refused above a limit before the next one is looked at.
"""

from __future__ import annotations

import re
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import msgspec
import structlog
import zstandard
from msgspec import Raw

from engine_adapter import (
    ADAPTER_FIELDS,
    HINTS,
    OWN_IDS,
    PRIVATE_FIELDS,
    UNREADABLE,
    JsonBody,
    decode_object,
)
from engine_adapter.causes import Code
from engine_adapter.off_loop import JsonSize, is_deeper, off_loop, shape_of
from proxy.errors import BadRequest, BodyTooLarge, EncodedBody, NoMemory

# The most entries of each list that makes a prompt, and of each list in such an entry. Even an empty entry
# takes time on the event loop.
MAX_ENTRIES = 16_384
_SHORT = 2 * MAX_ENTRIES  # bytes in which no more entries can be
_LISTS = ("messages", "input", "tools")
MAX_FIELDS = 1024  # the most fields of the body itself: each change of a body copies them
# Fields of a client's own, which templates and engines get as they are: the most bytes of one, and the most
# lists and objects in it that lie within each other.
OWN_FIELDS = ("chat_template_kwargs", "metadata", "mm_processor_kwargs")
_OWN_FIELDS = frozenset(OWN_FIELDS)
MAX_OWN_BYTES = 1 << 20
MAX_OWN_LEVELS = 32
# The fewest bytes of an empty list and of a value, each with its comma.
_LIST_BYTES, _VALUE_BYTES = 3, 2
_WHAT = {
    "values": "values; `limits.json_values` is",
    "fields": "fields, lists and objects; `limits.json_fields` is",
}
_LIST = ord("[")
# Fields that decide whose KV, model or engine a request reaches.
_CHECKED = {"model", "cache_salt", *ADAPTER_FIELDS, *PRIVATE_FIELDS, *OWN_IDS, *HINTS}
_SHOWN = 64  # characters of a name, or of a content-encoding, that an error repeats
_decode_items = msgspec.json.Decoder(list[Raw]).decode


def parse(raw: bytes, most: JsonSize = JsonSize()) -> JsonBody:  # noqa: B008 - immutable
    """The body. Raises BodyTooLarge if it has too many bytes beside base64; BadRequest if it is no object, if
    it or one of its fields has too many values or fields, or if two names, or a name and one that kvpin
    checks, differ only in case; UnreadableField if a list of a prompt cannot be decoded; msgspec.DecodeError.
    """
    # One byte is found thirty times as fast as more, and what is not there from the end in half the time.
    if raw.find(b"\\") >= 0 and (raw.rfind(b"\\ud") >= 0 or raw.rfind(b"\\uD") >= 0):
        raw = whole_characters(raw)
    if len(raw) > min(_LIST_BYTES * most.fields, _VALUE_BYTES * most.values, most.text):
        _check_shape(raw, most)
    try:
        body = JsonBody(raw)
    except msgspec.DecodeError as error:
        _check_kind(raw, error)
        raise
    if body.find_plain():
        return body
    names = body.names
    if len(names) > MAX_FIELDS:
        text = f"the body has {len(names)} fields; the limit is {MAX_FIELDS}"
        raise BadRequest(text, code=Code.TOO_COMPLEX)
    if {*map(str.casefold, names)} != names:
        _check_case(names)
    if len(raw) > _SHORT and body.n_values >= MAX_ENTRIES:
        _check_lists(body)
    if body.has_any(_OWN_FIELDS):
        for name in body.names & _OWN_FIELDS:
            _check_own_field(name, body.raw_of(name))
    return body


def _check_kind(raw: bytes, error: msgspec.DecodeError) -> None:
    """Says of a body that cannot be decoded what it is instead, where that is known."""
    if isinstance(error, msgspec.ValidationError):
        raise BadRequest("the body must be a JSON object", code=Code.INVALID_JSON) from error
    if b"\0" in raw[:4]:
        text = "the body is UTF-16 or UTF-32: send it as UTF-8"
        raise BadRequest(text, code=Code.INVALID_JSON) from error


def _check_case(names: Collection[str]) -> None:
    """Refuses names that some servers, such as those written in Go, read as a field that kvpin checks."""
    spelled: dict[str, str] = {}  # in lower case → as sent
    for name in names:
        folded = name.casefold()
        if (other := spelled.setdefault(folded, name)) != name:
            text = f"the fields {other[:_SHOWN]!r} and {name[:_SHOWN]!r} differ only in case: send one"
            raise BadRequest(text, param=name[:_SHOWN], code=Code.INVALID_JSON)
        if folded in _CHECKED and name not in _CHECKED:
            text = f"the field {name!r} must be written {folded!r}"
            raise BadRequest(text, param=name, code=Code.INVALID_JSON)


def _check_shape(raw: bytes, most: JsonSize) -> None:
    what = shape_of(raw, most).above(most)
    if what == "text":
        raise BodyTooLarge(f"the body has more than {most.text} bytes that are not base64")
    if what is not None:
        text = f"the body has more than {getattr(most, what)} {_WHAT[what]} the limit"
        raise BadRequest(text, code=Code.TOO_COMPLEX)


def _check_own_field(name: str, raw: memoryview) -> None:
    text = None
    if len(raw) > MAX_OWN_BYTES:
        text = f"{name} has {len(raw)} bytes; the limit is {MAX_OWN_BYTES}"
    elif is_deeper(bytes(raw), MAX_OWN_LEVELS):
        text = f"{name} is nested more than {MAX_OWN_LEVELS} deep"
    if text is not None:
        raise BadRequest(text, param=name, code=Code.TOO_COMPLEX)


def _check_lists(body: JsonBody) -> None:
    for name in _LISTS:
        entries = body.items(name) or []
        _check_length(name, entries)
        for index, entry in enumerate(entries):
            if len(memoryview(entry)) <= _SHORT:
                continue
            for field, items in _lists_in(entry):
                _check_length(f"{name}[{index}].{field}", items)


def _lists_in(entry: Raw) -> Iterable[tuple[str, list[Raw]]]:
    """The lists among the fields of an entry, e.g. the parts of a message."""
    with suppress(*UNREADABLE):  # told by who reads them
        for field, value in decode_object(entry).items():
            if memoryview(value)[0] == _LIST:
                yield field, _decode_items(value)


def _check_length(param: str, entries: list[Raw]) -> None:
    if len(entries) > MAX_ENTRIES:
        text = f"{param} has {len(entries)} entries; the limit is {MAX_ENTRIES}"
        raise BadRequest(text, param=param, code=Code.ARRAY_ABOVE_MAX_LENGTH)


KNOWN = ("gzip", "deflate", "zstd")
# Bytes that are unpacked before the limits are looked at again, and about how long that takes.
_STEP, _STEP_MS = 1 << 20, 4.0
# zstandard has no limit on what one call unpacks. A block has at least 3 bytes and at most 128 KiB, so these
# bytes give 11 MiB at most.
_ZSTD_BYTES = 256
_ZSTD_WINDOW = 8 << 20  # the largest window that HTTP allows (RFC 9659)
_GZIP, _ZLIB, _RAW = 31, 15, -15  # `wbits` of zlib
_FAULTS = (zlib.error, zstandard.ZstdError)


async def unpacked(raw: bytes, encoding: str, limit: int, hold: Callable[[int], None]) -> bytes:
    """A body, not empty, without its content-encoding. `hold` is told how many bytes are here so far, the
    packed ones included, and may refuse them. Raises EncodedBody for an encoding that kvpin does not read,
    BodyTooLarge above `limit` bytes (no more than a few MiB beyond it are unpacked), BadRequest if it is
    broken or incomplete."""
    name, body = encoding.strip().lower().removeprefix("x-"), bytearray()
    if name not in KNOWN:
        told = encoding[:_SHOWN]
        raise EncodedBody(f"the body is encoded as {told!r}: send it as {', '.join(KNOWN)} or plain JSON")
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


HALF_CHARACTERS = "half_characters"  # the name of this change, as the client is told of it
# Half of a character that UTF-16 writes as two, and the second half behind its `\u`.
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_SECOND = re.compile(rb"[dD][c-fC-F][0-9a-fA-F]{2}")
_FIRST_DIGITS = b"89abAB"
_HALF_BYTES, _REPLACEMENT = 6, rb"\ufffd"
# The arguments of a tool call: JSON in a string. Within another string, a backslash precedes the quotes.
_ARGUMENTS = re.compile(rb'"arguments"\s*:\s*"')
_BACKSLASH = b"\\"


def whole_characters(raw: bytes) -> bytes:
    """JSON in which each half of a character is U+FFFD; `raw` itself if there is none.

    The arguments of a tool call are JSON in a string, which templates read: halves are looked for there, too.
    """
    halves = [*_halves(raw, 0, len(raw), 1)]
    for found in _ARGUMENTS.finditer(raw) if rb"\\u" in raw else ():
        if raw[found.start() - 1] != ord(_BACKSLASH):
            halves += _halves(raw, found.end(), _end_of_string(raw, found.end()), 2)
    if not halves:
        return raw
    end = 0
    pieces: list[bytes] = []
    for at in sorted(halves):
        pieces += (raw[end:at], _REPLACEMENT)
        end = at + _HALF_BYTES
    return b"".join([*pieces, raw[end:]])


def _halves(raw: bytes, start: int, stop: int, level: int) -> Iterator[int]:
    """Where halves of characters begin. In JSON, `level` 1, one backslash begins an escape; in JSON within a
    string, level 2, these are two."""
    end = start
    for found in _HALF.finditer(raw, start, stop):
        at = found.start()
        if at < end:  # the second half of a whole character
            continue
        run, end = _n_backslashes(raw[end : at + 1]), at + _HALF_BYTES
        if run % (2 * level) != level:
            continue
        second = end + level + 1
        is_first = raw[at + 3] in _FIRST_DIGITS
        if is_first and raw[end:second] == level * _BACKSLASH + b"u" and _SECOND.match(raw, second, stop):
            end = second + _HALF_BYTES - 2
        else:
            yield at


def _end_of_string(raw: bytes, start: int) -> int:
    """Where a string ends whose first character is at `start`."""
    at = start
    while (quote := raw.find(b'"', at)) >= 0 and _n_backslashes(raw[at:quote]) % 2:
        at = quote + 1
    return quote if quote >= 0 else len(raw)


def _n_backslashes(text: bytes) -> int:
    return len(text) - len(text.rstrip(_BACKSLASH))


log = structlog.get_logger(__name__)


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Around whatever writes there. Raises NoMemory if the directory does not take it."""
    try:
        yield
    except OSError as error:
        log.error(  # noqa: TRY400 - one sentence
            "the temporary directory does not take a request: it is refused",
            directory=tempfile.tempdir or "none can be written to",
            what=what,
            error=error.strerror,
        )
        text = f"kvpin has no room for {what} in its temporary directory"
        raise NoMemory(text, retry_after_s=60) from error
