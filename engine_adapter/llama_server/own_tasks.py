"""Tasks that go on if the caller that waits for them is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

_log = logging.getLogger("kvpin.llama_server")
_Result = TypeVar("_Result")


class OwnTasks:
    """The tasks of one owner; `what` they do is for the log. Callers handle `expected` errors. Any other is
    logged, because its caller may have left."""

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
