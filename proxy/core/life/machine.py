"""The machine of a request's life: events in, commands out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from math import inf
from typing import Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from proxy.core.life.causes import Blame, Cause
from proxy.core.life.states import (
    Admitted,
    Answered,
    Answering,
    Attempt,
    Began,
    BlameEngine,
    Command,
    End,
    Ended,
    Entered,
    Event,
    Failed,
    Interrupt,
    InTurn,
    Leased,
    Left,
    Lost,
    NoneLeft,
    Place,
    Placed,
    Prepared,
    Run,
    Sent,
    State,
    Tick,
)
from proxy.core.retry_budget import RetryBudget

# Attempts in which the engine died or sent nonsense. A request with this many probably causes it.
MAX_POISON = 2
# Attempts that engines denied. If two do, the request is at fault.
MAX_DENIED = 2
# What an engine's refusal says of it shows when another engine is asked.
_COMPARED = (Blame.UNLESS_ALL, Blame.IF_ANSWERED)
# Seconds that an answer of a lost engine may be silent. An engine that only failed its health check, because
# it is busy, still sends.
SILENCE_S = 5.0
# How often a running answer is checked within the time that it may be silent.
_LOOKS = 4
# The most seconds between two looks at a request.
_MOST_LOOKS_S = 5.0


class Rules(Struct, frozen=True, dict=True):
    """The limits of a request's life, in seconds, and the engines tried after the first.

    Attributes:
        first_byte_s: from placement to the beginning of an answer.
        idle_s: from one piece of an answer to the next.
        total_s: from the head of the request to its end; None without an end.
        queue_s: in the queue.
    """

    first_byte_s: float = 1800.0
    idle_s: float = 600.0
    total_s: float | None = None
    retries: int = 2
    queue_s: float = 60.0

    @cached_property
    def placed_s(self) -> float:
        """From the end of its body, or from a failed attempt, to placement."""
        return self.first_byte_s + self.queue_s

    @cached_property
    def looks_s(self) -> float:
        """The most seconds to the next `Tick`. It exceeds no limit, so that no later state lasts too long."""
        return min(_MOST_LOOKS_S, self.first_byte_s, self.idle_s / _LOOKS)

    @property
    def all_placed_s(self) -> float:
        """From the end of its body to the beginning of an answer, all attempts together."""
        return (self.retries + 1) * (self.placed_s + self.first_byte_s)


_Transition = Callable[[Any, Any, Any, float], tuple[Command, ...]]


class UnexpectedEvent(Exception):
    """An event came that the state does not take: a bug in the caller."""


class Life:
    """One request's life, from its admission to its end.

    Attributes:
        rules: its limits.
    """

    __slots__ = ("_arrived", "_budget", "rules", "state")

    def __init__(
        self, rules: Rules, budget: RetryBudget, arrived: float, admitted: float | None = None
    ) -> None:
        """A life that begins.

        Args:
            rules: see the attribute.
            budget: retries of all requests together.
            arrived: when the request's head came.
            admitted: when it could be read; None for when its head came.
        """
        self.state: State = Admitted(arrived if admitted is None else admitted)
        self.rules, self._budget, self._arrived = rules, budget, arrived

    def take(self, now: float, event: Event) -> tuple[Command, ...]:
        """Takes an event. The last of the commands is the next step; without one, the running step goes on.

        Raises:
            UnexpectedEvent: the state takes no such event.
        """
        transition = self._TRANSITIONS.get((type(self.state), type(event)))
        if transition is None:
            raise UnexpectedEvent(f"a request in the state {type(self.state).__name__} takes no {event!r}")
        return transition(self, self.state, event, now)

    @property
    def deadline(self) -> float:
        """When the state will have lasted too long: never for a WebSocket without limit, and at the end."""
        state, rules = self.state, self.rules
        total = inf if rules.total_s is None else self._arrived + rules.total_s
        match state:
            case Admitted():
                return min(state.since + rules.placed_s, total)
            case InTurn(admitted=admitted):
                return min(admitted.since + rules.placed_s, total)
            case Leased():
                return min(state.since + rules.first_byte_s, total)
            case Answering():
                return min(state.heard + _silent_s(state), total)
            case _:
                return inf

    @property
    def turn(self) -> InTurn | None:
        """The attempt that is on an engine now; None if none is."""
        return _turn_of(self.state) if isinstance(self.state, (Leased, Answering)) else None

    def ended(self, now: float, why: Cause = Cause.BUG) -> Cause:
        """The cause of the end; `why` if the task ends before the machine has decided."""
        if not isinstance(self.state, Ended):
            self.take(now, Left(why))
        assert isinstance(self.state, Ended)  # noqa: S101 - what follows Left
        return self.state.cause

    # --- Transitions ----------------------------------------------------------------------------------

    def _prepared(self, state: Admitted, event: Prepared, _now: float) -> tuple[Command, ...]:
        self.state = replace(state, can_repeat=event.can_repeat)
        return (Place(),)

    def _placed(self, state: Admitted, event: Placed, _now: float) -> tuple[Command, ...]:
        self.state = turn = InTurn(state, event.engine)
        return (Run(turn),)

    def _none_left(self, state: Admitted, _event: NoneLeft, _now: float) -> tuple[Command, ...]:
        attempts = state.attempts
        if not attempts:
            return self._end(Cause.NO_ENGINE)
        all_refused = len(attempts) > 1 and all(each.cause.blame in _COMPARED for each in attempts)
        blames = () if all_refused else _blames(attempts[state.judged :], Blame.UNLESS_ALL)
        return (*blames, *self._end(attempts[-1].cause, attempts[-1].error, attempts))

    def _entered(self, state: InTurn, _event: Entered, now: float) -> tuple[Command, ...]:
        self.state = Leased(state, now)
        return ()

    def _sent(self, state: Leased, _event: Sent, _now: float) -> tuple[Command, ...]:
        self.state = replace(state, is_sent=True)
        return ()

    def _began(self, state: Leased, event: Began, now: float) -> tuple[Command, ...]:
        """Blames the engines that refused what this one answers."""
        idle_s = inf if event.is_socket else self.rules.idle_s
        self.state = Answering(state, idle_s, 0, now)
        admitted = state.turn.admitted
        return _blames(admitted.attempts[admitted.judged :], *_COMPARED) if admitted.attempts else ()

    def _answered(self, _state: State, event: Answered, _now: float) -> tuple[Command, ...]:
        return self._end(Cause.ENGINE_REJECTED if event.is_error else Cause.ANSWERED)

    def _not_placed(self, state: Admitted, event: Failed, _now: float) -> tuple[Command, ...]:
        """Ends a request that is invalid, or would wait too long."""
        return self._end(event.cause, event.error, state.attempts)

    def _attempt_failed(
        self, state: InTurn | Leased | Answering, event: Failed, now: float
    ) -> tuple[Command, ...]:
        """Tries another engine, if that may help. A stream goes on there from what its client has."""
        turn = _turn_of(state)
        attempt = Attempt(event.engine or turn.engine, event.cause, event.error)
        attempts = (*turn.admitted.attempts, attempt)
        is_blamed = event.cause.blame is not Blame.NOBODY and event.cause.blame not in _COMPARED
        blame = (BlameEngine(attempt),) if is_blamed else ()
        judged = turn.admitted.judged if not isinstance(state, Answering) else len(attempts) - 1
        has_begun = event.has_begun or turn.admitted.has_begun
        may_go_on = event.can_go_on or not has_begun
        if not (may_go_on and turn.admitted.can_repeat and self._may_try_again(attempts, now)):
            blames = _blames(attempts[judged:], Blame.UNLESS_ALL)
            return (*blame, *blames, *self._end(event.cause, event.error, attempts))
        self.state = Admitted(now, attempts, has_begun, judged=judged)
        return (*blame, Place(frozenset(each.engine for each in attempts), waits=False))

    def _may_try_again(self, attempts: tuple[Attempt, ...], now: float) -> bool:
        last = attempts[-1].cause
        counted = sum(each.cause is not Cause.ENGINE_LACKS for each in attempts)
        is_late = self.rules.total_s is not None and now >= self._arrived + self.rules.total_s
        if not last.elsewhere or is_late or counted > self.rules.retries:
            return False
        if sum(each.cause.is_poison for each in attempts) >= MAX_POISON:
            return False
        if sum(each.cause is Cause.ENGINE_DENIED for each in attempts) >= MAX_DENIED:
            return False
        # An engine that refuses is busy with others: retries would multiply the load. A lost one is not.
        return last.blame not in _COMPARED or self._budget.take(now)

    def _lost_before(self, _state: Leased, _event: Lost, _now: float) -> tuple[Command, ...]:
        return (Interrupt(Cause.ENGINE_LOST),)

    def _lost_meanwhile(self, state: Answering, event: Lost, now: float) -> tuple[Command, ...]:
        if not state.is_lost:
            self.state = replace(state, seen=event.received, heard=now, is_lost=True)
        return ()

    def _late(self, state: State, _event: Tick, now: float) -> tuple[Command, ...]:
        """Ends a step before the answer, if its time is over."""
        if now < self.deadline:
            return ()
        if not isinstance(state, Leased) or now < state.since + self.rules.first_byte_s:
            return (Interrupt(Cause.OUR_LIMIT),)
        return (Interrupt(Cause.ENGINE_LATE if state.is_sent else Cause.ENGINE_BUSY),)

    def _looked(self, state: Answering, event: Tick, now: float) -> tuple[Command, ...]:
        """Checks a running answer. The engine is silent only while kvpin waits for it, not for the client."""
        if self.rules.total_s is not None and now >= self._arrived + self.rules.total_s:
            return (Interrupt(Cause.OUR_LIMIT),)
        if event.received != state.seen or event.at_client:
            self.state = replace(state, seen=event.received, heard=now, is_lost=False)
        elif now >= state.heard + _silent_s(state):
            return (Interrupt(Cause.ENGINE_LOST if state.is_lost else Cause.ENGINE_SILENT),)
        return ()

    def _left(self, _state: State, event: Left, _now: float) -> tuple[Command, ...]:
        return self._end(event.cause)

    def _end(
        self, cause: Cause, error: Exception | None = None, attempts: tuple[Attempt, ...] = ()
    ) -> tuple[Command, ...]:
        self.state = Ended(cause)
        return (End(cause, error, attempts),)

    _TRANSITIONS: ClassVar[Mapping[tuple[type, type], _Transition]] = {
        (Admitted, Prepared): _prepared,
        (Admitted, Answered): _answered,  # by kvpin itself: the count of a prompt's tokens
        (Admitted, Placed): _placed,
        (Admitted, NoneLeft): _none_left,
        (Admitted, Failed): _not_placed,
        (Admitted, Tick): _late,
        (Admitted, Left): _left,
        (InTurn, Entered): _entered,
        (InTurn, Failed): _attempt_failed,
        (InTurn, Tick): _late,
        (InTurn, Left): _left,
        (Leased, Sent): _sent,
        (Leased, Began): _began,
        (Leased, Answered): _answered,
        (Leased, Failed): _attempt_failed,
        (Leased, Lost): _lost_before,
        (Leased, Tick): _late,
        (Leased, Left): _left,
        (Answering, Answered): _answered,
        (Answering, Failed): _attempt_failed,
        (Answering, Lost): _lost_meanwhile,
        (Answering, Tick): _looked,
        (Answering, Left): _left,
    }


def _blames(attempts: tuple[Attempt, ...], *kinds: Blame) -> tuple[BlameEngine, ...]:
    """What the attempts with a blame of these kinds say about their engines."""
    return tuple(BlameEngine(each) for each in attempts if each.cause.blame in kinds)


def _silent_s(state: Answering) -> float:
    return SILENCE_S if state.is_lost else state.idle_s


def _turn_of(state: InTurn | Leased | Answering) -> InTurn:
    if isinstance(state, InTurn):
        return state
    return state.leased.turn if isinstance(state, Answering) else state.turn
