"""Background tasks that are never lost: each has a name, a crash is logged, and shutdown ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)

RESTART_S = 1.0


class Supervisor:
    """Owns the background tasks of the process. The only place that creates tasks which outlive
    their caller."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by name
        self._ending: set[asyncio.Task[None]] = set()  # cancelled, not yet over

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` until it ends; a running task of the same name is cancelled first."""
        self.cancel(name)
        task = asyncio.get_running_loop().create_task(self._guard(name, work), name=name)
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._forget(name, done, work))

    def keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `work()`, which has no end of its own, and after a crash again."""
        self.start(name, self._again(name, work))

    def cancel(self, name: str) -> None:
        """Ends the task of that name, if it runs."""
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            self._ending.add(task)

    async def stop(self) -> None:
        """Cancels all tasks and waits for them."""
        for name in list(self._tasks):
            self.cancel(name)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _forget(self, name: str, task: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> None:
        self._ending.discard(task)
        if self._tasks.get(name) is task:
            del self._tasks[name]
        # A task cancelled before its first step never came to await it.
        work.close()

    async def _again(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await self._guard(name, work())
            await asyncio.sleep(RESTART_S)

    async def _guard(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            # The one broad except: a bug in background work must be seen, and must not take requests down.
            log.exception("background task crashed", task=name)
