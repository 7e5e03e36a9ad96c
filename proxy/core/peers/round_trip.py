"""How old the messages of a peer are when they come.

    here ──sent──→ peer ──sent, held_s──→ here: round trip = now - sent - held_s

The clocks of two machines differ, so a message does not show its age. The round trip is an upper bound.
"""

from __future__ import annotations

from collections import deque

from proxy.core.peers.messages import Heard

# What a peer has in flight changes in less than that.
BEHIND_S = 0.5
# One long trip is a busy moment. Several in succession are a delay.
_TRIPS = 2


class RoundTrip:
    """The time from this kvpin to a peer and back, without the time that the peer held the message."""

    def __init__(self) -> None:
        self._heard: tuple[float, float] | None = (
            None  # when the peer sent its times last, and when they came
        )
        self._trips = deque[float](maxlen=_TRIPS)

    def heard(self, now: float, sent: float) -> None:
        """The peer told its time: `sent` by its own clock."""
        self._heard = sent, now

    def answer(self, now: float, peer: int) -> Heard | None:
        """The answer by which the peer measures the round trip; None before it told its time."""
        if self._heard is None:
            return None
        sent, came = self._heard
        return Heard(peer, sent, now - came)

    def measure(self, now: float, heard: Heard) -> None:
        """The peer answered."""
        self._trips.append(now - heard.sent - heard.held_s)

    @property
    def seconds(self) -> float | None:
        """The shortest of the last trips; None before there are enough of them."""
        return min(self._trips) if len(self._trips) == _TRIPS else None

    @property
    def is_behind(self) -> bool:
        """Whether the peer's messages are too old to show its load."""
        return self.seconds is not None and self.seconds > BEHIND_S
