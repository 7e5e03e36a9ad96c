"""API key → tenant → cache salt and limits; the models of a key, and its end. The cache salts under which an
engine may hold KV of each tenant: flushing a tenant flushes them all. Salts keep tenants' KV apart.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from engine_adapter import HINTS, OWN_IDS, PRIVATE_FIELDS, PRIVATE_WITHIN, JsonBody
from proxy.core.books import IssuedKey, KeyBook
from proxy.core.quotas import Quota, TenantLimits, Use
from proxy.errors import BadRequest

_MOST = 1024  # characters of a client's salt: records, chats and indexes keep it
_LEFT_OUT = OWN_IDS | HINTS  # fields that make no difference to the answer
# Fields within other fields are refused: leaving them out would mean to write the outer one anew.
_NOT_WITHIN = PRIVATE_FIELDS | HINTS


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A data-plane key and the tenant it belongs to."""

    tenant: str
    digest: bytes = field(repr=False)  # SHA-256 of the key
    models: frozenset[str] | None = None  # the names that its requests may have as `model`; None for all
    expires: float | None = None  # when it ends, in Unix time; None for never

    @classmethod
    def of(
        cls, key: str, tenant: str, models: frozenset[str] | None = None, expires: float | None = None
    ) -> ApiKey:
        """Made from the key itself; only its digest is kept."""
        return cls(tenant, hashlib.sha256(key.encode()).digest(), models, expires)

    @classmethod
    def of_issued(cls, key: IssuedKey) -> ApiKey:
        """A key that the admin API issued."""
        models = frozenset(key.models) if key.models is not None else None
        return cls(key.tenant, key.digest, models, key.expires)

    def has_expired(self, now: float) -> bool:
        """True if it has ended by `now`, in Unix time."""
        return self.expires is not None and self.expires <= now


class Tenants:
    """Keys → tenants → salts and quotas.

    With at most one tenant, all requests share KV, and a client's `cache_salt` is passed on. With several
    tenants, each has its own salt, and a client's salt divides it further. All salts of a tenant have the
    same beginning, so the salts that engines report show whose KV it is."""

    def __init__(
        self,
        keys: Iterable[ApiKey],
        limits: Mapping[str, TenantLimits] | None = None,
        issued: KeyBook | None = None,
        secret: bytes = b"",
    ) -> None:
        """Begins with these keys of the settings and their limits; `replace` changes them later. `issued`:
        those that the admin API issued; none by default. `secret`: the key of the salts."""
        self._secret = secret
        self.listeners: list[Callable[[], None]] = []  # called when keys have changed
        self.issued = issued if issued is not None else KeyBook()  # the keys that the admin API issued
        self.issued.listeners.append(self._follow)
        self._quotas: dict[str, Quota] = {}
        self._changed: set[Quota] = set()
        self.replace(keys, limits or {})

    def replace(self, keys: Iterable[ApiKey], limits: Mapping[str, TenantLimits]) -> None:
        """The settings have only these keys and limits from now on. A tenant that stays keeps its salt, and
        so its KV. What it has used of its limits still counts. `limits`: of those tenants that have some."""
        self.of_settings = tuple(keys)
        self._limits = limits
        self._follow()

    def _follow(self) -> None:
        """The keys have changed. Those of the settings and issued ones count alike; if a key is both, the
        settings say what it is for. Likewise their limits of a tenant."""
        limits, used = {**self.issued.limits(), **self._limits}, self._quotas
        self._quotas = {
            name: used.get(name) or Quota(each, name, self._changed) for name, each in limits.items()
        }
        for name, each in limits.items():
            self._quotas[name].change(each)
        known = [*map(ApiKey.of_issued, self.issued.issued()), *self.of_settings]
        # Requests need no key. Once a key was issued they do, even if none is left.
        self.open = not known and not self.issued.has_issued
        self.names = frozenset(key.tenant for key in known)
        self.isolated = len(self.names) > 1  # tenants do not share KV
        self._keys = {key.digest: key for key in known}
        self._owners = {self._own_salt(name): name for name in self.names} if self.isolated else {}
        for listener in self.listeners:
            listener()

    @property
    def keys(self) -> Iterable[ApiKey]:
        """All keys, those of the settings and issued ones."""
        return self._keys.values()

    def quota(self, tenant: str | None) -> Quota | None:
        """The use that the tenant makes of its limits; None if it has none."""
        return self._quotas.get(tenant) if tenant is not None else None

    def take_used(self, *, anew: bool = False) -> Iterator[tuple[str, Use]]:
        """The use of each limited tenant here since the last call, for peers; with `anew`, also of tenants
        without news, for a peer that knows nothing yet."""
        changed = [*self._quotas.values()] if anew else [*self._changed]
        self._changed.clear()
        return ((quota.tenant, quota.take()) for quota in changed)

    def used_elsewhere(self, now: float, peer: Hashable, tenant: str, use: Use) -> None:
        """A peer tells what a tenant used there. A tenant that has no limits here may have some there."""
        if (quota := self._quotas.get(tenant)) is not None:
            quota.used_elsewhere(now, peer, use)

    def leave_elsewhere(self, peer: Hashable) -> None:
        """The peer is gone, and its requests with it."""
        for quota in self._quotas.values():
            quota.leave_elsewhere(peer)

    def find(self, key: str) -> ApiKey | None:
        """What is known of a key; None for an unknown one. The time of a search by digest tells nothing."""
        digest = hashlib.sha256(key.encode()).digest()
        known = self._keys.get(digest)
        return known if known is not None and hmac.compare_digest(known.digest, digest) else None

    def salt(self, tenant: str | None, client_salt: object) -> str | None:
        """The salt of a request. Raises BadRequest for a client's salt that is no text, or too long."""
        if client_salt is not None and not (isinstance(client_salt, str) and 0 < len(client_salt) <= _MOST):
            raise BadRequest(f"cache_salt must be a text of 1 to {_MOST} characters", param="cache_salt")
        if not self.isolated or tenant is None:
            return client_salt
        own = self._own_salt(tenant)
        return own if client_salt is None else f"{own}-{self._digest(client_salt)}"

    def _own_salt(self, tenant: str) -> str:
        return f"kvpin-{self._digest(tenant)}"

    def _digest(self, text: str) -> str:
        """128 bits in hex. The fixed length keeps one tenant's salt from being the beginning of another's."""
        return hashlib.blake2b(text.encode(), digest_size=16, key=self._secret).hexdigest()

    def without_private(self, body: JsonBody) -> JsonBody:
        """The body without what may reach another tenant's request or KV. With at most one tenant, all of it.
        Raises BadRequest for a field that would change the answer if it were left out."""
        if not self.isolated or body.is_plain:
            return body
        for name in _private_fields(body):
            raise private_field(name)
        return body.replace(**dict.fromkeys(_LEFT_OUT)) if body.has_any(_LEFT_OUT) else body

    def owner(self, salt: str | None) -> str | None:
        """The tenant whose requests run under `salt`, with or without a salt of the client's; None for a salt
        of no tenant."""
        return self._owners.get(salt[:_OWN_LENGTH]) if salt is not None else None


def private_field(name: str) -> BadRequest:
    """The error of a request with that field, where there are several tenants."""
    return BadRequest(
        f"{name} is a field between servers; kvpin takes it from no client while several tenants share the "
        "engines",
        param=name,
    )


def _private_fields(body: JsonBody) -> Iterator[str]:
    """The fields between servers that have a value, with their paths."""
    if body.has_any(PRIVATE_FIELDS):
        yield from (name for name in sorted(PRIVATE_FIELDS) if body.get(name) is not None)
    for first, *rest in PRIVATE_WITHIN:
        value = body.get(first)
        for name in rest:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, dict):
            found = sorted(value.keys() & _NOT_WITHIN)
            yield from (".".join((first, *rest, name)) for name in found if value[name] is not None)


_OWN_LENGTH = len("kvpin-") + 32


# --- salts ----------------------------------------------------------------------------------------------

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
    is not certain: the tenant counts as incomplete from then on."""

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
