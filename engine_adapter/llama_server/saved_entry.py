"""One saved prefix: its record on disk, its state in the registry, and which of several is worth least."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import msgspec

from engine_adapter.types import Tier, TokenIds, common_prefix

KEPT_SHARE = 0.5  # of a tier, at most, is retained for clients

Stamp = tuple[int, int, int]  # inode, bytes, mtime in ns: the same file with the same content
Work = asyncio.Task[Any]


class Sidecar(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """kvpin's record of a saved file. It has no prompt content, and only a digest of the salt.

    Attributes:
        key: fingerprint of model and stream layout; a server restores only its own key.
        salt: `salt_digest` of the cache salt of the content.
        checksum: xxh3_64 of the file.
        created: seconds since the epoch, as all times here.
        last_used: time of its last restore or write.
        uses: restores of it and of entries it replaced.
        kept_until: a client retains it until then: it is evicted after others, as far as `kept` says. In
            JSON, null stands for infinity.
        kept_for: digest of that client's tenant.
    """

    format: int
    key: str
    salt: str | None
    count: int = msgspec.field(name="tokens")
    size: int
    checksum: int
    created: float
    last_used: float
    uses: int
    kept_until: float = 0.0
    kept_for: str | None = None


class Saved(Sidecar, kw_only=True, eq=False):
    """One saved prefix.

    Attributes:
        name: file name, the same in either tier.
        pins: until when which engine wants it kept. Servers that share a directory share its prefixes.
        seen: stamp of the file whose bytes were hashed in this process.
        retry_at: it is not restored before this time, because it could not be read.
        holds: restores that use it now; its files stay until they end.
    """

    name: str
    tokens: TokenIds[int] = msgspec.field(name="token_ids")
    tier: Tier = Tier.HOST
    pins: dict[str, float] = msgspec.field(default_factory=dict)
    seen: Stamp | None = None
    retry_at: float = 0.0
    holds: int = 0
    work: Work | None = None

    @property
    def pinned_until(self) -> float:
        """It is not evicted before this time."""
        return max(self.pins.values(), default=0.0)

    def __repr__(self) -> str:
        return f"Saved({self.name!r})"  # its tokens are secret

    @property
    def is_busy(self) -> bool:
        """True if a file operation is running."""
        return self.work is not None and not self.work.done()

    async def idle(self) -> None:
        """Waits until no file operation is running."""
        while self.work is not None and not self.work.done():
            await asyncio.wait({self.work})

    def shared(self, tokens: TokenIds[int], salt: str | None) -> int:
        """Number of leading tokens of `tokens` that it holds under `salt`."""
        return common_prefix(self.tokens, tokens) if self.salt == salt else 0

    def sidecar(self) -> bytes:
        """The content of its sidecar."""
        return msgspec.json.encode(msgspec.convert(self, Sidecar, from_attributes=True))


class SavedEvent(StrEnum):
    """An event in the life of an entry."""

    ADDED = "added"
    MOVED = "moved"  # to `Saved.tier`
    REMOVED = "removed"  # from its tier


Listener = Callable[[SavedEvent, Saved], None]


def salt_digest(salt: str | None) -> str | None:
    """The digest that stands for a cache salt in the registry and on disk; None for no salt."""
    if salt is None:
        return None
    data = salt.encode(errors="surrogatepass")
    return blake2b(data, digest_size=16, person=b"kvpin-salt").hexdigest()


def kept(entries: Iterable[Saved], room: int, now: float) -> set[Saved]:
    """The entries that count as retained: those that clients retain, up to KEPT_SHARE of `room` bytes.

    Tenants take turns, the one with the fewest bytes so far first; each gets its last used entry first.
    """
    wanted: dict[str | None, list[Saved]] = {}
    for saved in sorted(entries, key=lambda each: each.last_used):
        if saved.kept_until > now:
            wanted.setdefault(saved.kept_for, []).append(saved)
    chosen: set[Saved] = set()
    used = dict.fromkeys(wanted, 0)
    left = KEPT_SHARE * room
    while wanted:
        owner = min(wanted, key=lambda each: used[each])
        saved = wanted[owner].pop()
        if saved.size > left or not wanted[owner]:
            del wanted[owner]
        if saved.size <= left:
            chosen.add(saved)
            used[owner] += saved.size
            left -= saved.size
    return chosen


def least_valuable(
    entries: Iterable[Saved], size: int, room: int, now: float, value: Callable[[Saved], tuple[float, float]]
) -> list[Saved] | None:
    """The entries of least `value` that together hold `size` bytes of a tier of `room` bytes.

    None if too few may go. Entries that are pinned, in use, or worked on stay; retained ones go last.
    """
    entries = tuple(entries)
    free = [saved for saved in entries if saved.pinned_until <= now and not saved.holds and not saved.is_busy]
    staying = kept(entries, room, now)
    victims: list[Saved] = []
    for saved in sorted(free, key=lambda each: (each in staying, value(each))):
        if size <= 0:
            break
        victims.append(saved)
        size -= saved.size
    return None if size > 0 else victims
