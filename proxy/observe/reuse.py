"""Reuse in three steps: what some engine held, what the chosen one held, and what it reported.

    available ≥ selected ≈ delivered      prompt tokens

Available but not selected: another engine held more, and would have cost more. Selected but not delivered:
the prediction missed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from proxy.core.placement.decision import Placement
from proxy.fleet.fleet import Fleet
from proxy.request.records import RequestRecord

# Requests of a pool whose reuse waits for its first learned rate; the first ones are dropped.
MAX_WAITING = 1000


class ReuseCounts(msgspec.Struct, kw_only=True):
    """Reuse since kvpin started, in prompt tokens of requests whose prompt kvpin knows.

    Attributes:
        prompt_tokens: all of them.
        available_tokens: the most that any eligible engine held of each prompt.
        selected_tokens: what the chosen engine was predicted to reuse.
        delivered_tokens: what it reported to have reused.
        saved_s: seconds of prefill that this saved, by the engine's learned rates; restores are subtracted. 0
            until a rate is learned; then earlier reuse counts, too.
    """

    prompt_tokens: int = 0
    available_tokens: int = 0
    selected_tokens: int = 0
    delivered_tokens: int = 0
    saved_s: float = 0.0

    def add(self, more: ReuseCounts) -> None:
        """Adds these counts."""
        self.prompt_tokens += more.prompt_tokens
        self.available_tokens += more.available_tokens
        self.selected_tokens += more.selected_tokens
        self.delivered_tokens += more.delivered_tokens
        self.saved_s += more.saved_s


def reuse_of(record: RequestRecord, placement: Placement) -> ReuseCounts:
    """The reuse of one request whose prompt is known, without the seconds that it saved."""
    return ReuseCounts(
        prompt_tokens=placement.n_tokens,
        available_tokens=available_tokens(placement),
        selected_tokens=placement.predicted_tokens,
        delivered_tokens=record.reported_tokens or 0,
    )


def available_tokens(placement: Placement) -> int:
    """The most of the prompt that any candidate would reuse."""
    return max(placement.predicted_tokens, placement.elsewhere or 0)


class _Reused(NamedTuple):
    """A prompt of `total` tokens, of which the engine computed `computed`. `model` is the one that served."""

    model: str
    engine: str
    total: int
    computed: int
    restore_s: float


class SavedPrefill:
    """Values reuse in seconds of prefill. Reuse before the first learned rate of a pool waits for it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._waiting: dict[str, deque[_Reused]] = {}  # by pool

    def observe(self, record: RequestRecord) -> Iterator[tuple[str, str, float]]:
        """Notes the reuse that an engine reported of a finished request. Yields model, engine and seconds of
        all that can be valued now. An engine that has left saves nothing."""
        name, placement, reported = record.served_as or "", record.placement, record.reported_tokens
        pool = self._fleet.pools.get(name)
        if placement is None or pool is None:
            return
        if reported:
            total, restore_s = placement.n_tokens, placement.chosen.restore_s
            reused = _Reused(
                record.lora or name, placement.engine, total, max(total - reported, 0), restore_s
            )
            self._waiting.setdefault(name, deque(maxlen=MAX_WAITING)).append(reused)
        if not pool.placer.rates.learned:
            return
        for each in self._waiting.pop(name, ()):
            book = pool.placer.books.get(each.engine)
            if book is not None:
                spared_s = book.rates.prefill_s(each.total) - book.rates.prefill_s(each.computed)
                yield each.model, each.engine, max(spared_s - each.restore_s, 0.0)
