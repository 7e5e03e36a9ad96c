"""An engine of this kvpin on which requests of others run: a `LocalEngine`."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.placement.answers import Report
from proxy.core.placement.placer import PlacedRequest, Placer
from proxy.fleet.engine import Engine
from proxy.fleet.lease import PeerRequest
from proxy.fleet.pool import Pool


@dataclass(frozen=True, slots=True)
class PooledEngine:
    """See the module.

    Attributes:
        hashes_alike: the other kvpin hashes its prompts as this one does. If not, only load is shared.
    """

    pool: Pool
    target: Engine
    hashes_alike: bool

    @property
    def engine(self) -> str:
        """See LocalEngine."""
        return self.target.id

    @property
    def placer(self) -> Placer:
        """See LocalEngine."""
        return self.pool.placer

    @property
    def tokens_per_block(self) -> int | None:
        """See LocalEngine."""
        return self.pool.tokens_per_block if self.hashes_alike else None

    def begun(self, placed: PlacedRequest) -> None:
        """See LocalEngine."""
        self.target.of_peers[placed.ticket] = PeerRequest(placed)
        self.target.from_peers += 1

    def answered(self, placed: PlacedRequest) -> None:
        """See LocalEngine."""
        self._forget(placed, has_answer=True)

    def end(self, placed: PlacedRequest, computed: int | None, report: Report | None) -> None:
        """See LocalEngine."""
        self._forget(placed, has_answer=computed is not None)
        self.pool.end(self.target, placed, computed, report)

    def _forget(self, placed: PlacedRequest, *, has_answer: bool) -> None:
        """Nobody waits for the answer to a request any more."""
        if (request := self.target.of_peers.pop(placed.ticket, None)) is not None:
            request.ends(has_answer=has_answer)
