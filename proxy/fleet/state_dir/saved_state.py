"""Saves kvpin's state once a minute, when pins or operators' orders about engines change, and when it stops.
Reads it at the start.

Knowledge of an engine counts only after verification, see `proxy/fleet/recall.py`. The file:

first line   names the format; every change of it, or of how blocks are hashed, gets a new number
16 bytes     xxh3_128 of the rest
msgpack      SavedState
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog
import xxhash

from proxy.core.engine_book import EngineBook, EngineMark
from proxy.core.quotas import UseBook
from proxy.core.retention import Pin, PinBook
from proxy.fleet.fleet import Fleet
from proxy.fleet.recall import EngineMemory, Memories, keep
from proxy.fleet.state_dir.files import (
    TableFiles,
    UnusableFileError,
    UseFile,
    make_directory,
    opened,
    read,
    sealed,
    write,
)
from proxy.prompt import PromptTables
from proxy.request.tenants import Tenants

_HEAD = b"kvpin-state 2\n"


class SavedState(msgspec.Struct, frozen=True):
    """The state of one kvpin.

    Attributes:
        isolated: there are several tenants, each with a salt of its own.
        marks: what operators have ordered about engines, with the keys of engines that they added.
        pins: the active pins. They expire in Unix time: the clock of a process does not outlive it.
    """

    isolated: bool
    pins: list[Pin]
    engines: list[EngineMemory]
    marks: list[EngineMark] = msgspec.field(default_factory=list)


def on_other_clock(pin: Pin, ahead_s: float) -> Pin:
    """The pin on a clock that is ahead of its own."""
    return replace(pin, expires=round(pin.expires + ahead_s, 1))


def encode(state: SavedState) -> bytes:
    """The file's bytes."""
    return sealed(_HEAD, msgspec.msgpack.encode(state))


def decode(data: bytes, *, isolated: bool) -> SavedState:
    """Reads the file's bytes. Raises UnusableFileError if it is damaged, of another version, or of other
    tenants."""
    try:
        state = msgspec.msgpack.decode(opened(_HEAD, data), type=SavedState)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableFileError("another version of kvpin wrote it") from error
    if state.isolated != isolated:
        raise UnusableFileError("there is one tenant now and were several, or the other way round")
    return state


log = structlog.get_logger(__name__)

SAVE_S = 60.0
FILE = "state"


class StateSaver:
    """Saves and restores the state.

    Attributes:
        memories: the memories of engines that have not connected since the start.
    """

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
        self.memories = Memories(self._before.engines)
        self.tables = TableFiles(directory / "tables")
        self._use = UseFile(directory, use, left)

    def restore(self, pins: PinBook, tables: PromptTables, book: EngineBook) -> None:
        """Gives back the pins, the prompt tables and the orders about engines. From now on, a change of pins
        or orders is saved at once."""
        now = time.time()  # the clock may have been ahead when they were given
        book.merge(
            [msgspec.structs.replace(mark, at=min(mark.at, now)) for mark in self._before.marks], now=now
        )
        book.listeners.append(lambda _changed: self._wanted.set())
        ahead_s = time.time() - time.monotonic()
        for kept in self._before.pins:
            pins.add(on_other_clock(kept, -ahead_s))
        pins.listeners.append(self._wanted.set)
        self.tables.load(tables)

    async def run(self, fleet: Fleet, pins: PinBook) -> None:
        """Saves now and then, until it is cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SAVE_S):
                    await self._wanted.wait()
            self._wanted.clear()
            await self.save(fleet, pins)

    async def save(self, fleet: Fleet, pins: PinBook) -> None:
        """Writes the state, if it has changed. Logs a failure."""
        async with self._saving:
            await self._use.save()
            ahead_s = time.time() - time.monotonic()
            kept = [on_other_clock(pin, ahead_s) for pin in pins.active(time.monotonic())]
            engines = [memory for each in list(fleet.engines) if (memory := await self._memory(fleet, each))]
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

    async def _memory(self, fleet: Fleet, engine_id: str) -> EngineMemory | None:
        """The memory of an engine: a new one, or the one from the snapshot until the engine has connected."""
        engine = fleet.engines.get(engine_id)
        pool = fleet.pool_of(engine) if engine is not None else None
        if engine is None or pool is None:
            return self.memories.of(engine_id)
        return await keep(engine, pool)

    def _read(self) -> SavedState:
        isolated = self._tenants.isolated
        nothing = SavedState(isolated, [], [])
        try:
            return decode(read(self._path), isolated=isolated)
        except FileNotFoundError:
            return nothing
        except OSError as error:
            why = error.strerror or str(error)
        except UnusableFileError as error:
            why = str(error)
        log.warning(
            "the saved state cannot be used: kvpin begins without it",
            file=str(self._path),
            why=why,
        )
        return nothing
