"""Decides whether an engine that fails requests, or answers nothing, gets more of them.

    closed → FAILURES in a row → open for a while → half-open: one request at a time
           → twice as many after each answer → closed

An engine that fails at once looks idle, so that placement would send it everything. One failure while it is
half-open opens it again, for twice as long.
"""

from __future__ import annotations

# Failures in a row that open it.
FAILURES = 5
# Seconds that it stays open: at first, and at most.
OPEN_S, MAX_OPEN_S = 1.0, 30.0
# It is closed once it has allowed this many unanswered requests.
ENOUGH = 32
# Empty answers in a row, beside others with text, that are no accident.
ODD = 2


class Breaker:
    """The circuit breaker of one engine. An engine that did not fail needs none."""

    __slots__ = ("_allowed", "_failures", "_open_s", "_until")

    def __init__(self) -> None:
        self._failures = 0
        self._allowed = ENOUGH  # unanswered requests, once it is not open
        self._open_s = OPEN_S
        self._until = 0.0

    @property
    def is_closed(self) -> bool:
        """True if it lets all requests through."""
        return self._allowed >= ENOUGH

    def failed(self, now: float) -> bool:
        """A request failed. Returns whether that opened it."""
        self._failures += 1
        if now < self._until or (self.is_closed and self._failures < FAILURES):
            return False
        self._open_s = OPEN_S if self.is_closed else min(2 * self._open_s, MAX_OPEN_S)
        self._until, self._allowed = now + self._open_s, 1
        return True

    def answered(self, now: float) -> None:
        """Counts an answer. Answers to requests from before the breaker opened do not count."""
        if now >= self._until:
            self._failures, self._allowed = 0, min(2 * self._allowed, ENOUGH)

    def allows(self, now: float, unanswered: int) -> bool:
        """True if the engine gets another request, while this many of its requests are unanswered."""
        return self.is_closed or (now >= self._until and unanswered < self._allowed)


class EmptyAnswers:
    """Whether an engine gives empty answers while others of its pool give text. A model may end its answer at
    once; one engine alone that always does so is broken.

    Attributes:
        texts: its answers with text.
        in_a_row: its empty answers since the last one with text.
    """

    __slots__ = ("_fails", "_of_others", "in_a_row", "texts")

    def __init__(self) -> None:
        self.texts = self.in_a_row = self._of_others = 0
        self._fails = False

    @property
    def is_odd(self) -> bool:
        """True if it goes on with that."""
        return self._fails and self.in_a_row >= ODD

    def fails(self, texts_of_others: int) -> bool:
        """It gave an empty answer. True if it counts as a failure: the others, which gave so many answers
        with text so far, gave some of them since its first empty one in a row."""
        self.in_a_row += 1
        if self.in_a_row == 1:
            self._of_others = texts_of_others
        self._fails = texts_of_others > self._of_others
        return self._fails
