"""One saved prefix in the registry, and the choice of those that are worth least."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from engine_adapter.llama_server.plan import density
from engine_adapter.llama_server.saved_files import FORMAT, Found, Sidecar, Stamp
from engine_adapter.types import Tier, TokenIds

KEPT_SHARE = 0.5  # of a tier, at most, is retained for clients
_HALF_LIFE_S = 1800.0  # an unused saved prefix loses half of its value in this time

Work = asyncio.Task[Any]


@dataclass(slots=True, eq=False)
class Saved:
    """One saved prefix.

    Attributes:
        name: file name, the same in either tier.
        key: fingerprint of model and stream layout; a server restores only its own key.
        salt: `salt_digest` of the cache salt of the content.
        tokens: the tokens whose KV it holds.
        size: bytes.
        tier: HOST or DISK.
        checksum: xxh3_64 of the file.
        created: seconds since the epoch, as all times here.
        last_used: time of its last restore or write.
        uses: restores of it and of entries it replaced.
        pinned_until: it is not evicted before this time.
        kept_until: before this time it is evicted after others, as far as `kept` says.
        kept_for: digest of the tenant that retains it.
        seen: stamp of the file whose bytes were hashed in this process.
        retry_at: it is not restored before this time, because it could not be read.
        holds: restores that use it now; its files stay until they end.
        work: the running file operation.
    """

    name: str
    key: str
    salt: str | None
    tokens: TokenIds[int] = field(repr=False)
    size: int
    tier: Tier
    checksum: int
    created: float
    last_used: float
    uses: int = 0
    pinned_until: float = 0.0
    kept_until: float = 0.0
    kept_for: str | None = None
    seen: Stamp | None = field(default=None, repr=False)
    retry_at: float = 0.0
    holds: int = field(default=0, repr=False)
    work: Work | None = field(default=None, repr=False)

    @property
    def is_busy(self) -> bool:
        """Whether a file operation is running."""
        return self.work is not None and not self.work.done()

    async def idle(self) -> None:
        """Waits until no file operation is running."""
        while self.work is not None and not self.work.done():
            await asyncio.wait({self.work})

    def sidecar(self) -> Sidecar:
        """The content of its sidecar."""
        return Sidecar(
            FORMAT,
            self.key,
            self.salt,
            len(self.tokens),
            self.size,
            self.checksum,
            self.created,
            self.last_used,
            self.uses,
            None if self.kept_until == math.inf else self.kept_until,
            self.kept_for,
        )


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


def from_found(tier: Tier, found: Found) -> Saved:
    """The entry of a file found in a directory."""
    record = found.sidecar
    return Saved(
        found.name,
        record.key,
        record.salt,
        found.tokens,
        record.size,
        tier,
        record.checksum,
        record.created,
        record.last_used,
        record.uses,
        kept_until=math.inf if record.kept_until is None else record.kept_until,
        kept_for=record.kept_for,
    )


def value(saved: Saved, now: float) -> float:
    """The value of a saved prefix per byte."""
    return density(len(saved.tokens), saved.size, now - saved.last_used, saved.uses, _HALF_LIFE_S)


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


def least_valuable(entries: Iterable[Saved], size: int, room: int, now: float) -> list[Saved] | None:
    """The entries of least value that together hold `size` bytes of a tier of `room` bytes.

    None if too few may go. Entries that are pinned, in use, or worked on stay; retained ones go last.
    """
    entries = tuple(entries)
    free = [saved for saved in entries if saved.pinned_until <= now and not saved.holds and not saved.is_busy]
    staying = kept(entries, room, now)
    victims: list[Saved] = []
    for saved in sorted(free, key=lambda each: (each in staying, value(each, now))):
        if size <= 0:
            break
        victims.append(saved)
        size -= saved.size
    return None if size > 0 else victims
