"""The conversation a request belongs to, if its client names one. Placement uses it to break ties.

Headers and fields are listed best first. Two are left out because they do not identify a conversation:
`user`, which one application may send with every request, and `x-correlation-id`, which many stacks create
for each request.
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
# A longer name is ignored.
MAX_NAME = 256


class Session(NamedTuple):
    """A conversation: its tenant, and the name its client gave it."""

    tenant: str | None
    name: str


def session_of(tenant: str | None, headers: Mapping[str, str], body: RequestBody) -> Session | None:
    """The conversation that a request names; None if it names none. Header names are in lower case."""
    for name in _names(headers, body):
        if isinstance(name, str) and 0 < len(name) <= MAX_NAME:
            return Session(tenant, name)
    return None


def _names(headers: Mapping[str, str], body: RequestBody) -> Iterator[Any]:
    """Possible names, best first. The body is read only if no header names the conversation."""
    yield from map(headers.get, HEADERS)
    if isinstance(body, JsonBody):
        yield from map(body.hint, FIELDS)
