"""Background tasks that are never lost: each has a name, a crash is logged, and shutdown ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)


class Supervisor:
    """Owns the background tasks of the process. The only place that creates tasks."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` until it ends; a running task of the same name is cancelled first."""
        self.cancel(name)
        task = asyncio.get_running_loop().create_task(self._guard(name, work), name=name)
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._forget(name, done))

    def cancel(self, name: str) -> None:
        """Ends the task of that name, if it runs."""
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()

    async def stop(self) -> None:
        """Cancels all tasks and waits for them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]

    async def _guard(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            # The one broad except: a bug in background work must be seen, and must not take requests down.
            log.exception("background task crashed", task=name)
