"""One adapter at a time uses a server that takes only one, such as a llama-server: each would believe that
the slots are its own.

An engine that leaves uses its server until its adapter is closed: it saves its slots. An engine that comes to
the same server, under any name, connects after that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.runtime.tasks import Supervisor

log = structlog.get_logger(__name__)

_POLL_S = 0.05


@dataclass(slots=True)
class ServerUse:
    """Knows whose adapters use the servers of the fleet's engines."""

    _fleet: Fleet
    _tasks: Supervisor
    _leaving: set[Engine] = field(default_factory=set)  # the fleet has dropped them, or will
    _held: set[Engine] = field(default_factory=set)
    _is_stopped: bool = False

    def is_held(self, engine: Engine) -> bool:
        """True if an engine waits for its server."""
        return engine in self._held

    def begin(self, engine: Engine, connect: Callable[[], None]) -> None:
        """Calls `connect` once no other adapter uses the server of an engine that takes a single one, unless
        the fleet has dropped the engine by then, or kvpin stops."""
        if self._is_stopped:
            return
        if not (users := self._users(engine)):
            connect()
            return
        if any(user.info is not None for user in users):  # one that has not connected leaves at once
            log.info(
                "engine waits: its server is still in use under another name, or by its old settings",
                engine=engine.id,
                server=engine.adapter.spec.server,
                names=sorted(user.id for user in users),
            )
        for user in users:
            self._fleet.stands_in(engine, user)
        self._held.add(engine)

        async def follow_on() -> None:
            await until(lambda: not (self._fleet.has(engine) and self._users(engine)), math.inf)
            self._held.discard(engine)
            if self._fleet.has(engine) and not self._is_stopped:
                connect()

        self._tasks.start(f"begin {engine.id} {id(engine)}", follow_on())

    def leaves(self, engine: Engine) -> None:
        """An engine leaves. It uses its server until `close` has ended."""
        self._leaving.add(engine)

    async def close(self, engine: Engine) -> None:
        """Closes the adapter of an engine that leaves: its server is free then, also if that raises."""
        self.leaves(engine)
        try:
            await engine.adapter.aclose()
        finally:
            self._leaving.discard(engine)

    async def stop(self, *, within_s: float) -> None:
        """Connects no further engine. Waits until those that leave have closed their adapters, but not
        longer: they save their slots."""
        self._is_stopped = True
        await until(lambda: not self._leaving, within_s)

    def _users(self, engine: Engine) -> list[Engine]:
        """The other engines whose adapters use the server of one that takes a single one."""
        if not engine.adapter.one_owner:
            return []
        spec = engine.adapter.spec
        there = {*self._fleet.engines.values(), *self._leaving} - {engine, *self._held}
        return [each for each in there if each.adapter.spec.is_same(spec)]


async def until(is_so: Callable[[], bool], seconds: float) -> None:
    """Waits until something is so, but not longer."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not is_so() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - a rare wait
        await asyncio.sleep(_POLL_S)
