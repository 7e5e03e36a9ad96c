"""A request that is being served, from step to step, and the cause for which a step failed."""

from __future__ import annotations

from dataclasses import dataclass

from engine_adapter import EngineRejected, ModelFailed
from proxy.core.life import Answering, Cause, Failed, Life
from proxy.core.placement.decision import Placement
from proxy.request.alarm import Alarm
from proxy.request.calls import Call, Reply
from proxy.request.error_table import cause_of
from proxy.request.gate import Admission
from proxy.request.migration import Passage
from proxy.request.records import RequestRecord
from proxy.request.retries import cause_of_error
from proxy.request.transcript import SentStream
from proxy.steps.preparation import Ready
from proxy.steps.prompt_half import PromptHalf


@dataclass(slots=True, eq=False)
class Serving:
    """A request that is being served: what the steps of its life have made so far.

    Attributes:
        call: the request as it came.
        reply: the way back to its client.
        record: the request's entry in the log.
        life: the machine that decides what comes next.
        alarm: ends a step that takes too long.
        admitted: the permission to serve it: its tenant's quota, and memory for its body.
        ready: the request for the next attempt; `first`: the request of the first attempt.
        placement: the engine it goes to, one of `n_candidates`.
        half: the half of that attempt on another engine, if neither can answer alone.
        passage: reads the running stream for a later engine; None if the stream ends with its engine.
        cached: prompt tokens that the engine of the running attempt reused, as its headers tell.
        told: what the client has of the answer; None before another engine goes on with it.
        kept: bytes of its body that are kept so that another engine can go on.
    """

    call: Call
    reply: Reply
    record: RequestRecord
    life: Life
    alarm: Alarm
    admitted: Admission
    ready: Ready | None = None
    first: Ready | None = None
    placement: Placement | None = None
    n_candidates: int = 0
    half: PromptHalf | None = None
    passage: Passage | None = None
    cached: int | None = None
    told: SentStream | None = None
    kept: int = 0

    def is_ready(self, ready: Ready) -> None:
        """Notes the prepared request. Drops the client's body if engines get a translated one."""
        self.ready = self.first = ready
        self.call = ready.call

    def failure(self, cause: Cause, error: Exception) -> Failed:
        """The running step failed. Notes what the client has, for the engine that goes on with it."""
        has_begun = self.reply.started
        if has_begun and isinstance(self.life.state, Answering) and cause is not Cause.DIVERGED:
            self.record.interrupted += 1
            self.record.died.append(self.record.attempts[-1])
        if has_begun and self.passage is not None and not self.reply.complete:
            self.told = self.passage.told(self.cached)
        self.passage = None
        if self.told is not None and self.first is not None:
            if self.ready is not None and self.first.others:
                same = (self.first, *self.first.others)
                self.first = next(each for each in same if each.rendering is self.ready.rendering)
            self.ready = self.first.going_on(self.told)
        error.__traceback__ = None  # it holds frames, and they hold the body
        blamed = None
        if self.half is not None and self.half.is_to_blame(cause):
            blamed = self.half.source
        return Failed(cause, error, has_begun, can_go_on=self.told is not None, engine=blamed)


def cause_for(error: Exception, serving: Serving) -> Cause:
    """The cause of an attempt that failed with this error."""
    if not isinstance(error, EngineRejected) or isinstance(error, ModelFailed):
        return cause_of(error)
    is_first = len(serving.record.attempts) == 1
    cause = cause_of_error(error, serving.call, serving.n_candidates, is_first=is_first)
    # In the middle of a stream, another engine may still go on, whatever error this one gives.
    goes_on = serving.told is not None and not serving.reply.complete
    return Cause.ENGINE_REFUSED if goes_on and cause is Cause.ENGINE_REJECTED else cause
