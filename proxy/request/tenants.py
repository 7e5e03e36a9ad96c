"""API key → tenant → cache salt. Salts keep tenants' KV apart."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine_adapter import OWN_IDS, PRIVATE_FIELDS, JsonBody
from proxy.errors import BadRequest


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A data-plane key and the tenant it belongs to."""

    tenant: str
    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, key: str, tenant: str) -> ApiKey:
        """Made from the key itself; only its digest is kept."""
        return cls(tenant, hashlib.sha256(key.encode()).digest())


class Tenants:
    """Keys → tenants → salts.

    With at most one tenant, all requests share KV, and a client's `cache_salt` is passed on. With several
    tenants, each has its own salt, and a client's salt divides it further. All salts of a tenant have the
    same beginning, so the salts that engines report show whose KV it is.

    Attributes:
        names: all tenants.
        isolated: tenants do not share KV.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        known = tuple(keys)
        self.names = frozenset(key.tenant for key in known)
        self.isolated = len(self.names) > 1
        self._keys = {key.digest: key for key in known}
        self._owners = {_own_salt(name): name for name in self.names} if self.isolated else {}

    @property
    def open(self) -> bool:
        """Whether requests need no key."""
        return not self._keys

    def of_key(self, key: str) -> str | None:
        """The tenant of a key; None for an unknown key. The time of a search by digest tells nothing."""
        digest = hashlib.sha256(key.encode()).digest()
        known = self._keys.get(digest)
        return known.tenant if known is not None and hmac.compare_digest(known.digest, digest) else None

    def salt(self, tenant: str | None, client_salt: object) -> str | None:
        """The salt of a request. Raises BadRequest if the client's salt is not a non-empty string."""
        if client_salt is not None and (not isinstance(client_salt, str) or not client_salt):
            raise BadRequest("cache_salt must be a non-empty string", param="cache_salt")
        if not self.isolated or tenant is None:
            return client_salt
        own = _own_salt(tenant)
        return own if client_salt is None else f"{own}-{_digest(client_salt)}"

    def without_private(self, body: JsonBody) -> JsonBody:
        """The body without what may reach another tenant's request or KV. With at most one tenant, all of it.

        Raises:
            BadRequest: a field that would change the answer if it were left out.
        """
        if not self.isolated:
            return body
        if body.has_any(PRIVATE_FIELDS):
            for name in sorted(PRIVATE_FIELDS):
                if body.get(name) is not None:
                    raise BadRequest(
                        f"{name} is a field between servers; kvpin takes it from no client while several "
                        "tenants share the engines",
                        param=name,
                    )
        return body.replace(**dict.fromkeys(OWN_IDS)) if body.has_any(OWN_IDS) else body

    def owner(self, salt: str | None) -> str | None:
        """The tenant whose requests run under `salt`, with or without a salt of the client's; None for a salt
        of no tenant."""
        return self._owners.get(salt[:_OWN_LENGTH]) if salt is not None else None


def _own_salt(tenant: str) -> str:
    return f"kvpin-{_digest(tenant)}"


def _digest(text: str) -> str:
    """128 bits in hex. The fixed length keeps one tenant's salt from being the beginning of another's."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


_OWN_LENGTH = len(_own_salt(""))
