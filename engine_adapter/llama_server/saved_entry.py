"""One saved prefix as the registry knows it, and which of several are worth the least."""

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

KEPT_SHARE = 0.5  # of a tier; no client fills it with what it wants kept
_HALF_LIFE_S = 1800.0  # of the value of a saved prefix that nobody uses

Work = asyncio.Task[Any]


@dataclass(slots=True, eq=False)
class Saved:
    """One saved prefix.

    Attributes:
        name: file name, the same in either tier.
        key: fingerprint of model and stream layout; of another key nothing is restored.
        salt: `salt_digest` of the cache salt of the content.
        tokens: the tokens whose KV it holds.
        size: bytes.
        tier: HOST or DISK.
        checksum: xxh3_64 of the file.
        created: seconds since the epoch, as all times here.
        last_used: when it was last restored or written.
        uses: how often it, or what it replaced, was restored.
        pinned_until: until then it is not evicted.
        kept_until: until then it is evicted after others, as far as `kept` says.
        kept_for: digest of who wants it kept.
        seen: stamp of the file whose bytes were hashed in this process.
        retry_at: until then it is not restored, because it could not be read.
        holds: restores that use it now; its files stay until they end.
        work: the file operation under way.
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
        """Whether a file operation is under way."""
        return self.work is not None and not self.work.done()

    async def idle(self) -> None:
        """Returns when no file operation is under way."""
        while self.work is not None and not self.work.done():
            await asyncio.wait({self.work})

    def sidecar(self) -> Sidecar:
        """What its sidecar says."""
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
    """What a listener is told of an entry."""

    ADDED = "added"
    MOVED = "moved"  # to `Saved.tier`
    REMOVED = "removed"  # from whatever tier it was in


Listener = Callable[[SavedEvent, Saved], None]


def salt_digest(salt: str | None) -> str | None:
    """What stands for a cache salt in the registry and on disk; None for none."""
    if salt is None:
        return None
    data = salt.encode(errors="surrogatepass")
    return blake2b(data, digest_size=16, person=b"kvpin-salt").hexdigest()


def from_found(tier: Tier, found: Found) -> Saved:
    """The entry of a file that was found in a directory."""
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
    """What a saved prefix is worth per byte."""
    return density(len(saved.tokens), saved.size, now - saved.last_used, saved.uses, _HALF_LIFE_S)


def kept(entries: Iterable[Saved], room: int, now: float) -> set[Saved]:
    """The entries that count as kept: of those that clients want kept, what fits into their share of `room`
    bytes. Owners get theirs in turns, the one with least so far first, each its last used first."""
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
    """Those of least value that hold `size` bytes together, of a tier of `room` bytes; None if too little of
    it may be taken away.

    What is pinned, in use, or being worked on stays; what is kept goes after all else.
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
