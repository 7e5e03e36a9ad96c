"""What answers say about an engine: whether its predictions are trusted, and whether it gets more requests.

The audit compares predicted with reported cached tokens. An engine is `precise` as long as its events explain
what it reports. After repeated misses it becomes `approximate`, which starts a resync; a rebuilt view makes
it precise again.

The breaker counts failures, and answers that say nothing:

    closed → FAILURES in a row → open for a while → half-open: one request at a time
           → twice as many after each answer → closed

An engine that fails at once looks idle, so that placement would send it everything. One failure while it is
half-open opens it again, for twice as long.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum

import msgspec

WINDOW = 50
# A view is doubted when more than this share of the last WINDOW predictions missed, and at least this many.
MAX_MISS_SHARE = 0.2
MIN_MISSES = 5
MAX_PATIENCE = 40  # a resync without effect doubles the misses before the next one, up to this


class Trust(StrEnum):
    """Degree of trust in the index for an engine."""

    PRECISE = "precise"  # its events are healthy
    APPROXIMATE = "approximate"  # learned from responses, or in doubt


class Unchecked(StrEnum):
    """Why the prediction for a request was not compared with the engine's report."""

    NO_PROMPT = "no prompt"  # its route runs none
    REUSE_OFF = "reuse off"
    FAILED = "failed"  # its answer is an error, or its engine failed
    ENDED_EARLY = "ended early"  # its client left, or it took longer than a limit
    PROMPT_UNKNOWN = "prompt unknown to kvpin"
    NOT_REPORTED = "engine reported nothing"
    TOKENS_DIFFER = "token ids differ"
    NOT_FIRM = "prediction not firm"
    MAY_BE_EVICTED = "evictions ahead of it"  # by requests that its engine had yet to read


@dataclass(frozen=True, slots=True)
class AuditView:
    """Counts since start, the share of recent misses, and the reason for the trust.

    Attributes:
        checked: predictions that were compared with the engine's report; `exact`: those that were right.
        unchecked: attempts that were not checked, by reason. A request that is tried again has several.
        predicted_tokens, reported_tokens: cached tokens of those that were checked.
        cached_tokens: those that the engine reported, of all requests.
    """

    trust: Trust
    why: str
    checked: int
    exact: int
    unchecked: dict[Unchecked, int]
    predicted_tokens: int
    reported_tokens: int
    cached_tokens: int
    recent_miss_share: float


class AuditCounts(msgspec.Struct, array_like=True):
    """Counts of `AuditView`."""

    checked: int = 0
    exact: int = 0
    predicted_tokens: int = 0
    reported_tokens: int = 0
    cached_tokens: int = 0


def is_exact(predicted: int, reported: int, within: int) -> bool:
    """True if a prediction was right. Predictions are in whole blocks of the pool. An engine with smaller
    pages may reuse up to a block more, so a report of less than `within` tokens more than predicted is exact.
    """
    return 0 <= reported - predicted < within


class EngineAudit:
    """Compares the predictions for one engine with its reports."""

    def __init__(self) -> None:
        self.counts, self.unchecked = AuditCounts(), Counter[Unchecked]()  # trust does not depend on them
        self.trust = Trust.APPROXIMATE
        self.why = "no events yet: learning from responses"
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._patience = MIN_MISSES

    def synced(self) -> None:
        """The view is up to date with the engine's events."""
        self.trust, self.why = Trust.PRECISE, "events are healthy"
        self._recent.clear()

    def lost(self, why: str) -> None:
        """The view is empty or stale until the next sync."""
        self.trust, self.why = Trust.APPROXIMATE, why

    def reported(self, cached: int) -> None:
        """The engine reported cached tokens, whether a prediction is compared with them or not."""
        self.counts.cached_tokens += cached

    def skip(self, why: Unchecked) -> None:
        """A request is over, and its prediction is not checked."""
        self.unchecked[why] += 1

    def observe(self, predicted: int, reported: int, *, within: int = 1, evicted_since: bool = False) -> bool:
        """Notes a finished request; both counts in tokens, `within` as in `is_exact`. Returns True if the
        view must be rebuilt now. A miss says nothing about the view if the engine has evicted since the
        prediction (`evicted_since`): the blocks may have been there when they were predicted. Such a miss is
        counted, but lowers no trust."""
        exact = is_exact(predicted, reported, within)
        counts = self.counts
        counts.checked += 1
        counts.exact += exact
        counts.predicted_tokens += predicted
        counts.reported_tokens += reported
        if evicted_since and not exact:
            return False
        self._recent.append(not exact)
        misses = sum(self._recent)
        if misses <= MAX_MISS_SHARE * len(self._recent):
            if len(self._recent) == WINDOW:
                self._patience = MIN_MISSES
            return False
        if self.trust is not Trust.PRECISE or misses < self._patience:
            return False
        self._patience = min(2 * self._patience, MAX_PATIENCE)
        self.lost(f"{misses} of the last {len(self._recent)} predictions missed")
        return True

    def view(self) -> AuditView:
        """The state as data."""
        share = sum(self._recent) / len(self._recent) if self._recent else 0.0
        counts = msgspec.structs.asdict(self.counts)
        return AuditView(
            self.trust, self.why, unchecked=dict(self.unchecked), recent_miss_share=share, **counts
        )


# --- the breaker --------------------------------------------------------------------------------------------


FAILURES = 5  # failures in a row that open it
OPEN_S, MAX_OPEN_S = 1.0, 30.0  # seconds that it stays open: at first, and at most
ENOUGH = 32  # it is closed once it has allowed this many unanswered requests
ODD = 2  # empty answers in a row, beside others with text, that are no accident


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
    once; one engine alone that always does so is broken."""

    __slots__ = ("_fails", "_of_others", "in_a_row", "texts")

    def __init__(self) -> None:
        # `texts`: its answers with text. `in_a_row`: its empty answers since the last one with text.
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
