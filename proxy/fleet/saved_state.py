"""State that outlives a restart of kvpin: saved now and then and at the end, read and verified at the
start."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import structlog
import xxhash

from engine_adapter import EventPosition, Tier
from proxy.core.audit import Trust
from proxy.core.books import EngineBook, EngineMark
from proxy.core.index.runs import KeptRun
from proxy.core.index.view import EngineView
from proxy.core.quotas import UseBook
from proxy.core.retention import AdminPin, PinBook
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool
from proxy.fleet.state_files import (
    TableFiles,
    UseFile,
    make_directory,
    opened,
    read,
    sealed,
    write,
)
from proxy.prompt import RegisteredTables
from proxy.request.tenants import KeptSalts, Tenants
from proxy.runtime import within

# --- keeps the knowledge of engines' caches over a restart of kvpin -------------------------------------
#     keep     an engine → its memory: plain data, to be written to disk
#     recall   a memory, and an engine with the same process → view, or model, of its cache
#
# An engine with events is the same if it still has the last batch that kvpin read; it then replays the later
# batches. An engine without events is the same if its process is. Any other memory is dropped.

log = structlog.get_logger(__name__)

# Runs that are packed or unpacked in one turn of the event loop, in well below 1 ms.
SLICE_RUNS = 4

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[KeptRun]).decode


class EngineMemory(msgspec.Struct, frozen=True):
    """The knowledge of one engine's cache."""

    engine: str
    model: str
    tokens_per_block: int
    instance: str
    salts: KeptSalts  # the cache salts of each tenant with KV there
    # The place in its events up to which `runs` are right; None without such events.
    position: EventPosition | None = None
    runs: list[msgspec.Raw] = []  # its view, in parts: packed lists of KeptRun
    learned: list[bytes] = []  # the prompts it probably holds, the next to be evicted first: hashes as uint64


async def keep(engine: Engine, pool: Pool) -> EngineMemory | None:
    """The memory of an engine; None if kvpin could not verify it later."""
    view, info = engine.view, engine.info
    position = engine.adapter.event_position() if engine.audit.trust is Trust.PRECISE else None
    if info is None or (position is None and not engine.learned):
        return None
    runs: list[msgspec.Raw] = []
    learned: list[bytes] = []
    salts = engine.salts.kept()
    if view is not None and position is not None:
        # Events that are applied meanwhile are replayed later: applying them twice changes nothing.
        rest = view.runs()
        while part := [run.kept() for run in islice(rest, SLICE_RUNS)]:
            runs.append(msgspec.Raw(_pack(part)))
            await asyncio.sleep(0)
    else:
        learned = [array("Q", stretch).tobytes() for stretch in engine.learned.stretches()]
    return EngineMemory(
        engine.id, pool.model, pool.tokens_per_block, info.instance, salts, position, runs, learned
    )


def take_memory(memories: dict[str, EngineMemory], engine: Engine, pool: Pool) -> EngineMemory | None:
    """Takes the memory of an engine that connects; None if there is none for its model and block size."""
    if (memory := memories.pop(engine.id, None)) is None:
        return None
    then, now = (memory.model, memory.tokens_per_block), (pool.model, pool.tokens_per_block)
    if then == now:
        return memory
    log.warning(
        "state from before the restart is dropped: the engine has another model or block size",
        engine=engine.id,
        before=list(then),
        now=list(now),
    )
    return None


async def recall_view(engine: Engine, view: EngineView, memory: EngineMemory) -> None:
    """Fills the view of an engine that still has the events since the memory."""
    engine.learned.clear()
    engine.salts.restore(memory.salts)
    for part in memory.runs:
        for run in _unpack(part):
            view.restore(run)
        await asyncio.sleep(0)
    log.info("cache view restored from before the restart", engine=engine.id, blocks=view.counts.stored)


def recall_learned(engine: Engine, pool: Pool, memory: EngineMemory) -> None:
    """Fills the model of an engine's cache, if its process is the same."""
    info = engine.info
    if info is None or not (info.names_process and memory.instance == info.instance and memory.learned):
        return
    engine.salts.restore(memory.salts)
    for packed in memory.learned:
        stretch = tuple(array("Q", packed))
        if engine.learned.restore(stretch):
            pool.index.store(engine.id, Tier.GPU, stretch)
    event = "learned cache content restored from before the restart"
    log.info(event, engine=engine.id, blocks=len(engine.learned))


# --- saved state ----------------------------------------------------------------------------------------
# Saves kvpin's state once a minute, when pins or operators' orders about engines change, and when it stops.
# Reads it at the start. The file is `sealed`: every change of its format, or of how blocks are hashed, gets a
# new number.

_HEAD = b"kvpin-state 2\n"


class SavedState(msgspec.Struct, frozen=True):
    """The state of one kvpin."""

    isolated: bool  # there are several tenants, each with a salt of its own
    # The active pins. They expire in Unix time: the clock of a process does not outlive it.
    pins: list[AdminPin]
    engines: list[EngineMemory]
    # What operators have ordered about engines, with the keys of engines that they added.
    marks: list[EngineMark] = msgspec.field(default_factory=list)


def on_other_clock(pin: AdminPin, ahead_s: float) -> AdminPin:
    """The pin on a clock that is ahead of its own."""
    return replace(pin, expires=round(pin.expires + ahead_s, 1))


def encode(state: SavedState) -> bytes:
    """The file's bytes."""
    return sealed(_HEAD, msgspec.msgpack.encode(state))


def decode(data: bytes, *, isolated: bool) -> SavedState:
    """Reads the file's bytes. Raises UnusableFileError if it is damaged, or of another version. Of other
    tenants' state, only the orders are left: they name no salt."""
    state = opened(_HEAD, data, SavedState)
    if state.isolated == isolated:
        return state
    log.warning(
        "the saved state is not used but for orders about engines: there is one tenant now and were several, "
        "or the other way round"
    )
    return SavedState(isolated, [], [], state.marks)


SAVE_S = 60.0
FILE = "state"


class StateSaver:
    """Saves and restores the state. `memories`: those of engines that have not connected since the start, by
    id."""

    def __init__(self, directory: Path, tenants: Tenants, use: UseBook, left: Sequence[Path] = ()) -> None:
        """Reads the snapshot, and the use in directories that workers `left`. If the snapshot cannot be used,
        logs a warning and begins without one. Raises SettingsError if the directory cannot be written."""
        make_directory(directory)
        self._path = directory / FILE
        self._tenants = tenants
        self._before = self._read()
        self._saved = b""  # digest of the file
        self._saving = asyncio.Lock()
        self._wanted = asyncio.Event()
        self.memories = {memory.engine: memory for memory in self._before.engines}
        self.tables = TableFiles(directory / "tables")
        self._use = UseFile(directory, use, left)

    def restore(self, pins: PinBook, tables: RegisteredTables, book: EngineBook) -> None:
        """Gives back the pins, the prompt tables and the orders about engines. From now on, a change of pins
        or orders is saved at once."""
        now = time.time()  # the clock may have been ahead when they were given
        book.merge(
            [msgspec.structs.replace(mark, at=min(mark.at, now)) for mark in self._before.marks], now=now
        )
        book.listeners.append(self._wanted.set)
        ahead_s = time.time() - time.monotonic()
        for kept in self._before.pins:
            pins.add(on_other_clock(kept, -ahead_s))
        pins.listeners.append(self._wanted.set)
        self.tables.load(tables)

    async def run(self, fleet: Fleet, pins: PinBook) -> None:
        """Saves now and then, until it is cancelled."""
        while True:
            await within(SAVE_S, self._wanted.wait())
            self._wanted.clear()
            await self.save(fleet, pins)

    async def save(self, fleet: Fleet, pins: PinBook) -> None:
        """Writes the state, if it has changed. Logs a failure."""
        async with self._saving:
            await self._use.save()
            ahead_s = time.time() - time.monotonic()
            kept = [on_other_clock(pin, ahead_s) for pin in pins.active(time.monotonic())]
            known = [await self._memory(fleet, engine) for engine in list(fleet.engines.values())]
            engines = [memory for memory in known if memory is not None]
            data = encode(SavedState(self._tenants.isolated, kept, engines, fleet.book.marks()))
            if (digest := xxhash.xxh3_128_digest(data)) == self._saved:
                return
            try:
                await asyncio.to_thread(write, self._path, data)
            except OSError as error:
                log.warning(
                    "state is not saved: the next kvpin will know less; check the room in state_dir",
                    file=str(self._path),
                    error=error.strerror,
                )
            else:
                self._saved = digest

    async def _memory(self, fleet: Fleet, engine: Engine) -> EngineMemory | None:
        """The memory of an engine: a new one, or the one from the snapshot until the engine has connected."""
        pool = fleet.pool_of(engine)
        return await keep(engine, pool) if pool is not None else self.memories.get(engine.id)

    def _read(self) -> SavedState:
        isolated = self._tenants.isolated
        try:
            return decode(read(self._path), isolated=isolated)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning(
                "the saved state cannot be used: kvpin begins without it",
                file=str(self._path),
                why=error.strerror or str(error),
            )
        return SavedState(isolated, [], [])
