"""The JSON body of a request, parsed one level deep."""

from __future__ import annotations

import msgspec

from engine_adapter import JsonBody
from proxy.errors import BadRequest

# The most entries of each list that makes a prompt. Even an empty entry takes time on the event loop.
MAX_ENTRIES = 16_384
_LISTS = ("messages", "input", "tools")


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
        raise BadRequest("the body must be a JSON object", code="invalid_json") from error
    if len(raw) > 2 * MAX_ENTRIES and raw.count(b"{") > MAX_ENTRIES:
        _check_lists(body)
    return body


def _check_lists(body: JsonBody) -> None:
    for name in _LISTS:
        entries = body.items(name)
        if entries is not None and len(entries) > MAX_ENTRIES:
            raise BadRequest(
                f"{name} has {len(entries)} entries; the limit is {MAX_ENTRIES}",
                param=name,
                code="array_above_max_length",
            )
