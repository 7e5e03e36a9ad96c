"""Reads which model a multipart form names. The form itself is passed on byte for byte.

    read_form   chunks → spool, until the field `model` is complete; then an upload of spool + further chunks
    checked     the chunks as they come, each after `check` has seen the names of the fields in it

Clients may send the field behind a file. So what was read is kept: up to 1 MiB in memory, more in a file.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from tempfile import SpooledTemporaryFile
from urllib.parse import unquote

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from engine_adapter import ADAPTER_FIELDS, Named, Upload
from proxy.errors import BadRequest
from proxy.request.bodies import room_for

Spool = SpooledTemporaryFile[bytes]
MAX_IN_MEMORY = 1 << 20
# A longer value of the field is no model's name.
_MAX_NAME = 1024
_PIECE = 65_536
# Reading a header's parameters takes quadratic time, so a long content type is not read.
_MAX_KIND = 4096
# Bytes of a form that are looked at in some ms, even if they are tiny fields.
_LOOK = 8192
# All names of a field, as servers may read them: the first or the last, encoded or not.
_NAMES = re.compile(rb'\bname\*?\d*\*?\s*=\s*"?([^";]*)', re.IGNORECASE)
_BOUNDARY = "boundary="
# It warns of each form that is wrong; the client is told.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


@contextmanager
def new_spool() -> Iterator[Spool]:
    """Where the beginning of a form is kept."""
    spool = SpooledTemporaryFile(MAX_IN_MEMORY)  # noqa: SIM115 - see below
    try:
        yield spool
    finally:
        with suppress(OSError):  # it tries once more to write what had no room
            spool.close()


async def read_form(
    chunks: AsyncIterator[bytes],
    kind: str,
    length: int | None,
    spool: Spool,
    hold: Callable[[int], None] = lambda _size: None,
) -> Upload:
    """The form, read as far as the model's name.

    Args:
        chunks: the form as it arrives.
        kind: its content type.
        length: its number of bytes, None if that is not known.
        spool: keeps what was read; stays open until the upload was sent.
        hold: is told how many bytes were read so far, and may refuse them.

    Raises:
        BadRequest: it is no form.
        NoMemory: there is no room for it.
    """
    field = _ModelField(kind)
    async for chunk in chunks:
        hold(spool.tell() + len(chunk))
        await _keep(spool, chunk)
        await field.look(chunk)
        if field.is_over:
            break
    return Upload(_again(spool, chunks), length, field.named)


async def checked(
    chunks: AsyncIterator[bytes], kind: str, check: Callable[[str], None]
) -> AsyncIterator[bytes]:
    """The form as it arrives. What `check` raises ends it, so an engine never has the whole.

    Args:
        chunks: the form as it arrives.
        kind: its content type.
        check: is told the name of each field, and may refuse it.

    Raises:
        BadRequest: it is no form.
    """
    if kind.lower().count(_BOUNDARY) > 1:
        raise BadRequest("the content type of a form needs one boundary")
    field = _ModelField(kind, check)
    async for chunk in chunks:
        await field.look(chunk)
        yield chunk


def one_model() -> Callable[[str], None]:
    """A check for `checked`: the form names one model, in one way. Servers read the first, or the last."""
    found = 0

    def check(name: str) -> None:
        nonlocal found
        read = name.rpartition("'")[2]  # without the character set of an encoded name
        found += read == "model"
        if found > 1 or read in ADAPTER_FIELDS:
            raise BadRequest("with a key for some models, a form names one model, as `model`", param=read)

    return check


class _ModelField:
    """Looks for the field `model` in a form as it arrives.

    Attributes:
        named: its value, and where it stands; None if it has not come.
        is_over: nothing more is looked for.
    """

    def __init__(self, kind: str, check: Callable[[str], None] | None = None) -> None:
        """`check`: see `checked`. Raises BadRequest if the content type names no boundary."""
        if len(kind) > _MAX_KIND:
            raise BadRequest(f"the content type has more than {_MAX_KIND} bytes")
        self.named: Named | None = None
        self.is_over = False
        self._check = check
        self._chunk, self._before = b"", 0  # what is being read, and the number of bytes before it
        self._header, self._content = bytearray(), bytearray()
        self._is_model = False
        self._value, self._start = bytearray(), -1
        try:
            self._parser = MultipartParser(
                parse_options_header(kind)[1][b"boundary"],
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_header,
                    "on_header_value": self._add_content,
                    "on_header_end": self._end_header,
                    "on_part_data": self._add_value,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except (KeyError, FormParserError) as error:
            raise BadRequest("the content type of a form needs a boundary") from error

    async def look(self, chunk: bytes) -> None:
        """Looks at the next bytes. Between pieces of them, others have the event loop."""
        self.feed(chunk[:_LOOK])
        for at in range(_LOOK, len(chunk), _LOOK):
            if self.is_over and self._check is None:
                return
            await asyncio.sleep(0)
            self.feed(chunk[at : at + _LOOK])

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes. Raises BadRequest if they are no form."""
        self._chunk = chunk
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise BadRequest(f"the body is no multipart form: {error}") from error
        self._before += len(chunk)

    def _begin_part(self) -> None:
        self._is_model = False

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            name = parse_options_header(bytes(self._content))[1].get(b"name", b"")
            self._is_model = name == b"model"
            if self._check is not None:
                names = {name, *(given.replace(b"\\", b"") for given in _NAMES.findall(self._content))}
                for each in sorted(names):
                    self._check(unquote(each.decode("latin-1")))
        self._header.clear()
        self._content.clear()

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        if not self._is_model or self.is_over:
            return
        if not self._value:
            # A value may begin like a boundary; those bytes are not of this chunk, and it is no name.
            self._start = self._before + start if data is self._chunk else -1
        self._value += data[start:end]
        if len(self._value) > _MAX_NAME:
            raise BadRequest("the form's model is longer than a name", param="model")

    def _end_part(self) -> None:
        if not self._is_model or self.is_over:
            return
        self.is_over = True
        if self._value:
            try:
                name = self._value.decode()
            except UnicodeDecodeError as error:
                raise BadRequest("the form's model is not UTF-8", param="model") from error
            if self._start < 0:
                raise BadRequest("the form's model is no name", param="model")
            self.named = Named(name, self._start, self._start + len(self._value))

    def _end(self) -> None:
        self.is_over = True


async def _keep(spool: Spool, chunk: bytes) -> None:
    """Raises NoMemory if the temporary directory does not take it."""
    if spool.tell() + len(chunk) <= MAX_IN_MEMORY:
        spool.write(chunk)
        return
    with room_for("the form"):
        await asyncio.to_thread(_write, spool, chunk)


def _write(spool: Spool, chunk: bytes) -> None:
    spool.write(chunk)
    spool.flush()  # here it fails, rather than when it is read


async def _again(spool: Spool, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the bytes that were kept, then the rest."""
    is_in_memory = spool.tell() <= MAX_IN_MEMORY
    spool.seek(0)
    if is_in_memory:
        yield spool.read()
    else:
        while piece := await asyncio.to_thread(spool.read, _PIECE):
            yield piece
    spool.close()
    async for chunk in rest:
        yield chunk
