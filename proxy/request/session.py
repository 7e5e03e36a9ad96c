"""The conversation a request belongs to, if its client names one. Placement uses it to break ties.

Headers and fields are listed best first. Two are left out because they do not identify a conversation:
`user`, which one application may send with every request, and `x-correlation-id`, which many stacks create
for each request.
"""

from __future__ import annotations

from hashlib import blake2b
from operator import itemgetter
from typing import NamedTuple

from engine_adapter import Headers, JsonBody, RequestBody
from proxy.headers import SESSION_HEADERS

FIELDS = ("session_id", "prompt_cache_key")
_RANKS = {name.encode(): rank for rank, name in enumerate(SESSION_HEADERS)}
# A longer name is ignored.
MAX_NAME = 256


class Session(NamedTuple):
    """A conversation: its tenant, and the name its client gave it."""

    tenant: str | None
    name: str

    @property
    def digest(self) -> int:
        """64 bits, by which other kvpins know it. Nobody finds the names from it."""
        parts = (self.name,) if self.tenant is None else (self.tenant, self.name)
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return int.from_bytes(
            blake2b(text.encode(), digest_size=8, person=b"kvpin session").digest(), "little"
        )


def _named(headers: Headers) -> list[tuple[int, bytes]]:
    """The names in headers with their ranks, best first."""
    named = [(_RANKS[name], value) for name, value in headers.raw if name in _RANKS]
    return sorted(named, key=itemgetter(0))


def session_of(tenant: str | None, headers: Headers, body: RequestBody) -> Session | None:
    """The conversation that a request names; None if it names none."""
    for _, value in () if _RANKS.keys().isdisjoint(headers.first) else _named(headers):
        if 0 < len(value) <= MAX_NAME:
            return Session(tenant, value.decode("latin-1"))
    if isinstance(body, JsonBody) and not body.is_plain:
        for field in FIELDS:
            name = body.hint(field)
            if isinstance(name, str) and 0 < len(name) <= MAX_NAME:
                return Session(tenant, name)
    return None
