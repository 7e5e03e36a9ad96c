"""Reuse in three steps: what some engine held, what the chosen one held, and what it reported.

    available ≥ selected ≈ delivered      prompt tokens

Available but not selected: another engine held more, and would have cost more. Selected but not delivered:
the prediction missed.
"""

from __future__ import annotations

import msgspec

from proxy.core.placement.decision import Placement
from proxy.fleet.fleet import Fleet
from proxy.request.records import RequestRecord


class ReuseCounts(msgspec.Struct, kw_only=True):
    """Reuse since kvpin started, in prompt tokens of requests whose prompt kvpin knows.

    Attributes:
        prompt_tokens: all of them.
        available_tokens: the most that any eligible engine held of each prompt.
        selected_tokens: what the chosen engine was predicted to reuse.
        delivered_tokens: what it reported to have reused.
        saved_s: seconds of prefill that this saved, by the engine's learned rates; restores are subtracted.
    """

    prompt_tokens: int = 0
    available_tokens: int = 0
    selected_tokens: int = 0
    delivered_tokens: int = 0
    saved_s: float = 0.0

    def plus(self, more: ReuseCounts) -> ReuseCounts:
        """Both together."""
        return ReuseCounts(
            prompt_tokens=self.prompt_tokens + more.prompt_tokens,
            available_tokens=self.available_tokens + more.available_tokens,
            selected_tokens=self.selected_tokens + more.selected_tokens,
            delivered_tokens=self.delivered_tokens + more.delivered_tokens,
            saved_s=self.saved_s + more.saved_s,
        )


def reuse_of(fleet: Fleet, record: RequestRecord, placement: Placement) -> ReuseCounts:
    """The reuse of one request whose prompt is known."""
    return ReuseCounts(
        prompt_tokens=placement.n_tokens,
        available_tokens=available_tokens(placement),
        selected_tokens=placement.predicted_tokens,
        delivered_tokens=record.reported_tokens or 0,
        saved_s=saved_s(fleet, record),
    )


def available_tokens(placement: Placement) -> int:
    """The most of the prompt that any candidate would reuse."""
    return max(placement.predicted_tokens, placement.elsewhere or 0)


def saved_s(fleet: Fleet, record: RequestRecord) -> float:
    """Seconds of prefill that the reported reuse saved; 0 where the engine reported none, or has left."""
    placement, reported = record.placement, record.reported_tokens
    pool = fleet.pools.get(record.served_as or "")
    if placement is None or not reported or pool is None or placement.engine not in pool.placer.books:
        return 0.0
    rates, total = pool.placer.books[placement.engine].rates, placement.n_tokens
    computed = max(total - reported, 0)
    return max(rates.prefill_s(total) - rates.prefill_s(computed) - placement.chosen.restore_s, 0.0)
