"""Which conversation a request is of, where its client tells: a hint for placement, where costs are equal.

The name that tells conversations apart best comes first. Left out are `user`, under which one application may
send all it has, and `x-correlation-id` and its like, which many stacks make anew for each request: neither
says what a request has in common with the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from engine_adapter import JsonBody, RequestBody

HEADERS = (
    "session-id",
    "x-session-id",
    "x-claude-code-session-id",
    "x-conversation-id",
    "x-session-affinity",
)
FIELDS = ("session_id", "prompt_cache_key")
# What is longer is no name.
MAX_NAME = 256


class Session(NamedTuple):
    """A conversation: whose it is, and the name its client gave it."""

    tenant: str | None
    name: str


def session_of(tenant: str | None, headers: Mapping[str, str], body: RequestBody) -> Session | None:
    """The conversation that a request of `tenant` says it is of; None where it says nothing of use. Header
    names are in lower case."""
    for name in _names(headers, body):
        if isinstance(name, str) and 0 < len(name) <= MAX_NAME:
            return Session(tenant, name)
    return None


def _names(headers: Mapping[str, str], body: RequestBody) -> Iterator[Any]:
    """What may be its name, the best first. A body's fields are read only where no header tells."""
    yield from map(headers.get, HEADERS)
    if isinstance(body, JsonBody):
        yield from map(body.hint, FIELDS)
