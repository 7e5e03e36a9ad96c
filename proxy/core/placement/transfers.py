"""How long it takes to move KV from one engine to another.

    seconds = handshake, if the two have not met + tokens / rate

The engines of a pool serve the same model, so a token has the same bytes everywhere, and a rate in tokens a
second is one in bytes a second. Each link between two engines has its own, the fastest that was measured
lately: a measurement ends with the first token, so it may contain a wait for the engine's prompts or memory.
Measurements are forgotten, so that a link that was slow for a while is tried again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

# Prior: moving KV is ten times as fast as computing it.
SPEEDUP = 10.0
# Prior: engines that meet for the first time exchange addresses and memory keys.
HANDSHAKE_S = 0.5
# A shorter transfer measures the round trip.
MIN_SAMPLE_TOKENS = 64
# The fastest of this many measurements counts, none older than this.
WINDOW = 16
KEPT_S = 300.0


class TransferResult(StrEnum):
    """What came of a prompt that one engine was to compute for another."""

    MOVED = "moved"  # the other engine answered from it
    FAILED = "failed"  # it was not computed, or not in time: the other engine computed it
    LATE = "late"  # the other engine did not answer while it was surely kept


@dataclass(slots=True)
class _Link:
    """What is known of one link: whether the two have met, and (when, tokens a second)."""

    has_met: bool = False
    _rates: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _fastest: float | None = None

    def measured(self, now: float, rate: float) -> None:
        self._rates.append((now, rate))
        self._fastest = max([each for _, each in self._rates])

    def rate(self, now: float) -> float | None:
        """The fastest; None if nothing was measured lately."""
        rates = self._rates
        if rates and rates[0][0] < now - KEPT_S:
            while rates and rates[0][0] < now - KEPT_S:
                rates.popleft()
            self._fastest = max([each for _, each in rates], default=None)
        return self._fastest


class Transfers:
    """The transfers between the engines of a pool."""

    def __init__(self, prefill_tok_s: Callable[[], float]) -> None:
        """`prefill_tok_s`: tokens that an engine of the pool computes in a second."""
        self._prefill_tok_s = prefill_tok_s
        self._links: dict[tuple[str, str], _Link] = {}
        self._all = _Link()  # a link that is new is as fast as the others were lately

    def seconds(self, now: float, source: str, target: str, tokens: int) -> float:
        """Seconds to move the KV of `tokens` tokens from engine `source` to engine `target`."""
        link = self._links.get((source, target))
        rate = link.rate(now) if link is not None else None
        if rate is None:
            rate = self._all.rate(now) or SPEEDUP * self._prefill_tok_s()
        handshake_s = 0.0 if link is not None and link.has_met else HANDSHAKE_S
        return handshake_s + tokens / rate

    def measured(self, now: float, source: str, target: str, tokens: int, seconds: float) -> None:
        """Moving the KV of `tokens` tokens took `seconds`. The first time tells the handshake, not the
        rate."""
        link = self._links.setdefault((source, target), _Link())
        if link.has_met and tokens >= MIN_SAMPLE_TOKENS and seconds > 0:
            for each in (link, self._all):
                each.measured(now, tokens / seconds)
        link.has_met = True

    def forget(self, engine: str) -> None:
        """The engine is gone: who has its place must be met anew."""
        for link in [each for each in self._links if engine in each]:
            del self._links[link]
