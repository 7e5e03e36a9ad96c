"""A request's life, as pure decisions: no await, no I/O, no clock.

    Arrived ──► ADMITTED ──► IN_TURN ──► LEASED ──► ANSWERING ──► ENDED (cause)
    (the gate)   ▲   │                    │            │            ▲
                 │   └─ wrong, too late ──┼────────────┼────────────┤
                 └──── another engine ◄───┴────────────┘            │
                       may still answer            the last one ────┘

The gate (`request/gate.py`) admits a request by its head: its tenant's quota, and memory for its body. From
then on `Life` decides whether to try another engine after a failed attempt, and how long each phase may last.
`flow.py` is the loop that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from math import inf

from msgspec import Struct

from engine_adapter.causes import Blame, Cause

# Attempts in which the engine died or sent nonsense. A request with this many probably causes it.
MAX_POISON = 2
MAX_DENIED = 2  # Attempts that engines denied. If two do, the request is at fault.
# What an engine's refusal says of it shows when another engine is asked.
_COMPARED = (Blame.UNLESS_ALL, Blame.IF_ANSWERED)
# Seconds that an answer of a lost engine may be silent. An engine that only failed its health check, because
# it is busy, still sends.
SILENCE_S = 5.0
_LOOKS = 4  # how often a running answer is checked within the time that it may be silent
_MOST_LOOKS_S = 5.0  # the most seconds between two looks at a request


class Rules(Struct, frozen=True, dict=True):
    """The limits of a request's life, in seconds, and the engines tried after the first."""

    first_byte_s: float = 1800.0  # from placement to the beginning of an answer
    idle_s: float = 600.0  # from one piece of an answer to the next
    total_s: float | None = None  # from the head of the request to its end; None without an end
    retries: int = 2
    queue_s: float = 60.0  # in the queue

    @cached_property
    def placed_s(self) -> float:
        """From the end of its body, or from a failed attempt, to placement."""
        return self.first_byte_s + self.queue_s

    @cached_property
    def looks_s(self) -> float:
        """The most seconds to the next `look`. It exceeds no limit, so that no later phase lasts too long."""
        return min(_MOST_LOOKS_S, self.first_byte_s, self.idle_s / _LOOKS)

    @property
    def all_placed_s(self) -> float:
        """From the end of its body to the beginning of an answer, all attempts together."""
        return (self.retries + 1) * (self.placed_s + self.first_byte_s)


_NONE: frozenset[str] = frozenset()


class Phase(Enum):
    """Where a request is in its life."""

    ADMITTED = "admitted"  # it holds quota and body memory; it is read, placed, and waits for its turn
    IN_TURN = "in turn"  # an engine is free for it; only this phase leads to an engine
    LEASED = "leased"  # it counts as load of its engine, which has not answered yet
    ANSWERING = "answering"  # its answer arrives
    ENDED = "ended"  # it is over, and everything it held was given back


class WrongPhase(Exception):
    """Something happened that the request's phase does not allow: a bug in the caller."""


class FailedAttempt(Struct, frozen=True):
    """An attempt on an engine that failed. `error` is the caller's own."""

    engine: str
    cause: Cause
    error: Exception


class Life:
    """One request's life, from its admission to its end. Each method notes what has happened; it raises
    WrongPhase if that cannot be now. Times are in monotonic seconds."""

    __slots__ = (
        "_arrived", "_budget", "_can_repeat", "_heard", "_idle_s", "_is_lost", "_is_sent", "_judged", "_seen",
        "_since", "attempts", "cause", "engine", "error", "has_begun", "phase", "rules",
    )  # fmt: skip

    def __init__(
        self, rules: Rules, budget: RetryBudget, arrived: float, admitted: float | None = None
    ) -> None:
        """A life that begins. `budget`: retries of all requests together. `arrived`: when the request's head
        came. `admitted`: when it could be read; None for when its head came."""
        self.rules, self._budget, self._arrived = rules, budget, arrived
        self.phase = Phase.ADMITTED  # where it is
        self.engine = ""  # the engine whose turn it is, or that it was last
        self.attempts: tuple[FailedAttempt, ...] = ()  # those that have failed
        self.has_begun = False  # the client has the beginning of an answer from an attempt that failed
        self.cause: Cause | None = None  # why it ended; None before that
        self.error: Exception | None = None  # of the last attempt, if that ended it
        self._since = arrived if admitted is None else admitted  # when the phase began; a turn counts as wait
        self._can_repeat = True  # its body can be sent again
        self._judged = 0  # attempts before an answer began, which showed whose failures they were
        self._is_sent = False
        self._heard, self._idle_s, self._seen, self._is_lost = 0.0, inf, 0, False

    @property
    def deadline(self) -> float:
        """When the phase will have lasted too long: never for a WebSocket without limit, and at the end."""
        rules = self.rules
        match self.phase:
            case Phase.ADMITTED | Phase.IN_TURN:
                at = self._since + rules.placed_s
            case Phase.LEASED:
                at = self._since + rules.first_byte_s
            case Phase.ANSWERING:
                at = self._heard + self._silent_s
            case Phase.ENDED:
                return inf
        return at if rules.total_s is None else min(at, self._arrived + rules.total_s)

    @property
    def is_on_engine(self) -> bool:
        """True while it counts as load of its engine."""
        return self.phase is Phase.LEASED or self.phase is Phase.ANSWERING

    @property
    def tried(self) -> frozenset[str]:
        """The engines that failed: the next attempt is on another one, and does not wait in the queue. One
        that did not get the request is none of them."""
        attempts = self.attempts
        return frozenset([each.engine for each in attempts if not each.cause.again]) if attempts else _NONE

    # --- What happens ---------------------------------------------------------------------------------

    def prepared(self, *, can_repeat: bool = True) -> None:
        """It was read: it can be placed. `can_repeat`: its body can be sent again."""
        if self.phase is not Phase.ADMITTED:
            raise self._wrong_phase()
        self._can_repeat = can_repeat

    def placed(self, engine: str) -> None:
        """It is its turn, on this engine."""
        if self.phase is not Phase.ADMITTED:
            raise self._wrong_phase()
        self.phase, self.engine = Phase.IN_TURN, engine

    def none_left(self) -> Sequence[FailedAttempt]:
        """No engine is left to try: the end. Returns the attempts whose engines are to blame."""
        if self.phase is not Phase.ADMITTED:
            raise self._wrong_phase()
        attempts = self.attempts
        if not attempts:
            self._end(Cause.NO_ENGINE)
            return ()
        self._end(attempts[-1].cause, attempts[-1].error)
        all_refused = len(attempts) > 1 and all(each.cause.blame in _COMPARED for each in attempts)
        return () if all_refused else _blamed(attempts[self._judged :], Blame.UNLESS_ALL)

    def entered(self, now: float) -> None:
        """The engine is leased."""
        if self.phase is not Phase.IN_TURN:
            raise self._wrong_phase()
        self.phase, self._since, self._is_sent = Phase.LEASED, now, False

    def sent(self) -> None:
        """The engine gets the request. Before that, it waits for a slot or for another request's prefix."""
        if self.phase is not Phase.LEASED:
            raise self._wrong_phase()
        self._is_sent = True

    def began(self, now: float, *, is_socket: bool = False) -> Sequence[FailedAttempt]:
        """The answer begins. `is_socket`: as a WebSocket, which may be silent for ever. Returns the attempts
        whose engines refused what this one answers."""
        if self.phase is not Phase.LEASED:
            raise self._wrong_phase()
        self.phase, self._heard, self._seen, self._is_lost = Phase.ANSWERING, now, 0, False
        self._idle_s = inf if is_socket else self.rules.idle_s
        return _blamed(self.attempts[self._judged :], *_COMPARED) if self.attempts else ()

    def answered(self, *, is_error: bool = False) -> None:
        """The answer is complete: the end. `is_error`: it is the engine's own error about the request."""
        if self.phase is Phase.IN_TURN or self.phase is Phase.ENDED:  # kvpin counts a prompt's tokens itself
            raise self._wrong_phase()
        self.phase, self.cause = Phase.ENDED, Cause.ENGINE_REJECTED if is_error else Cause.ANSWERED
        self.error = None

    def failed(
        self,
        now: float,
        cause: Cause,
        error: Exception,
        *,
        has_begun: bool = False,
        can_go_on: bool = False,
        engine: str | None = None,
    ) -> Sequence[FailedAttempt]:
        """What runs has failed. If another engine may help, the request is to be placed again. Else it is the
        end. Returns the attempts whose engines are to blame. `error` is the caller's own. `has_begun`: the
        client has the beginning of an answer. `can_go_on`: another engine can go on with that. `engine`: the
        one that failed, if it is not the one whose turn it is."""
        if self.phase is Phase.ADMITTED:  # it is invalid, or would wait too long
            self._end(cause, error)
            return ()
        if self.phase is Phase.ENDED:
            raise self._wrong_phase()
        attempt = FailedAttempt(engine or self.engine, cause, error)
        self.attempts = attempts = (*self.attempts, attempt)
        is_blamed = cause.blame is not Blame.NOBODY and cause.blame not in _COMPARED
        blamed = (attempt,) if is_blamed else ()
        if self.phase is Phase.ANSWERING:
            self._judged = len(attempts) - 1
        self.has_begun = has_begun or self.has_begun
        may_go_on = can_go_on or not self.has_begun
        if may_go_on and self._can_repeat and self._may_try_again(now):
            self.phase, self._since = Phase.ADMITTED, now
            return blamed
        self._end(cause, error)
        return (*blamed, *_blamed(attempts[self._judged :], Blame.UNLESS_ALL))

    def lost(self, now: float, received: int = 0) -> Cause | None:
        """The leased engine was lost. Returns why the attempt is to be interrupted; None if its answer may
        still go on. `received`: pieces of the answer that have arrived."""
        if self.phase is Phase.LEASED:
            return Cause.ENGINE_LOST
        if self.phase is not Phase.ANSWERING:
            raise self._wrong_phase()
        if not self._is_lost:
            self._seen, self._heard, self._is_lost = received, now, True
        return None

    def look(self, now: float, received: int = 0, *, at_client: bool = False) -> Cause | None:
        """Looks how long the phase lasts. Returns why what runs is to be interrupted; None if it may go on.
        `received`: pieces of the answer that have arrived. `at_client`: kvpin waits for the client to take
        more: an engine is silent only while kvpin waits for it."""
        if self.phase is Phase.ENDED:
            raise self._wrong_phase()
        rules = self.rules
        if self.phase is Phase.ANSWERING:
            if rules.total_s is not None and now >= self._arrived + rules.total_s:
                return Cause.OUR_LIMIT
            if received != self._seen or at_client:
                self._seen, self._heard, self._is_lost = received, now, False
                return None
            is_silent = now >= self._heard + self._silent_s
            return (Cause.ENGINE_LOST if self._is_lost else Cause.ENGINE_SILENT) if is_silent else None
        if now < self.deadline:
            return None
        if self.phase is not Phase.LEASED or now < self._since + rules.first_byte_s:
            return Cause.OUR_LIMIT
        return Cause.ENGINE_LATE if self._is_sent else Cause.ENGINE_BUSY

    def ended(self, why: Cause = Cause.BUG) -> Cause:
        """The cause of the end; `why` if nothing else has ended it: the client left, or kvpin stops."""
        if self.cause is None:
            self._end(why)
        assert self.cause is not None  # noqa: S101 - `_end` sets it
        return self.cause

    # --- Decisions ------------------------------------------------------------------------------------

    @property
    def _silent_s(self) -> float:
        return SILENCE_S if self._is_lost else self._idle_s

    def _may_try_again(self, now: float) -> bool:
        attempts, rules = self.attempts, self.rules
        last = attempts[-1].cause
        counted = sum(each.cause is not Cause.ENGINE_LACKS for each in attempts)
        is_late = rules.total_s is not None and now >= self._arrived + rules.total_s
        if not last.elsewhere or is_late or counted > rules.retries:
            return False
        if sum(each.cause.is_poison for each in attempts) >= MAX_POISON:
            return False
        if sum(each.cause is Cause.ENGINE_DENIED for each in attempts) >= MAX_DENIED:
            return False
        # An engine that refuses is busy with others: retries would multiply the load. A lost one is not.
        return last.blame not in _COMPARED or self._budget.take(now)

    def _wrong_phase(self) -> WrongPhase:
        return WrongPhase(f"this cannot be while a request is {self.phase.value}")

    def _end(self, cause: Cause, error: Exception | None = None) -> None:
        self.phase, self.cause, self.error = Phase.ENDED, cause, error


def _blamed(attempts: Sequence[FailedAttempt], *kinds: Blame) -> tuple[FailedAttempt, ...]:
    return tuple(each for each in attempts if each.cause.blame in kinds)


# --- retries of all requests --------------------------------------------------------------------------------


RETRY_SHARE = 0.2  # retries that each request adds: a fifth of the load
# Retries that are always there for a few requests at a time, and what is added in each second.
RETRY_FLOOR, RETRIES_PER_S = 10.0, 1.0
MOST_RETRIES = 100.0  # most that is saved up


class RetryBudget:
    """The number of retries that are left."""

    __slots__ = ("_at", "_left")

    def __init__(self) -> None:
        self._left, self._at = RETRY_FLOOR, 0.0

    def requested(self) -> None:
        """A request has come."""
        if self._left < MOST_RETRIES:
            self._left += RETRY_SHARE

    def take(self, now: float) -> bool:
        """Takes a retry, if one is left."""
        if self._left < RETRY_FLOOR:
            self._left = min(self._left + (now - self._at) * RETRIES_PER_S, RETRY_FLOOR)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
