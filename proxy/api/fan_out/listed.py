"""The answers of single requests, joined into the list with which a route beside `/v1` answers.

Each answer stays as it is, but for the `index` of what it answers. There is no usage to be counted.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Raw

from engine_adapter import UNREADABLE, RawFields, decode_object
from proxy.api.fan_out.split import Part, Several
from proxy.errors import EngineFailed

_decode_any = msgspec.json.Decoder(RawFields | None).decode
_encode = msgspec.json.encode


def read_listed(content: bytes) -> RawFields:
    """The answer to a single request. Raises EngineFailed if it is no object."""
    try:
        return decode_object(content)
    except UNREADABLE as error:
        raise EngineFailed("an engine's answer to a single request is no object") from error


def joined_list(
    several: Several,  # noqa: ARG001 - as `joined` has it
    answers: Iterable[tuple[Part, RawFields]],
    cached: int | None = None,  # noqa: ARG001 - likewise
) -> bytes:
    """The list. `answers` are those of all parts, in their order."""
    return _encode([_numbered(part, fields) for part, fields in answers])


class ListedStream:
    """The events of several streams, as those of one. Each ends with an event that says `stop`."""

    def event(self, part: Part, data: bytes) -> bytes:
        """The event for the client, from one of a part; b"" for one without content.

        Raises:
            EngineFailed: it is no object.
        """
        try:
            fields = _decode_any(data)
        except UNREADABLE as error:
            raise EngineFailed("an engine's stream has an event that is no object") from error
        return b"data: " + _encode(_numbered(part, fields)) + b"\n\n" if fields else b""

    @staticmethod
    def ends(data: bytes) -> bool:
        """True if an event is the last of a part."""
        return b'"stop":true' in data

    def end(self, cached: int | None = None) -> bytes:  # noqa: ARG002 - as `JoinedStream` has it
        """Nothing: these streams have no event for their end."""
        return b""


def _numbered(part: Part, fields: RawFields) -> RawFields:
    return fields | {"index": Raw(b"%d" % part.index)} if "index" in fields else fields
