"""The bodies of the last requests: to tell which field of a request differs from an earlier one.

Bodies are kept undecoded, which takes no time. Memory is limited: at the limit, the tenant that uses most of
it loses its oldest body.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from engine_adapter import JsonBody
from proxy.core.differences import PROMPT_FIELDS

LIMIT_BYTES = 16 << 20
# A larger body is mostly images. Then only the tokens show where it differs.
MOST_BYTES = 1 << 20


class Sources:
    """Request id → body. Reasoning is kept in one of its own: key of the answer → reasoning."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES, overhead: int = 0) -> None:
        """`overhead`: bytes that each entry counts beside its own, where many are short."""
        self._limit, self._overhead = limit_bytes, overhead
        self._shares: dict[str | None, OrderedDict[str, bytes]] = {}
        self._sizes: dict[str | None, int] = {}
        self.n_bytes = 0

    def keep(self, request_id: str, tenant: str | None, raw: bytes) -> None:
        """Keeps a body in place of an earlier one of the request, unless it is too large."""
        self.drop(request_id, tenant)
        if len(raw) > min(MOST_BYTES, self._limit):
            return
        self._shares.setdefault(tenant, OrderedDict())[request_id] = raw
        self._count(tenant, len(raw) + self._overhead)
        while self.n_bytes > self._limit:
            greediest = max(self._sizes, key=self._sizes.__getitem__)
            self.drop(next(iter(self._shares[greediest])), greediest)

    def fields(self, request_id: str, tenant: str | None) -> dict[str, Any] | None:
        """The fields of a request that make its prompt; None if its body is not known."""
        if (raw := self.raw(request_id, tenant)) is None:
            return None
        body = JsonBody(raw)
        return {name: body.hint(name) for name in PROMPT_FIELDS if name in body}

    def raw(self, request_id: str, tenant: str | None) -> bytes | None:
        """The body of a request; None if it is not known."""
        return self._share(tenant).get(request_id)

    def drop(self, request_id: str, tenant: str | None) -> None:
        """Forgets a body, if it is known."""
        share = self._share(tenant)
        raw = share.pop(request_id, None)
        if raw is None:
            return
        self._count(tenant, -len(raw) - self._overhead)
        if not share:
            del self._shares[tenant], self._sizes[tenant]

    def _share(self, tenant: str | None) -> OrderedDict[str, bytes]:
        return self._shares.get(tenant) or OrderedDict()

    def _count(self, tenant: str | None, n_bytes: int) -> None:
        self._sizes[tenant] = self._sizes.get(tenant, 0) + n_bytes
        self.n_bytes += n_bytes
