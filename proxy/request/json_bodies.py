"""The JSON body of a request, parsed one level deep.

    bytes → whole characters → how many values, fields and bytes of text → top-level fields → lengths of the
    lists of a prompt

Each of these is refused above a limit before the next one is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress

import msgspec
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
from engine_adapter.codes import Code
from engine_adapter.shape import Shape, is_deeper, shape_of
from proxy.errors import BadRequest, BodyTooLarge
from proxy.request.half_characters import whole_characters

# The most entries of each list that makes a prompt, and of each list in such an entry. Even an empty entry
# takes time on the event loop.
MAX_ENTRIES = 16_384
_SHORT = 2 * MAX_ENTRIES  # bytes in which no more entries can be
_LISTS = ("messages", "input", "tools")
# The most fields of the body itself: each change of a body copies them.
MAX_FIELDS = 1024
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
_SHOWN = 64  # characters of a name that an error repeats
_decode_items = msgspec.json.Decoder(list[Raw]).decode


def parse(raw: bytes, most: Shape = Shape()) -> JsonBody:  # noqa: B008 - immutable
    """The body.

    Raises:
        BodyTooLarge: it has too many bytes beside base64.
        BadRequest: it is no JSON object, it has too many values or fields, or one of its fields too many; or
            two names differ only in case, or such a name differs only in case from one that kvpin checks.
        UnreadableField: such a list cannot be decoded.
        msgspec.DecodeError: it is no JSON.
    """
    if b"\\u" in raw and (b"\\ud" in raw or b"\\uD" in raw):
        raw = whole_characters(raw)
    if len(raw) > min(_LIST_BYTES * most.fields, _VALUE_BYTES * most.values, most.text):
        _check_shape(raw, most)
    try:
        body = JsonBody(raw)
    except msgspec.DecodeError as error:
        _check_kind(raw, error)
        raise
    names = body.names
    if len(names) > MAX_FIELDS:
        text = f"the body has {len(names)} fields; the limit is {MAX_FIELDS}"
        raise BadRequest(text, code=Code.TOO_COMPLEX)
    if {*map(str.casefold, names)} != names:
        _check_case(names)
    if len(raw) > _SHORT and raw.count(b",") >= MAX_ENTRIES:
        _check_lists(body)
    if body.has_any(_OWN_FIELDS):
        for name in body.names & _OWN_FIELDS:
            _check_own_field(name, body.raw_of(name))
    return body


def _check_kind(raw: bytes, error: msgspec.DecodeError) -> None:
    """Says of a body that cannot be decoded what it is instead, where that is known."""
    text = None
    if isinstance(error, msgspec.ValidationError):
        text = "the body must be a JSON object"
    elif b"\0" in raw[:4]:
        text = "the body is UTF-16 or UTF-32: send it as UTF-8"
    if text is not None:
        raise BadRequest(text, code=Code.INVALID_JSON) from error


def _check_case(names: Collection[str]) -> None:
    """Refuses names that some servers, such as those written in Go, read as a field that kvpin checks."""
    spelled = dict[str, str]()  # in lower case → as sent
    for name in names:
        folded = name.casefold()
        if (other := spelled.setdefault(folded, name)) != name:
            text = f"the fields {other[:_SHOWN]!r} and {name[:_SHOWN]!r} differ only in case: send one"
            raise BadRequest(text, param=name[:_SHOWN], code=Code.INVALID_JSON)
        if folded in _CHECKED and name not in _CHECKED:
            text = f"the field {name!r} must be written {folded!r}"
            raise BadRequest(text, param=name, code=Code.INVALID_JSON)


def _check_shape(raw: bytes, most: Shape) -> None:
    shape = shape_of(raw, most)
    match shape.above(most):
        case None:
            return
        case "text":
            raise BodyTooLarge(f"the body has more than {most.text} bytes that are not base64")
        case what:
            raise BadRequest(
                f"the body has more than {getattr(most, what)} {_WHAT[what]} the limit", code=Code.TOO_COMPLEX
            )


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
        raise BadRequest(
            f"{param} has {len(entries)} entries; the limit is {MAX_ENTRIES}",
            param=param,
            code=Code.ARRAY_ABOVE_MAX_LENGTH,
        )
