"""Measures how late the event loop is, and says what blocked it.

While one callback runs, every other request waits. A timer that is due every 50 ms shows for how long. On
demand, a thread looks at the loop's stack while the timer is overdue: names of functions and lines, never
values.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import islice
from traceback import walk_stack
from types import FrameType

import structlog

log = structlog.get_logger(__name__)

INTERVAL_S = 0.05
# A lag that is worth a line in the log.
BLOCKED_S = 0.05
# Between two looks at the stack, and how much is kept of them.
LOOK_S = 0.01
_MOST_LOOKS, _MOST_FRAMES = 5, 8


class LoopLag:
    """Reports the lag of the running loop, in seconds.

    Args:
        observe: called every 50 ms with the timer's delay.
        explain: log what ran whenever the delay is 50 ms or more.
    """

    def __init__(self, observe: Callable[[float], None], *, explain: bool = False) -> None:
        self._observe = observe
        self._explain = explain

    async def run(self) -> None:
        """Measures until cancelled."""
        witness = _Witness(threading.get_ident()) if self._explain else None
        try:
            while True:
                due = time.perf_counter() + INTERVAL_S
                if witness is not None:
                    witness.expect(due)
                await asyncio.sleep(INTERVAL_S)
                lag_s = max(time.perf_counter() - due, 0.0)
                self._observe(lag_s)
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
