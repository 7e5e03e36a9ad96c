"""A request that is being served: its life, what its steps have made so far, and its timer.

Each request has one timer. It rings at the phase's deadline, and so often before that no limit can pass
between two rings: a change of phase need not set it. At a ring, `Life.look` tells whether the phase has
lasted too long, and then the timer interrupts the request's task. Engines and monitors take no part in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

import structlog
from msgspec.structs import replace

from engine_adapter import EngineRejected, ModelFailed, log_text
from proxy.core.life import Blame, Cause, FailedAttempt, Life, Phase, RetryBudget, Rules
from proxy.core.placement.decision import Placement
from proxy.errors import cause_of
from proxy.request.calls import Call, Reply
from proxy.request.engine_errors import PASSED_ON, cause_of_error
from proxy.request.gate import Admission
from proxy.request.migration import Passage, SentStream
from proxy.request.records import RequestRecord
from proxy.steps.other_leg import PromptHalf
from proxy.steps.preparation import Ready

log = structlog.get_logger(__name__)

# The least time between two looks, in seconds.
_LEAST_S = 0.01
# Seconds that an interrupted step has to clean up, for example to save a slot. Then it is interrupted again.
CLEAN_UP_S = 60.0


def _no_progress() -> tuple[int, bool]:
    return 0, False


class Request(Life):
    """A request that is being served by the task that makes it."""

    __slots__ = (
        "_cancelled_before", "_cancels", "_handle", "_interrupt", "_task", "admitted", "arrived", "cached",
        "call", "first", "half", "kept", "n_candidates", "passage", "placement", "progress", "ready",
        "record", "reply", "told",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        reply: Reply,
        record: RequestRecord,
        admitted: Admission,
        rules: Rules,
        budget: RetryBudget,
    ) -> None:
        """`call`: the request as it came. `reply`: the way back to its client. `record`: its log entry.
        `admitted`: the permission to serve it: its tenant's quota, and memory for its body. `rules` and
        `budget` are those of its life."""
        # When its head came, or that of the whole of which it is a part.
        self.arrived = record.arrived if admitted.since is None else admitted.since
        super().__init__(rules, budget, self.arrived, monotonic())
        self.call, self.reply, self.record, self.admitted = call, reply, record, admitted
        self.ready: Ready | None = None  # the request for the next attempt
        self.first: Ready | None = None  # the request of the first attempt
        self.placement: Placement | None = None  # the engine it goes to, one of `n_candidates`
        self.half: PromptHalf | None = None  # of that attempt on another engine, if neither can answer alone
        # Reads the running stream for a later engine; None if the stream ends with its engine.
        self.passage: Passage | None = None
        self.told: SentStream | None = None  # what the client has, before another engine goes on with it
        # Prompt tokens that the engine of the running attempt reused, as its headers tell.
        self.cached: int | None = None
        self.n_candidates = self.kept = 0  # kept: bytes of its body, so that another engine can go on
        # Pieces of the running answer that have arrived, and whether kvpin waits for the client.
        self.progress: Callable[[], tuple[int, bool]] = _no_progress
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._cancelled_before = self._task.cancelling() if self._task is not None else 0
        self._handle: asyncio.TimerHandle | None = None
        self._interrupt: Cause | None = None
        self._cancels = 0

    def is_ready(self, ready: Ready) -> None:
        """Notes the prepared request. Drops the client's body if engines get a translated one."""
        self.ready = self.first = ready
        self.call = ready.call

    def cause_for(self, error: Exception) -> Cause:
        """The cause of an attempt that failed with this error."""
        if not isinstance(error, EngineRejected) or isinstance(error, ModelFailed):
            return cause_of(error)
        is_first = len(self.record.attempts) == 1
        cause = cause_of_error(error, self.call, self.n_candidates, is_first=is_first)
        # In the middle of a stream, another engine may still go on, whatever error this one gives.
        goes_on = self.told is not None and not self.reply.complete
        return Cause.ENGINE_REFUSED if goes_on and cause is Cause.ENGINE_REJECTED else cause

    def fails(self, cause: Cause, error: Exception) -> None:
        """The running step failed: another engine is tried, or it is the end. Notes what the client has, for
        the engine that goes on with it."""
        has_begun = self.reply.started
        if has_begun and self.phase is Phase.ANSWERING and cause is not Cause.DIVERGED:
            self.record.interrupted += 1
            self.record.died.append(self.record.attempts[-1])
        if self.reply.complete:  # also with an engine's error: nothing may follow the end
            self.told = None
        elif self.reply.is_events and self.passage is not None:
            self.told = self.passage.told(self.cached)
        self.passage = None
        if self.told is not None and self.first is not None:
            if self.ready is not None and self.first.others:
                same = (self.first, *self.first.others)
                begun = next((each for each in same if each.rendering is self.ready.rendering), self.ready)
                self.first = replace(begun, others=())  # engines with another prompt cannot go on with it
            self.ready = self.first.going_on(self.told)
        error.__traceback__ = None  # it holds frames, and they hold the body
        blamed = None
        if self.half is not None and self.half.is_to_blame(cause):
            blamed = self.half.engine.id
        goes_on = self.told is not None
        self.blame(
            self.failed(monotonic(), cause, error, has_begun=has_begun, can_go_on=goes_on, engine=blamed)
        )

    def blame(self, attempts: Iterable[FailedAttempt]) -> None:
        """Notes what failed attempts say about their engines."""
        engines, route = self.ready.pool.engines if self.ready is not None else {}, self.call.route
        for attempt in attempts:
            engine, error = engines.get(attempt.engine), attempt.error
            if engine is None:  # it has left
                continue
            match attempt.cause.blame:
                case Blame.SUSPECT:
                    engine.suspect(error)
                case Blame.CHECK:
                    engine.check_now.set()
                case Blame.REFUSED | Blame.UNLESS_ALL | Blame.IF_ANSWERED:
                    log.warning("the engine refused a request", engine=engine.id, error=log_text(error))
                    engine.refused(error)
                case Blame.LACKS if route in PASSED_ON:
                    engine.lacks.add(route)

    # --- The timer ------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Sets the timer to its next ring."""
        if self._handle is not None:
            self._handle.cancel()
        wait_s = max(min(self.deadline - monotonic(), self.rules.looks_s), _LEAST_S)
        self._handle = asyncio.get_running_loop().call_later(wait_s, self._ring)

    def engine_lost(self) -> None:
        """Reports soon that the engine was lost: by then, an answer that is just being read has begun, or the
        attempt is over."""
        if self.is_on_engine:
            asyncio.get_running_loop().call_soon(self._engine_lost, len(self.attempts))

    def interrupted(self) -> Cause | None:
        """Why the timer cancelled the request's task; None if its client has left. Sets the timer again."""
        cause, self._interrupt = self._interrupt, None
        cancels, self._cancels = self._cancels, 0
        self.watch()
        if self._task is not None:
            for _ in range(cancels):
                self._task.uncancel()
        return None if self.is_cancelled else cause

    @property
    def is_cancelled(self) -> bool:
        """True if somebody else cancelled the request's task: its client has left, or kvpin stops."""
        others = self._task.cancelling() - self._cancels if self._task is not None else 0
        return others > self._cancelled_before

    def is_late(self) -> bool:
        """True if its engine was lost or too slow: the timer alone cancelled the task, and the client lacks
        some of its answer."""
        return self._interrupt is not None and not self.is_cancelled and not self.reply.complete

    def stop(self) -> None:
        """Ends the timer: the request is over."""
        if self._handle is not None:
            self._handle.cancel()
        self._task = self._handle = None

    def _ring(self) -> None:
        self._handle = None
        if self._interrupt is not None:  # the step still cleans up
            self._cancel()
            return
        received, at_client = self.progress()
        self._carry_out(self.look(monotonic(), received, at_client=at_client))

    def _engine_lost(self, attempt: int) -> None:
        if self._task is not None and self.is_on_engine and len(self.attempts) == attempt:
            self._carry_out(self.lost(monotonic(), self.progress()[0]))

    def _carry_out(self, interrupt: Cause | None) -> None:
        if interrupt is not None and self._interrupt is None:
            self._interrupt = interrupt
            self._cancel()
        if self._task is not None and self._interrupt is None:
            self.watch()

    def _cancel(self) -> None:
        if self._task is None:
            return
        self._cancels += 1
        self._task.cancel()
        if self._handle is not None:
            self._handle.cancel()
        self._handle = asyncio.get_running_loop().call_later(CLEAN_UP_S, self._ring)
