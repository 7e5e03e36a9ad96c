"""The cache salts under which an engine may hold KV of each tenant; flushing a tenant flushes them all."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

# Salts remembered for each tenant on each engine. Tenants are few, but a tenant may send a salt per user.
MAX_SALTS = 4096
# kvpin's own salts have at most 71 characters. An engine's events may carry longer ones.
MAX_LENGTH = 256


class KeptSalts(msgspec.Struct, frozen=True):
    """The salts of each tenant as plain data, and the tenants of whom some were forgotten."""

    of: dict[str, list[str]]
    incomplete: list[str]


class TenantSalts:
    """The salts of each tenant, the last used last. One tenant's salts never push out another's.

    At the limit, the least recently used salt is forgotten. The engine has probably evicted its KV, but this
    is not certain: the tenant counts as incomplete from then on.
    """

    def __init__(self) -> None:
        self._salts: dict[str, OrderedDict[str, None]] = {}
        self._incomplete: set[str] = set()

    def note(self, tenant: str | None, salt: str | None) -> None:
        """The engine may hold KV of the tenant under this salt. KV that belongs to no tenant is not noted."""
        if tenant is None or salt is None:
            return
        if len(salt) > MAX_LENGTH:
            self._incomplete.add(tenant)
            return
        salts = self._salts.setdefault(tenant, OrderedDict())
        salts[salt] = None
        salts.move_to_end(salt)
        if len(salts) > MAX_SALTS:
            salts.popitem(last=False)
            self._incomplete.add(tenant)

    def of(self, tenant: str) -> frozenset[str]:
        """The tenant's salts that are remembered."""
        return frozenset(self._salts.get(tenant, ()))

    def is_complete(self, tenant: str) -> bool:
        """True if no salt of the tenant was forgotten."""
        return tenant not in self._incomplete

    def kept(self) -> KeptSalts:
        """All of it as plain data."""
        return KeptSalts(
            {tenant: list(salts) for tenant, salts in self._salts.items()}, sorted(self._incomplete)
        )

    def restore(self, kept: KeptSalts) -> None:
        """Adds salts that an earlier kvpin kept: the engine still holds KV under them."""
        for tenant, salts in kept.of.items():
            for salt in salts:
                self.note(tenant, salt)
        self._incomplete.update(kept.incomplete)

    def emptied(self) -> None:
        """Starts afresh: the engine dropped all its KV, so forgotten salts no longer matter."""
        self._incomplete.clear()
