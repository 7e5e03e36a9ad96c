"""What slots and files hold, told as KV events: the proxy's index then knows it like any other engine's.

A place (a slot, a file) holds a run of tokens on a tier. Runs share blocks: a block is stored on a tier when
the first place there gets it, and removed when the last one loses it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Hashable
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from engine_adapter.types import (
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    Tier,
    TokenIds,
    ViewCurrent,
    ViewLost,
)

TOKENS_PER_BLOCK = 16
# Salts are the clients' to invent: of more than these, only those that something lies under are remembered.
MAX_SALTS = 10_000


@dataclass(frozen=True, slots=True)
class _Run:
    """The full blocks of what a place holds; `salt` is a digest."""

    tier: Tier
    names: tuple[int, ...]
    tokens: TokenIds[int]
    salt: str | None


class MirrorEvents:
    """The places of one server, and whoever follows them.

    Places name a salt by its digest, which is all that lies beside a file. What lies under a salt is told
    once the salt itself is known: before, no request can ask for it.
    """

    def __init__(self) -> None:
        self._salts: dict[str | None, str | None] = {None: None}
        self._runs: dict[Hashable, _Run] = {}
        self._holders: Counter[tuple[Tier, int]] = Counter()
        self._followers: set[asyncio.Queue[KvEvent]] = set()

    def know(self, digest: str | None, salt: str | None) -> None:
        """The salt behind a digest."""
        if digest in self._salts:
            return
        if len(self._salts) > MAX_SALTS:
            self._forget_unused_salts()
        self._salts[digest] = salt
        for run in self._runs.values():
            if run.salt == digest and run.names:
                self._tell(self._stored(run, 0))

    def put(self, place: Hashable, tier: Tier, tokens: TokenIds[int], salt: str | None) -> None:
        """`place` now holds these tokens and nothing else."""
        run = _Run(tier, _names(tokens, salt), tokens, salt)
        old = self._runs.get(place)
        if old is not None and (old.tier, old.names) == (run.tier, run.names):
            return
        # Stored before removed: a block that only moves from one run to the other never leaves the view.
        self._runs[place] = run
        self._store(run)
        if old is not None:
            self._remove(old)

    def drop(self, place: Hashable) -> None:
        """`place` holds nothing any more."""
        old = self._runs.pop(place, None)
        if old is not None:
            self._remove(old)

    def clear(self) -> None:
        """No place holds anything."""
        for place in tuple(self._runs):
            self.drop(place)

    async def follow(self) -> AsyncGenerator[KvEvent, None]:
        """See `EngineAdapter.events`."""
        queue: asyncio.Queue[KvEvent] = asyncio.Queue()
        queue.put_nowait(ViewLost("the mirror is read from its beginning"))
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

    def _forget_unused_salts(self) -> None:
        """Nobody was told of anything under them, and they are known again when they are asked for."""
        used = {None, *(run.salt for run in self._runs.values())}
        self._salts = {digest: salt for digest, salt in self._salts.items() if digest in used}

    def _store(self, run: _Run) -> None:
        holders, first = self._holders, len(run.names)
        for at, name in enumerate(run.names):
            key = (run.tier, name)
            holders[key] += 1
            # Runs hold their parents too: what is new is the end of the run.
            if holders[key] == 1:
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
    """A name for each full block: equal for equal prefixes under the same salt."""
    step = TOKENS_PER_BLOCK * tokens.itemsize
    raw = tokens.tobytes()
    name = xxh3_64_intdigest(b"" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass"))
    names = []
    for at in range(0, len(raw) - step + 1, step):
        name = xxh3_64_intdigest(name.to_bytes(8, "little") + raw[at : at + step])
        names.append(name)
    return tuple(names)
