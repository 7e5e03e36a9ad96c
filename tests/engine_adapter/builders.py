"""Bodies of requests."""

from __future__ import annotations

import msgspec

from engine_adapter.body import JsonBody


def body(**fields: object) -> JsonBody:
    """A JSON body of these fields."""
    return JsonBody(msgspec.json.encode(fields))
