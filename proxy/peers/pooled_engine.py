"""An engine of this kvpin on which requests of others run."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from proxy.core.peers.follower import LocalEngine
from proxy.core.placement.placer import PlacedRequest, Placer
from proxy.core.placement.whole_answers import Report
from proxy.fleet.engine import Engine
from proxy.fleet.lease import PeerRequest
from proxy.fleet.pool import Pool


@dataclass(frozen=True, slots=True)
class PooledEngine(LocalEngine):
    """An engine of this kvpin on which requests of another one run.

    Attributes:
        hashes_alike: the other kvpin hashes its prompts as this one does. If not, only load is shared.
    """

    pool: Pool
    target: Engine
    hashes_alike: bool

    @property
    @override
    def engine(self) -> str:
        return self.target.id

    @property
    @override
    def placer(self) -> Placer:
        return self.pool.placer

    @property
    @override
    def tokens_per_block(self) -> int | None:
        return self.pool.tokens_per_block if self.hashes_alike else None

    @override
    def begun(self, placed: PlacedRequest) -> None:
        self.target.of_peers[placed.ticket] = PeerRequest(placed)
        self.target.from_peers += 1

    @override
    def answered(self, placed: PlacedRequest) -> None:
        self._forget(placed, has_answer=True)

    @override
    def end(self, placed: PlacedRequest, computed: int | None, report: Report | None) -> None:
        self._forget(placed, has_answer=computed is not None)
        self.pool.end(self.target, placed, computed, report)

    def _forget(self, placed: PlacedRequest, *, has_answer: bool) -> None:
        """Nobody waits for the answer to a request any more."""
        if (request := self.target.of_peers.pop(placed.ticket, None)) is not None:
            request.ends(has_answer=has_answer)
