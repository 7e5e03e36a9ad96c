"""The registry of saved prefixes: files of slots in a host tier and a disk tier, within their caps.

    server saves → add → [host tier] ⇄ [disk tier] → gone
                              ↑ ready / using, before a restore

State changes only on the event loop, in one go and without awaits. The file work it decided on then runs in a
thread, one operation at a time per entry (`Saved.work`). A caller may be cancelled at any await: the work it
began goes on, but for `add`, and each entry has its file afterwards.

Salts are secrets of tenants: everything here takes `salt_digest` of a salt, never the salt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

from engine_adapter.errors import EngineSpecError
from engine_adapter.llama_server import saved_files
from engine_adapter.llama_server.plan import SlotRates
from engine_adapter.llama_server.saved_files import (
    FileFault,
    Listener,
    Saved,
    SavedEvent,
    Stamp,
    StateFileError,
    Work,
    least_valuable,
    salt_digest,
    writing,
)
from engine_adapter.types import Tier

__all__ = ["OwnTasks", "Saved", "SavedEvent", "SavedPlace", "SavedPrefixes", "salt_digest"]

RETRY_S = 60.0  # pause after a saved prefix could not be read, before the next try

_log = logging.getLogger("kvpin.llama_server")
_Result = TypeVar("_Result")


class OwnTasks:
    """The tasks of one owner, which go on if the caller that waits for them is cancelled. `what` they do is
    for the log. Callers handle `expected` errors. Any other is logged, because its caller may have left."""

    def __init__(self, what: str, expected: type[Exception]) -> None:
        self._what = what
        self._expected = expected
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Runs `work`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def settled(self) -> None:
        """Waits until all are over, also those that begin meanwhile."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def cancel(self) -> None:
        """Cancels all, and waits until they are over."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, self._expected):
            _log.error("%s failed", self._what, exc_info=error)


@dataclass(frozen=True, slots=True)
class SavedPlace:
    """The directories of saved prefixes, and how many bytes they may take. The host tier is the server's
    `--slot-save-path`."""

    host: Path
    host_bytes: int
    disk: Path | None = None
    disk_bytes: int = 0


class SavedPrefixes:
    """The saved prefixes of the servers that share a directory. Other kvpin processes may share the
    directory: files may come and go, and each process applies its caps to the files it knows."""

    _shared: ClassVar[WeakValueDictionary[SavedPlace, SavedPrefixes]] = WeakValueDictionary()

    def __init__(self, place: SavedPlace, *, clock: Callable[[], float] = time.time) -> None:
        if place.disk == place.host:
            raise EngineSpecError(f"{place.host} cannot be both the host tier and the disk tier")
        if place.host_bytes <= 0 or (place.disk is not None and place.disk_bytes <= 0):
            raise EngineSpecError(f"saved prefixes in {place.host}: the bytes of each tier must be above 0")
        self.place = place
        self._clock = clock
        self._dirs = {Tier.HOST: place.host} | ({Tier.DISK: place.disk} if place.disk else {})
        self._wanted = {Tier.HOST: place.host_bytes, Tier.DISK: place.disk_bytes}
        self._caps = self._wanted.copy()
        # What the files of a key are worth to its servers. A key without a server has the guesses.
        self.rates: defaultdict[str, SlotRates] = defaultdict(SlotRates)
        self._entries: dict[str, Saved] = {}
        self._listeners: dict[Listener, str] = {}  # whose each is: an engine
        self._counts: Counter[str] = Counter(evicted=0, demoted=0, promoted=0, refused=0)
        self._tasks = OwnTasks(f"work on the saved prefixes in {place.host}", StateFileError)
        self._rebuilding: asyncio.Task[None] | None = None

    @classmethod
    def shared(cls, place: SavedPlace, engine: str) -> SavedPrefixes:
        """The registry of `place`: one per host directory for all adapters of this process. EngineSpecError
        means that the `engine` contradicts another one. Its adapter with other settings may still be there:
        that one keeps its registry until it is closed."""
        resolved = SavedPlace(
            place.host.resolve(), place.host_bytes, place.disk and place.disk.resolve(), place.disk_bytes
        )
        there = [each for each in cls._shared.values() if each.place.host == resolved.host]
        others = [each for each in there if each.place != resolved]
        if {id_ for each in others for id_ in each._listeners.values()} - {engine}:  # noqa: SLF001 - its own
            raise EngineSpecError(
                f"engine {engine!r} and another one share {resolved.host} for saved prefixes with different "
                "bytes or disk tiers: give them the same, and restart kvpin if both use it already"
            )
        registry = cls._shared.get(resolved)
        if registry is None or (others and not registry._listeners):  # noqa: SLF001
            registry = cls._shared[resolved] = cls(resolved)
        return registry

    # --- What there is ---------------------------------------------------------------------------

    def entries(self, key: str) -> Iterator[Saved]:
        """The saved prefixes of one key."""
        return (saved for saved in tuple(self._entries.values()) if saved.key == key)

    def usable(self, key: str) -> Iterator[Saved]:
        """The saved prefixes of one key that may be restored now. One that could not be read pauses."""
        now = self._clock()
        return (saved for saved in self.entries(key) if saved.retry_at <= now)

    def stats(self) -> dict[str, Any]:
        """Entries, bytes and cap of each tier, the counts so far, and each entry without its content."""
        now = self._clock()
        tiers = {
            tier.value: {
                "entries": sum(saved.tier is tier for saved in self._entries.values()),
                "bytes": sum(saved.size for saved in self._entries.values() if saved.tier is tier),
                "place": str(directory),
                "in_memory": saved_files.is_in_memory(directory),
                "cap": self._caps[tier],
            }
            for tier, directory in self._dirs.items()
        }
        entries = [
            {
                "name": saved.name,
                "tokens": len(saved.tokens),
                "size": saved.size,
                "tier": saved.tier.value,
                "age": now - saved.last_used,
                "uses": saved.uses,
            }
            for saved in self._entries.values()
        ]
        return {"tiers": tiers, **self._counts, "saved": entries}

    def subscribe(self, listener: Listener, engine: str) -> None:
        """Calls the `listener` of an engine after every change from now on."""
        self._listeners[listener] = engine

    def unsubscribe(self, listener: Listener) -> None:
        """No longer calls `listener`."""
        self._listeners.pop(listener, None)

    # --- What comes in ---------------------------------------------------------------------------

    async def look(self) -> None:
        """Raises StateFileError if the directory is not there; changes nothing in it, and reads no entry."""
        if not await asyncio.to_thread(self.place.host.is_dir):
            raise StateFileError(self.place.host, FileFault.MISSING, "there is no such directory")

    async def rebuild(self) -> None:
        """Reads the directories once; concurrent callers wait. After an error, the next call tries again."""
        task = self._rebuilding
        if task is None or (task.done() and task.exception() is not None):
            task = self._rebuilding = self._tasks.start(self._rebuild())
        await asyncio.shield(task)

    async def _rebuild(self) -> None:
        taken: frozenset[str] = frozenset()
        there: list[Saved] = []
        for tier, directory in self._dirs.items():
            if tier is Tier.DISK:
                with writing(directory):
                    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
            found, held = await asyncio.to_thread(saved_files.scan, directory, tier, self._clock(), taken)
            wanted = self._wanted[tier]
            self._caps[tier] = await asyncio.to_thread(saved_files.capacity, directory, wanted, held)
            taken |= {saved.name for saved in found}
            there += found
        for saved in there:
            self._register(saved)
        excess = self._victims(Tier.DISK, 0) or []
        await _settled([*self._evict(excess), *self._retire(self._victims(Tier.HOST, 0) or [])])

    async def add(
        self,
        name: str,
        key: str,
        salt: str | None,
        *,
        tokens_expected: int | None = None,
        bytes_expected: int | None = None,
        keep_s: float = 0.0,
        owner: str | None = None,
        replaces: bool = True,
    ) -> Saved:
        """Registers the file that the server saved as `name`, and drops the entries with the same tokens. If
        it `replaces` them, shorter entries that it continues go, too.

        An entry that is pinned or in use stays. A file that is not whole, or for which there is no room, is
        removed, and StateFileError raised. The server said how many tokens and bytes to expect. The tenant
        with the digest `owner` retains it for `keep_s` seconds.
        """
        await self.rebuild()
        if saved_files.key_of(name) != key or name in self._entries:
            raise ValueError(f"{name!r} is no new name of key {key!r}")
        path, kept_until = self.place.host / name, self._clock() + keep_s if keep_s > 0 else 0.0
        inspect = partial(saved_files.inspect, path, key, salt, tokens_expected, bytes_expected)
        return await self._tasks.start(self._add(path, inspect, kept_until, owner, replaces))

    async def _add(
        self, path: Path, inspect: Callable[[], Saved], kept_until: float, owner: str | None, replaces: bool
    ) -> Saved:
        try:
            saved = await asyncio.to_thread(inspect)
            saved.created = saved.last_used = self._clock()
            saved.kept_until, saved.kept_for = kept_until, owner
            await asyncio.to_thread(saved_files.write_sidecar, path, saved)
            work = self._take_in(saved, replaces)
        except StateFileError:
            self._counts["refused"] += 1
            await self.discard(path.name)
            raise
        await _settled(work)
        return saved

    def _take_in(self, saved: Saved, replaces: bool) -> list[Work]:
        """Registers a new entry of the host tier; returns the work that makes room for it."""
        replaced = [
            old
            for old in self.entries(saved.key)
            if (replaces or old.count == saved.count) and self._continues(saved, old)
        ]
        victims = self._victims(Tier.HOST, saved.size, replaced)
        if victims is None:
            raise self._no_room(saved)
        saved.uses = sum(old.uses for old in replaced)
        for old in replaced:
            if old.kept_until > saved.kept_until:
                saved.kept_until, saved.kept_for = old.kept_until, old.kept_for
        # Announce it before its predecessors go: content that lies in a file never seems to lie in none.
        self._register(saved)
        return [self._drop(old) for old in replaced] + self._retire(victims)

    def _continues(self, saved: Saved, old: Saved) -> bool:
        return (
            old.salt == saved.salt
            and old.pinned_until <= self._clock()
            and not old.holds
            and old.tokens == saved.tokens[: len(old.tokens)]
        )

    def heir(self, saved: Saved) -> Saved:
        """The entry that took the place of a saved prefix; itself if none has."""
        if self._is_registered(saved):
            return saved
        return next((each for each in self.entries(saved.key) if self._continues(each, saved)), saved)

    def keep(self, saved: Saved, ttl_s: float, owner: str | None) -> None:
        """Retains a saved prefix for `ttl_s` seconds from now."""
        saved.kept_until, saved.kept_for = max(saved.kept_until, self._clock() + ttl_s), owner

    def unpin(self, engine: str) -> None:
        """Ends the pins of an engine."""
        for saved in self._entries.values():
            saved.pins.pop(engine, None)

    async def discard(self, name: str) -> None:
        """Removes a file of the host tier that never became an entry, because its save failed."""
        if name not in self._entries and saved_files.key_of(name) is not None:
            await asyncio.to_thread(saved_files.remove, self.place.host / name)

    # --- What goes out ---------------------------------------------------------------------------

    async def ready(self, saved: Saved) -> str:
        """Verifies a saved prefix before a restore, moves it to the host tier, and returns its file name.
        Raises StateFileError. A file that is damaged or gone was dropped then; any other stays. A name
        that is gone is left alone: another kvpin may have moved its file."""
        await saved.idle()
        self._check_registered(saved)
        saved.work = self._tasks.start(self._ready(saved))
        try:
            await asyncio.shield(saved.work)
        except StateFileError as error:
            if error.reason in (FileFault.DAMAGED, FileFault.MISSING):
                saved.is_gone = error.reason is FileFault.MISSING
                await self.drop(saved)
            elif error.reason is not FileFault.NO_ROOM:
                saved.retry_at = self._clock() + RETRY_S
            raise
        self._check_registered(saved)
        return saved.name

    @asynccontextmanager
    async def using(self, saved: Saved) -> AsyncIterator[str]:
        """`ready`, and the files stay until the block ends, even if the entry is dropped meanwhile."""
        async with self.keeping(saved):
            yield await self.ready(saved)

    @asynccontextmanager
    async def keeping(self, saved: Saved) -> AsyncIterator[None]:
        """Protects a saved prefix from eviction, and keeps its files, until the block ends."""
        saved.holds += 1
        try:
            yield
        finally:
            saved.holds -= 1
            if not self._is_registered(saved):
                await asyncio.shield(self._tasks.start(self._erase(saved)))

    async def _ready(self, saved: Saved) -> None:
        path = self.place.host / saved.name
        if saved.tier is Tier.DISK:
            await self._promote(saved)
        else:
            saved.seen = await asyncio.to_thread(saved_files.verify, path, saved)
        saved.uses += 1
        saved.last_used = self._clock()
        with suppress(StateFileError):  # then the next start counts one use less
            await asyncio.to_thread(saved_files.write_sidecar, path, saved)

    async def _promote(self, saved: Saved) -> None:
        victims = self._victims(Tier.HOST, saved.size)
        if victims is None:
            self._counts["refused"] += 1
            raise self._no_room(saved)
        saved.tier = Tier.HOST
        await _settled(self._retire(victims))
        try:
            saved.seen = await self._move(saved, Tier.DISK, Tier.HOST)
        except StateFileError:
            saved.tier = Tier.DISK
            raise
        self._moved(saved, "promoted")

    async def drop(self, saved: Saved) -> None:
        """Forgets a saved prefix, and deletes its files once no restore uses them."""
        if self._is_registered(saved):
            await asyncio.shield(self._drop(saved))

    def _drop(self, saved: Saved) -> Work:
        self._forget(saved)
        return self._tasks.start(self._erase(saved))

    async def _erase(self, saved: Saved) -> None:
        """Deletes the files of a forgotten entry. While it has holders, the last of them does it."""
        await saved.idle()
        if not saved.holds and not saved.is_gone:
            for directory in self._dirs.values():
                await asyncio.to_thread(saved_files.remove, directory / saved.name)

    # --- Room ------------------------------------------------------------------------------------

    async def make_room(self, size: int) -> bool:
        """Makes room for `size` bytes in the host tier before a save; False if that is impossible."""
        await self.rebuild()
        victims = self._victims(Tier.HOST, size)
        await _settled(self._retire(victims or []))
        return victims is not None

    def _victims(self, tier: Tier, size: int, leaving: Collection[Saved] = ()) -> list[Saved] | None:
        """The entries to evict for `size` more bytes, beside those `leaving`; None if too few may go."""
        staying = [saved for saved in self._entries.values() if saved.tier is tier and saved not in leaving]
        missing = sum(saved.size for saved in staying) + size - self._caps[tier]
        return least_valuable(staying, missing, self._caps[tier], self._clock(), self._value)

    def _value(self, saved: Saved) -> tuple[float, float]:
        return self.rates[saved.key].value(saved, self._clock())

    def _rank(self, saved: Saved) -> tuple[bool, tuple[float, float]]:
        return saved.kept_until > self._clock(), self._value(saved)

    def _retire(self, victims: Iterable[Saved]) -> list[Work]:
        """Moves victims out of the host tier: to disk if they are worth it, otherwise they are evicted."""
        work = []
        for saved in victims:
            worse = self._victims(Tier.DISK, saved.size) if Tier.DISK in self._dirs else None
            if worse is None or (worse and self._rank(worse[-1]) >= self._rank(saved)):
                work += self._evict([saved])
            else:
                saved.tier = Tier.DISK
                saved.work = self._tasks.start(self._demote(saved, self._evict(worse)))
                work.append(saved.work)
        return work

    def _evict(self, victims: Iterable[Saved]) -> list[Work]:
        work = [self._drop(saved) for saved in victims]
        self._counts["evicted"] += len(work)
        return work

    async def _demote(self, saved: Saved, before: list[Work]) -> None:
        await _settled(before)
        try:
            await self._move(saved, Tier.HOST, Tier.DISK)
        except StateFileError as error:
            _log.warning("%s; it is evicted instead of moved to disk", error)
            self._counts["evicted"] += 1
            if self._is_registered(saved):
                self._forget(saved)
            await asyncio.to_thread(saved_files.remove, self.place.host / saved.name)
        else:
            self._moved(saved, "demoted")

    async def _move(self, saved: Saved, source: Tier, target: Tier) -> Stamp:
        paths = self._dirs[source] / saved.name, self._dirs[target] / saved.name
        return await asyncio.to_thread(saved_files.move, *paths, saved)

    def _no_room(self, saved: Saved) -> StateFileError:
        room = f"the host tier of {self._caps[Tier.HOST]} bytes beside pinned entries and those in use"
        detail = f"its {saved.size} bytes do not fit into {room}"
        return StateFileError(self.place.host / saved.name, FileFault.NO_ROOM, detail)

    # --- Books -----------------------------------------------------------------------------------

    def _register(self, saved: Saved) -> None:
        self._entries[saved.name] = saved
        self._tell(SavedEvent.ADDED, saved)

    def _forget(self, saved: Saved) -> None:
        del self._entries[saved.name]
        self._tell(SavedEvent.REMOVED, saved)

    def _moved(self, saved: Saved, count: str) -> None:
        self._counts[count] += 1
        if self._is_registered(saved):
            self._tell(SavedEvent.MOVED, saved)

    def _tell(self, event: SavedEvent, saved: Saved) -> None:
        for listener in tuple(self._listeners):
            listener(event, saved)

    def _is_registered(self, saved: Saved) -> bool:
        return self._entries.get(saved.name) is saved

    def _check_registered(self, saved: Saved) -> None:
        if not self._is_registered(saved):
            raise StateFileError(self.place.host / saved.name, FileFault.MISSING, "it was dropped")


async def _settled(work: Collection[Work]) -> None:
    """Waits until all of `work`, which never fails, is done."""
    if work:
        await asyncio.wait(work)
