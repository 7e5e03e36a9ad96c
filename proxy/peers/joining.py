"""When a starting kvpin knows enough from the others to report that it is ready."""

from __future__ import annotations

from collections.abc import Collection

import structlog

from proxy.core.peers.follower import Follower
from proxy.fleet.fleet import Fleet

log = structlog.get_logger(__name__)

# A newcomer waits this long for the others before it says that it is ready.
JOIN_S = 2.0


class Joining:
    """This kvpin's way into the group, and that of others back to it.

    Attributes:
        is_over: this kvpin knows what the others know, or has waited long enough.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.is_over = False
        self._fleet = fleet
        self._is_told = False
        self._missed = set[int]()  # kvpins that were lost: they may hold more when they are back
        self._until: float | None = None

    def wants_contents(self, kvpin: int) -> bool:
        """Whether a kvpin is to tell what engines hold: it was lost and is back, or this one is new, its
        engines are connected, and nobody has told it."""
        is_new = not self.is_over and not self._is_told
        return (is_new or kvpin in self._missed) and self._fleet.is_ready()

    def told_by(self, kvpin: int) -> None:
        """A kvpin has told what engines hold."""
        self._is_told = True
        self._missed.discard(kvpin)

    def missed(self, kvpin: int) -> None:
        """A kvpin is lost."""
        self._missed.add(kvpin)

    def look(self, now: float, others: Collection[Follower], *, is_alone: bool) -> None:
        """Checks whether joining is over. `is_alone`: it is known that there is no other kvpin."""
        if self.is_over or not self._fleet.is_ready():
            return
        if self._until is None:
            self._until = now + JOIN_S
        knows_all = bool(others) and self._is_told and all(other.in_step for other in others)
        if knows_all or is_alone or now > self._until:
            self.is_over = True
            if not (knows_all or is_alone):
                log.warning("ready without knowing what other kvpins do: they did not tell in time")
