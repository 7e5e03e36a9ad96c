"""Reads which model a multipart form names. The form itself is passed on byte for byte.

    read_form   chunks → spool, until the field `model` is complete; then an upload of spool + further chunks

Clients may send the field behind a file. So what was read is kept: up to 1 MiB in memory, more in a file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from tempfile import SpooledTemporaryFile

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from engine_adapter import Named, Upload
from proxy.errors import BadRequest

Spool = SpooledTemporaryFile[bytes]
MAX_IN_MEMORY = 1 << 20
# A longer value of the field is no model's name.
_MAX_NAME = 1024
_PIECE = 65_536
# Reading a header's parameters takes quadratic time, so a long content type is not read.
_MAX_KIND = 4096
# Bytes of a form that are looked at in some ms, even if they are tiny fields.
_LOOK = 8192
# It warns of each form that is wrong; the client is told.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


def new_spool() -> Spool:
    """Where the beginning of a form is kept; to be closed."""
    return SpooledTemporaryFile(MAX_IN_MEMORY)


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
    """
    field = _ModelField(kind)
    async for chunk in chunks:
        hold(spool.tell() + len(chunk))
        await _keep(spool, chunk)
        await field.look(chunk)
        if field.is_over:
            break
    return Upload(_again(spool, chunks), length, field.named)


class _ModelField:
    """Looks for the field `model` in a form as it arrives.

    Attributes:
        named: its value, and where it stands; None if it has not come.
        is_over: nothing more is looked for.
    """

    def __init__(self, kind: str) -> None:
        """Raises BadRequest if the content type names no boundary."""
        if len(kind) > _MAX_KIND:
            raise BadRequest(f"the content type has more than {_MAX_KIND} bytes")
        self.named: Named | None = None
        self.is_over = False
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
            if self.is_over:
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
            self._is_model = parse_options_header(bytes(self._content))[1].get(b"name") == b"model"
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
    if spool.tell() + len(chunk) <= MAX_IN_MEMORY:
        spool.write(chunk)
    else:
        await asyncio.to_thread(spool.write, chunk)


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
