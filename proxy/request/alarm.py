"""Ends a step of a request's life that takes too long.

Each request has one timer. It rings at the state's deadline, and so often before that no limit can pass
between two rings: a change of state need not set it. At a ring, the state machine tells whether the state has
lasted too long, and then the alarm interrupts the request's task. Engines and monitors take no part in this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

from proxy.core.life import Cause, Command, Interrupt, InTurn, Life, Lost, Tick

# The least time between two looks, in seconds.
_LEAST_S = 0.01
# Seconds that an interrupted step has to clean up, for example to save a slot. Then it is interrupted again.
CLEAN_UP_S = 60.0


class Alarm:
    """The timer of one request, whose task makes it.

    Attributes:
        progress: pieces of the running answer that have arrived, and whether kvpin waits for the client.
    """

    __slots__ = ("_cancelled_before", "_cancels", "_cause", "_handle", "_life", "_task", "progress")

    def __init__(self, life: Life) -> None:
        self._life = life
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._cancelled_before = self._task.cancelling() if self._task is not None else 0
        self._handle: asyncio.TimerHandle | None = None
        self._cause: Cause | None = None
        self._cancels = 0
        self.progress: Callable[[], tuple[int, bool]] = lambda: (0, False)

    def set(self) -> None:
        """Sets the timer to its next ring."""
        if self._handle is not None:
            self._handle.cancel()
        wait_s = max(min(self._life.deadline - monotonic(), self._life.rules.looks_s), _LEAST_S)
        self._handle = asyncio.get_running_loop().call_later(wait_s, self._ring)

    def engine_lost(self) -> None:
        """Reports soon that the engine was lost: by then, an answer that is just being read has begun, or the
        attempt is over."""
        asyncio.get_running_loop().call_soon(self._engine_lost, self._life.turn)

    def interrupted(self) -> Cause | None:
        """Why this alarm cancelled the request's task; None if its client has left. Sets the timer again."""
        cause, self._cause = self._cause, None
        cancels, self._cancels = self._cancels, 0
        self.set()
        if self._task is not None:
            for _ in range(cancels):
                self._task.uncancel()
        return None if self.is_cancelled else cause

    @property
    def is_cancelled(self) -> bool:
        """True if somebody else cancelled the request's task: its client has left, or kvpin stops."""
        others = self._task.cancelling() - self._cancels if self._task is not None else 0
        return others > self._cancelled_before

    @property
    def has_interrupted(self) -> bool:
        """True if this alarm alone cancelled the request's task, until `interrupted` says why."""
        return self._cause is not None and not self.is_cancelled

    def stop(self) -> None:
        """The request is over."""
        if self._handle is not None:
            self._handle.cancel()
        self._task = self._handle = None

    def _ring(self) -> None:
        self._handle = None
        if self._cause is not None:  # the step still cleans up
            self._cancel()
            return
        received, at_client = self.progress()
        self._carry_out(self._life.take(monotonic(), Tick(received, at_client)))

    def _engine_lost(self, turn: InTurn | None) -> None:
        if self._task is not None and turn is not None and self._life.turn is turn:
            self._carry_out(self._life.take(monotonic(), Lost(self.progress()[0])))

    def _carry_out(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            if isinstance(command, Interrupt) and self._cause is None:
                self._cause = command.cause
                self._cancel()
        if self._task is not None and self._cause is None:
            self.set()

    def _cancel(self) -> None:
        if self._task is None:
            return
        self._cancels += 1
        self._task.cancel()
        if self._handle is not None:
            self._handle.cancel()
        self._handle = asyncio.get_running_loop().call_later(CLEAN_UP_S, self._ring)
