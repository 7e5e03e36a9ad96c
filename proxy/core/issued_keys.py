"""The keys that the admin API has issued. Every kvpin of a group holds the same book."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from proxy.core.quotas import TenantLimits

# A book holds this many keys, and as many marks of removed ones, the newest.
MAX_KEYS = 2000
# Clocks of kvpins may differ by about this much.
MAX_AGE_S = 300.0
# The least time between two removals.
_TICK_S = 0.001
_SIGNATURE, _SIGNATURE_BYTES = "sha256", 32


class IssuedKey(msgspec.Struct, frozen=True, array_like=True):
    """A key that the admin API issued, without the key itself.

    Attributes:
        digest: SHA-256 of the key.
        ending: its last four characters, by which people recognise it.
        created: when it was issued, in Unix time.
        name: what its operator calls it; may be empty.
        models: the names that its requests may have as `model`; None for all.
        expires: when it ends, in Unix time; None for never.
        removed: when it was removed, in Unix time; 0 before that. Then it opens nothing any more. Its entry
            stays as a mark: another kvpin may still tell of it.
        limits: those of its tenant from then on, also once the key is removed; None leaves them as they are.
    """

    id: str
    tenant: str
    digest: bytes
    ending: str
    created: float
    name: str = ""
    models: tuple[str, ...] | None = None
    expires: float | None = None
    removed: float = 0.0
    limits: TenantLimits | None = None


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """What one kvpin tells another. `at`: when, in Unix time."""

    at: float
    entries: list[IssuedKey]


def signed(entries: list[IssuedKey], secret: bytes, now: float) -> bytes:
    """Entries as bytes for another kvpin that has the same secret. Whoever lacks it can issue no key. `now`
    is in Unix time."""
    data = msgspec.msgpack.encode(_Told(now, entries))
    return hmac.digest(secret, data, _SIGNATURE) + data


def verified(told: bytes, secret: bytes, now: float | None) -> list[IssuedKey] | None:
    """The entries of `signed`; None if another secret signed them, or they are none.

    Also None MAX_AGE_S after they were signed, as `now` says: whoever may write to the exchange could repeat
    what it told before a key was removed. With `now` None, only this user may write there, and age is no
    matter.
    """
    signature, data = told[:_SIGNATURE_BYTES], told[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(hmac.digest(secret, data, _SIGNATURE), signature):
        return None
    try:
        heard = msgspec.msgpack.decode(data, type=_Told)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return heard.entries if now is None or abs(now - heard.at) <= MAX_AGE_S else None


@dataclass(slots=True)
class KeyBook:
    """The issued keys and the marks of removed ones.

    Attributes:
        listeners: called when a key came or was removed.
    """

    listeners: list[Callable[[], None]] = field(default_factory=list)
    _entries: dict[str, IssuedKey] = field(default_factory=dict)

    @property
    def has_issued(self) -> bool:
        """True if a key was ever issued, also if none is left. Then no request is served without a key."""
        return bool(self._entries)

    def issued(self) -> list[IssuedKey]:
        """The keys that are not removed, the first issued first."""
        return [entry for entry in self.entries() if not entry.removed]

    def limits(self) -> dict[str, TenantLimits]:
        """The limits of each tenant that the keys name some for: those of the newest key that does."""
        return {entry.tenant: entry.limits for entry in self.entries() if entry.limits is not None}

    def _limiting(self) -> frozenset[str]:
        """The entries that tell the limits of a tenant with a key: without its mark it would have none."""
        tenants = {key.tenant for key in self.issued()}
        telling = {entry.tenant: entry.id for entry in self.entries() if entry.limits is not None}
        return frozenset(entry_id for tenant, entry_id in telling.items() if tenant in tenants)

    def entries(self) -> list[IssuedKey]:
        """The keys and the marks, the first issued first."""
        return sorted(self._entries.values(), key=lambda entry: (entry.created, entry.id))

    def removal(self, key: IssuedKey, now: float) -> IssuedKey:
        """The mark of a key that is removed at `now`, in Unix time. It is the newest mark, whatever the clock
        says: the oldest ones are dropped."""
        newest = max((entry.removed for entry in self._entries.values()), default=0.0)
        return msgspec.structs.replace(key, name="", models=None, removed=max(now, newest + _TICK_S))

    def merge(self, entries: Iterable[IssuedKey]) -> None:
        """Takes over what is new here. A removal counts for good, while its mark is among the newest."""
        before = dict(self._entries)
        for entry in entries:
            known = self._entries.get(entry.id)
            if known is None or entry.removed > known.removed:
                self._entries[entry.id] = entry
        marks = sorted(
            (entry for entry in self._entries.values() if entry.removed),
            key=lambda entry: (entry.removed, entry.id),
        )
        needed = self._limiting() if len(marks) > MAX_KEYS else frozenset[str]()
        for mark in marks[:-MAX_KEYS]:
            if mark.id not in needed:
                del self._entries[mark.id]
        for listener in self.listeners if self._entries != before else ():
            listener()
