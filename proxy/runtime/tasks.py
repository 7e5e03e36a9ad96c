"""Background tasks: each has a name, crashes are logged, and shutdown ends all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any

import structlog

log = structlog.get_logger(__name__)

RESTART_S = 1.0
_POLL_S = 0.05


class Supervisor:
    """Owns the background tasks of the process. Nothing else creates tasks that outlive their caller."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by name
        self._ending: set[asyncio.Task[None]] = set()  # cancelled, not yet over

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` until it ends. Cancels a running task of the same name first."""
        self.cancel(name)
        task = asyncio.get_running_loop().create_task(self._guard(name, work), name=name)
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._forget(name, done, work))

    def keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `work()`, and runs it again 1 s after it crashes or ends."""
        self.start(name, self._again(name, work))

    def cancel(self, name: str) -> None:
        """Cancels the task of that name, if it runs."""
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            self._ending.add(task)

    async def stop(self) -> None:
        """Cancels all tasks and waits until they have ended."""
        for name in list(self._tasks):
            self.cancel(name)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _forget(self, name: str, task: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> None:
        self._ending.discard(task)
        if self._tasks.get(name) is task:
            del self._tasks[name]
        # A task cancelled before its first step never awaited the coroutine.
        work.close()

    async def _again(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await self._guard(name, work())
            await asyncio.sleep(RESTART_S)

    async def _guard(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            # The only broad except: a bug in background work is logged and must not stop kvpin.
            log.exception("background task crashed: this is a bug in kvpin", task=name)


async def until(is_so: Callable[[], bool], seconds: float = inf) -> None:
    """Waits until something is so, but not longer."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not is_so() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - a rare wait
        await asyncio.sleep(_POLL_S)
