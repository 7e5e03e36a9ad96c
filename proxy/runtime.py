"""The needs of a long-running process: supervised background tasks, rare garbage collection, the loop's
lag."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from math import inf
from traceback import walk_stack
from types import FrameType
from typing import Any

import structlog

# --- settings of the interpreter with which a busy kvpin does not stall ---------------------------------
# Garbage collection. Python looks for reference cycles in new objects whenever their number has grown by 700,
# and in all objects from time to time. With 64 requests at once, the number goes up and down by thousands.
# Looking cost 100 µs per request, and each look at all objects blocked the loop for 80 ms. A request leaves
# no cycles. So kvpin looks after a growth by 10,000, and never again at what was loaded at start.
#
# The interpreter's lock. A thread that computes keeps the lock for up to 5 ms while the event loop waits, at
# each event anew. With 0.5 ms, the loop serves three times as many events beside such a thread.

_NEW_OBJECTS = 10_000
_SWITCH_S = 0.0005


@contextmanager
def steady() -> Iterator[None]:
    """Runs its block with these settings."""
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(_NEW_OBJECTS, *thresholds[1:])
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(switch_s)


def settle() -> None:
    """Exempts all that was loaded so far from garbage collection. Takes no time."""
    gc.freeze()


# --- background tasks: each has a name, crashes are logged, and shutdown ends all of them ---------------

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


async def within(seconds: float, work: Awaitable[object]) -> None:
    """Awaits something, but not longer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


# --- measures how late the event loop is, and says what blocked it --------------------------------------
# While one callback runs, every other request waits. A timer that is due every 50 ms shows for how long. On
# demand, a thread looks at the loop's stack while the timer is overdue: names of functions and lines, never
# values.

INTERVAL_S = 0.05
BLOCKED_S = 0.05  # a lag that is worth a line in the log
# Between two looks at the stack, and how much is kept of them.
LOOK_S = 0.01
_MOST_LOOKS, _MOST_FRAMES = 5, 8


async def measure_lag(observe: Callable[[float], None], *, explain: bool = False) -> None:
    """Calls `observe` every 50 ms with the running loop's lag, in seconds, until cancelled. `explain`: logs
    what ran whenever the lag is 50 ms or more."""
    witness = _Witness(threading.get_ident()) if explain else None
    try:
        while True:
            due = time.perf_counter() + INTERVAL_S
            if witness is not None:
                witness.expect(due)
            await asyncio.sleep(INTERVAL_S)
            lag_s = max(time.perf_counter() - due, 0.0)
            observe(lag_s)
            if witness is not None and lag_s >= BLOCKED_S:
                witness.report(lag_s)
    finally:
        if witness is not None:
            witness.stop()


class _Witness:
    """Looks at a thread's stack from another thread while the loop is overdue."""

    def __init__(self, thread_id: int) -> None:
        self._thread_id = thread_id
        self._due = float("inf")
        self._stacks: list[str] = []
        self._collecting_s = self._collecting_since = 0.0
        self._ended = threading.Event()
        gc.callbacks.append(self._on_collection)
        threading.Thread(target=self._watch, name="loop-lag", daemon=True).start()

    def expect(self, due: float) -> None:
        """The loop's timer is due then, in seconds of `time.perf_counter`."""
        self._stacks, self._collecting_s, self._due = [], 0.0, due

    def report(self, lag_s: float) -> None:
        """Logs what was seen since `expect`."""
        log.warning(
            "the event loop was blocked: all requests waited",
            blocked_s=round(lag_s, 3),
            garbage_collection_s=round(self._collecting_s, 3),
            running=self._stacks,
        )

    def stop(self) -> None:
        self._ended.set()
        gc.callbacks.remove(self._on_collection)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            stacks = self._stacks
            if time.perf_counter() > self._due + LOOK_S and len(stacks) < _MOST_LOOKS:
                stack = _described(sys._current_frames().get(self._thread_id))  # noqa: SLF001 - documented
                if stack not in stacks:
                    stacks.append(stack)

    def _on_collection(self, phase: str, _info: Mapping[str, int]) -> None:
        if phase == "start":
            self._collecting_since = time.perf_counter()
        else:
            self._collecting_s += time.perf_counter() - self._collecting_since


def _described(frame: FrameType | None) -> str:
    """The innermost calls of a stack, the last one first."""
    calls = []
    for each, line in islice(walk_stack(frame), _MOST_FRAMES if frame is not None else 0):
        file = "/".join(each.f_code.co_filename.rsplit("/", 2)[-2:])
        calls.append(f"{each.f_code.co_qualname} ({file}:{line})")
    return " < ".join(calls)
