"""Who a key belongs to, and the cache salt that keeps tenants' KV apart."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from proxy.errors import BadRequest


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A data-plane key and the tenant it belongs to."""

    tenant: str
    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, key: str, tenant: str) -> ApiKey:
        """From the key itself, of which only a digest is kept."""
        return cls(tenant, hashlib.sha256(key.encode()).digest())


class Tenants:
    """Keys → tenants → salts.

    With one tenant, or none, all share KV and a client's own `cache_salt` is passed on. With several, each
    has a salt of its own, and a client's salt only divides it further.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)
        self.isolated = len({key.tenant for key in self._keys}) > 1

    @property
    def open(self) -> bool:
        """Whether requests need no key."""
        return not self._keys

    def of_key(self, key: str) -> str | None:
        """The tenant of a key, None for an unknown one. Takes the same time whichever key matches."""
        digest = hashlib.sha256(key.encode()).digest()
        tenant = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, digest):
                tenant = known.tenant
        return tenant

    def salt(self, tenant: str | None, client_salt: object) -> str | None:
        """The salt a request runs under. Raises BadRequest for a client salt that is no non-empty string."""
        if client_salt is not None and (not isinstance(client_salt, str) or not client_salt):
            raise BadRequest("cache_salt must be a non-empty string", param="cache_salt")
        if not self.isolated or tenant is None:
            return client_salt
        frame = b""
        for part in (tenant, client_salt):
            encoded = b"" if part is None else part.encode()
            frame += len(encoded).to_bytes(8, "little") + encoded
        return "kvpin-" + hashlib.blake2b(frame, digest_size=16).hexdigest()
