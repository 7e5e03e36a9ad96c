"""The JSON body of a request, parsed one level deep."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import msgspec
from msgspec import Raw

from engine_adapter import UNREADABLE, JsonBody, decode_object
from proxy.errors import BadRequest
from proxy.errors.codes import Code

# The most entries of each list that makes a prompt, and of each list in such an entry. Even an empty entry
# takes time on the event loop.
MAX_ENTRIES = 16_384
_SHORT = 2 * MAX_ENTRIES  # bytes in which no more entries can be
_LISTS = ("messages", "input", "tools")
_LIST = ord("[")
_decode_items = msgspec.json.Decoder(list[Raw]).decode


def parse(raw: bytes) -> JsonBody:
    """The body.

    Raises:
        BadRequest: it is no JSON object, or a list in it is too long.
        UnreadableField: such a list cannot be decoded.
        msgspec.DecodeError: it is no JSON.
    """
    try:
        body = JsonBody(raw)
    except msgspec.ValidationError as error:
        raise BadRequest("the body must be a JSON object", code=Code.INVALID_JSON) from error
    if len(raw) > _SHORT and raw.count(b"{") > MAX_ENTRIES:
        _check_lists(body)
    return body


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
        raise BadRequest(
            f"{param} has {len(entries)} entries; the limit is {MAX_ENTRIES}",
            param=param,
            code=Code.ARRAY_ABOVE_MAX_LENGTH,
        )
