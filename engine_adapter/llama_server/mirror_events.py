"""The content of slots and files as KV events: the proxy indexes it like the cache of any other engine.

A place (a slot, a file) holds a run of tokens on a tier. Runs share blocks. A block is stored on a tier when
its first place gets it, and removed when its last place loses it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Hashable
from dataclasses import dataclass
from hashlib import blake2b

from xxhash import xxh3_64_intdigest

from engine_adapter.types import BlocksRemoved, BlocksStored, KvEvent, Tier, TokenIds, ViewCurrent, ViewLost

TOKENS_PER_BLOCK = 16
# Clients may invent salts. Beyond this number, only salts that own content are remembered.
MAX_SALTS = 10_000
# Without it, a client could make a prompt whose blocks have the names of another tenant's.
_KEY = secrets.token_bytes(16)


@dataclass(frozen=True, slots=True)
class _Run:
    """The full blocks of one place's content; `salt` is a digest."""

    tier: Tier
    names: tuple[int, ...]
    tokens: TokenIds[int]
    salt: str | None


class MirrorEvents:
    """The places of one server, and the followers of their events. Places have the digest of a salt, because
    a sidecar has no more. Events of a salt's content begin once the salt itself is known: no request can use
    the content before."""

    def __init__(self) -> None:
        self._salts: dict[str | None, str | None] = {None: None}
        self._runs: dict[Hashable, _Run] = {}
        self._holders: Counter[tuple[Tier, int]] = Counter()
        self._followers: set[asyncio.Queue[KvEvent]] = set()

    def know(self, digest: str | None, salt: str | None) -> None:
        """Learns the salt of a digest, and sends the events that waited for it."""
        if digest in self._salts:
            return
        if len(self._salts) > MAX_SALTS:  # a request that brings an unused salt makes it known again
            used = {None, *(run.salt for run in self._runs.values())}
            self._salts = {each: known for each, known in self._salts.items() if each in used}
        self._salts[digest] = salt
        for run in self._runs.values():
            if run.salt == digest and run.names:
                self._tell(self._stored(run, 0))

    def put(self, place: Hashable, tier: Tier, tokens: TokenIds[int], salt: str | None) -> None:
        """Replaces the content of `place` by these tokens."""
        run = _Run(tier, _names(tokens, salt), tokens, salt)
        old = self._runs.get(place)
        if old is not None and (old.tier, old.names) == (run.tier, run.names):
            return
        # Store before remove: a block that moves from one run to the other never leaves the view.
        self._runs[place] = run
        self._store(run)
        if old is not None:
            self._remove(old)

    def drop(self, place: Hashable) -> None:
        """Empties `place`."""
        old = self._runs.pop(place, None)
        if old is not None:
            self._remove(old)

    def clear(self) -> None:
        """Empties all places."""
        for place in tuple(self._runs):
            self.drop(place)

    async def follow(self) -> AsyncGenerator[KvEvent, None]:
        """Yields what the places hold now, then every change."""
        queue: asyncio.Queue[KvEvent] = asyncio.Queue()
        queue.put_nowait(ViewLost("the slot mirror is sent from its beginning"))
        for run in self._runs.values():
            if run.names and run.salt in self._salts:
                queue.put_nowait(self._stored(run, 0))
        queue.put_nowait(ViewCurrent())
        self._followers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._followers.discard(queue)

    def _store(self, run: _Run) -> None:
        first = len(run.names)
        for at, name in enumerate(run.names):
            self._holders[run.tier, name] += 1
            # A run holds the parents of its blocks too, so only its end can be new.
            if self._holders[run.tier, name] == 1:
                first = min(first, at)
        if first < len(run.names) and run.salt in self._salts:
            self._tell(self._stored(run, first))

    def _remove(self, run: _Run) -> None:
        gone = []
        for name in run.names:
            key = (run.tier, name)
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                gone.append(name)
        if gone and run.salt in self._salts:
            self._tell(BlocksRemoved(run.tier, tuple(gone)))

    def _stored(self, run: _Run, first: int) -> BlocksStored:
        """The event of a run's blocks from `first` on."""
        return BlocksStored(
            tier=run.tier,
            parent=run.names[first - 1] if first else None,
            hashes=run.names[first:],
            token_ids=run.tokens[first * TOKENS_PER_BLOCK : len(run.names) * TOKENS_PER_BLOCK],
            tokens_per_block=TOKENS_PER_BLOCK,
            salt=self._salts[run.salt] if not first else None,
        )

    def _tell(self, event: KvEvent) -> None:
        for queue in self._followers:
            queue.put_nowait(event)


def _names(tokens: TokenIds[int], salt: str | None) -> tuple[int, ...]:
    """A name for each full block; equal prefixes under the same salt have equal names."""
    step = TOKENS_PER_BLOCK * tokens.itemsize
    raw = tokens.tobytes()
    root = b"" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass")
    name = int.from_bytes(blake2b(root, digest_size=8, key=_KEY).digest(), "little")
    names = []
    for at in range(0, len(raw) - step + 1, step):
        name = xxh3_64_intdigest(name.to_bytes(8, "little") + raw[at : at + step])
        names.append(name)
    return tuple(names)
