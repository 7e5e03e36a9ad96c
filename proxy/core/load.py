"""What each engine is busy with, and how fast it is.

The proxy sees its own requests: a ledger of prompt tokens placed and not yet answered, and of streams
being decoded. Rates are learned from first-token times, as medians, so that one slow request teaches little.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

# Before anything is learned: a small model on a CPU. Only ratios between engines matter at first.
DEFAULT_PREFILL_TOK_S = 4000.0
DEFAULT_RESTORE_TOK_S = 40_000.0
# A running stream takes a share of each step; until decode is measured, about this much of a prefill.
DECODE_INTERFERENCE_S = 0.002
# First-token times of fewer uncached tokens measure round trips, not prefill.
MIN_SAMPLE_TOKENS = 64
WINDOW = 32


@dataclass(frozen=True, slots=True)
class LoadView:
    """An engine's load now: requests in flight, prompt tokens still to compute, streams decoding."""

    in_flight: int
    prefill_tokens: int
    decoding: int


class EngineLedger:
    """In-flight work and learned rates of one engine.

    Attributes:
        served: requests it was given so far.
        prefill_tok_s: prompt tokens it computes per second.
    """

    def __init__(self) -> None:
        self._prefills: dict[int, int] = {}
        self._restores: dict[int, int] = {}
        self._restore_rates: deque[float] = deque(maxlen=WINDOW)
        self._decoding: set[int] = set()
        self._prefill_rates: deque[float] = deque(maxlen=WINDOW)
        self.served = 0
        self.prefill_tok_s = DEFAULT_PREFILL_TOK_S

    @property
    def restore_tok_s(self) -> float:
        """Tokens brought back from lower tiers per second; until some were, ten times the prefill rate or
        more."""
        if self._restore_rates:
            return median(self._restore_rates)
        return max(DEFAULT_RESTORE_TOK_S, 10 * self.prefill_tok_s)

    def begin(self, uncached_tokens: int, restored_tokens: int = 0) -> int:
        """A request was placed on the engine, which has so many of its tokens to compute, and to bring back
        from lower tiers. Returns its ticket: the names clients give may repeat."""
        self.served += 1
        self._prefills[self.served] = uncached_tokens
        self._restores[self.served] = restored_tokens
        return self.served

    def refine(self, ticket: int, uncached_tokens: int, restored_tokens: int) -> None:
        """More is known of a request that was placed than when it began."""
        if ticket in self._prefills:
            self._prefills[ticket] = uncached_tokens
            self._restores[ticket] = restored_tokens

    def first_token(self, ticket: int, seconds: float, *, alone: bool) -> None:
        """Its answer began after `seconds`; `alone` when nothing else ran meanwhile, so that the time is
        the prefill's own, and that of the restore before it."""
        uncached_tokens = self._prefills.pop(ticket, None)
        restored_tokens = self._restores.pop(ticket, 0)
        if uncached_tokens is None:
            return
        self._decoding.add(ticket)
        if not alone or seconds <= 0:
            return
        if restored_tokens >= MIN_SAMPLE_TOKENS:
            # What is left of the time once the rest is computed; never next to none, by a rate that is off.
            restore_s = max(seconds - uncached_tokens / self.prefill_tok_s, seconds / 2)
            self._restore_rates.append(restored_tokens / restore_s)
        elif uncached_tokens >= MIN_SAMPLE_TOKENS:
            self._prefill_rates.append(uncached_tokens / seconds)
            self.prefill_tok_s = median(self._prefill_rates)

    def end(self, ticket: int) -> None:
        """The request is over, in whatever way."""
        self._prefills.pop(ticket, None)
        self._restores.pop(ticket, None)
        self._decoding.discard(ticket)

    def view(self) -> LoadView:
        """The load now."""
        return LoadView(
            in_flight=len(self._prefills) + len(self._decoding),
            prefill_tokens=sum(self._prefills.values()),
            decoding=len(self._decoding),
        )
