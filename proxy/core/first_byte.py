"""What a request's time to its first byte was spent on, from the moments at which it passed each step.

    read → tokenise → queue → (failed attempts) → place → gather → first leg → hold      measured here
    → prefill, decode                                                                    as the engine reports
    → engine                                                                             the rest

The parts add up to the measured time: what no step and no report accounts for is the engine's part.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Part(StrEnum):
    """A part of the time to the first byte, in the order of the steps."""

    READ = "read"  # receive and parse the body
    TOKENISE = "tokenise"  # render, tokenise, hash
    QUEUE = "queue"  # wait in kvpin because all engines were busy
    FAILED = "failed attempts"  # on engines that failed, and the placements between
    PLACE = "place"  # choose the engine
    GATHER = "gather"  # wait for another request that computes the same prefix
    FIRST_LEG = "first leg"  # another engine computed the prompt, or failed to; a fetch of its KV
    HOLD = "hold"  # the adapter's work: wait for a slot, save, restore
    PREFILL = "prefill"  # by the engine's clock
    DECODE = "decode"  # likewise; only of an answer that came whole
    ENGINE = "engine"  # the rest: the engine's own queue, its other requests, the network


class Moments(msgspec.Struct, frozen=True, kw_only=True):
    """When a request passed each step, in monotonic seconds, and what its engine reports.

    Attributes:
        came: its head was read.
        arrived: its body was read.
        prepared: its prompt was tokenised.
        queued_s: seconds that it waited for busy engines after that.
        placed: it was placed on the engine that answered.
        gathered: no other request computes its prefix any more.
        legs_s: seconds that another engine took to compute its prompt, or to fail, after that; and its own
            engine, to fetch the KV before it got the request.
        sent: it was sent to the engine.
        began: the first byte of the answer came.
        has_failed: other engines had failed before.
        is_whole: the answer is no stream: its first byte came last.
        prefill_s, decode_s: the engine's own timings; None where it reports none.
    """

    came: float
    arrived: float
    prepared: float
    placed: float
    gathered: float
    sent: float
    began: float
    queued_s: float = 0.0
    legs_s: float = 0.0
    has_failed: bool = False
    is_whole: bool = False
    prefill_s: float | None = None
    decode_s: float | None = None


def parts_of(moments: Moments) -> dict[Part, float]:
    """Seconds of each part, which add up to `began - came`. Parts that took no time are left out."""
    between = Part.FAILED if moments.has_failed else Part.PLACE
    decode_s = moments.decode_s if moments.is_whole else None
    measured = {
        Part.READ: moments.arrived - moments.came,
        Part.TOKENISE: moments.prepared - moments.arrived,
        Part.QUEUE: moments.queued_s,
        between: moments.placed - moments.prepared - moments.queued_s,
        Part.GATHER: moments.gathered - moments.placed,
        Part.FIRST_LEG: moments.legs_s,
        Part.HOLD: moments.sent - moments.gathered - moments.legs_s,
        Part.PREFILL: moments.prefill_s or 0.0,
        Part.DECODE: decode_s or 0.0,
    }
    left = moments.began - moments.came
    parts = {}
    for part, seconds in measured.items():
        # The engine has another clock: its report may exceed what was measured here.
        taken = min(max(seconds, 0.0), left)
        if taken > 0:
            parts[part] = taken
            left -= taken
    if left > 0:
        parts[Part.ENGINE] = left
    return parts
