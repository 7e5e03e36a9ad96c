"""kvpin's own placement: the functions that the proxy runs, with the information that the proxy has.

An ablation leaves one term out of the comparison of candidates. Everything else, ledgers and learned rates
included, follows the full rule for the engine that the ablation chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from engine_adapter.types import Attention, KvGroup
from proxy.core.index.blocks import BlockHash, Chain
from proxy.core.index.match import Match
from proxy.core.placement.decision import Candidate, Placement
from proxy.core.placement.placer import PlacedRequest, Placer
from proxy.core.placement.scores import place
from proxy.replay.policy import PolicyChoice, Seeing, SimFleet
from proxy.replay.simulated_engine import SimEngine
from proxy.replay.trace import TraceRequest


def _without_restore(candidate: Candidate) -> Candidate:
    """Blocks on lower tiers count as on the GPU."""
    match = candidate.match
    if not match.host and not match.disk:
        return candidate
    return replace(candidate, match=Match(match.gpu + match.host + match.disk, pending=match.pending))


# Term → the candidate without it.
_CANDIDATES: Mapping[str, Callable[[Candidate], Candidate]] = {
    "queue": lambda candidate: replace(candidate, load=replace(candidate.load, queue_s=0.0)),
    "room": lambda candidate: replace(candidate, in_use=None),
    "restore": _without_restore,
    "interference": lambda candidate: replace(candidate, load=replace(candidate.load, decoding=0)),
    "lost": lambda candidate: replace(candidate, residents=None, on_gpu=None),
    "later": lambda candidate: replace(candidate, busy=0.0),
    "again": lambda candidate: replace(candidate, match=replace(candidate.match, cut=0)),
}
# Terms that can be left out. `congestion` is the division by 1 - utilisation; `pending` are the blocks that
# requests in flight will leave.
TERMS = (*_CANDIDATES, "congestion", "pending")


class Kvpin(Seeing):
    """The proxy's `Placer` on the simulator's clock."""

    def __init__(self, fleet: SimFleet, seed: int, *, without: str | None = None) -> None:
        """`without` is one of `TERMS`."""
        super().__init__(fleet, seed)
        self._placer = Placer(fleet.tokens_per_block)
        self.index = self._placer.index
        model, size = fleet.model, fleet.tokens_per_block
        self._groups = [
            KvGroup(1 + at, Attention.WINDOW, model.window_tokens) for at in range(model.window_groups)
        ]
        for name in self.names:
            gpu_blocks = model.gpu_tokens // size * (1 + model.window_groups)
            self._placer.add(name, gpu_blocks=gpu_blocks, host_blocks=model.host_tokens // size)
            for group in self._groups:
                self.index.add_group(name, group, size, size)
        self._without = without
        self._alter = _CANDIDATES.get(without or "")
        self._placed: dict[int, tuple[PlacedRequest, int]] = {}  # request → placed, tokens computed

    def choose(self, now: float, request: TraceRequest, engines: Sequence[SimEngine]) -> PolicyChoice:
        """The engine that costs least."""
        placer, chain = self._placer, request.chain
        matches = placer.match(chain)
        last = placer.last_engine(request.session)
        candidates = [
            placer.candidate(now, name, matches.get(name), is_last=name == last) for name in self.names
        ]
        placement = self._place(now, candidates, chain)
        at = self.names.index(placement.engine)
        placed = placer.begin(now, placement.engine, placement.work, chain, session=request.session)
        if self._without == "pending":
            placer.settled(placed)
        self._placed[request.id] = placed, placement.work.computed
        return PolicyChoice(at, placement.predicted_tokens)

    def first_token(self, now: float, engine: int, request: TraceRequest) -> None:
        """Its answer has begun."""
        self._placer.first_token(now, self._placed[request.id][0])

    def finished(self, now: float, engine: int, request: TraceRequest) -> None:
        """Its answer has ended."""
        placed, computed = self._placed.pop(request.id)
        self._placer.end(now, placed, computed)
        if self._without != "pending":
            self._placer.settled(placed)

    def window_stored(self, engine: int, hashes: Sequence[BlockHash]) -> None:
        """Into the index."""
        for group in self._groups:
            self.index.store_group(self.names[engine], group, tuple(hashes))

    def window_removed(self, engine: int, hashes: Sequence[BlockHash]) -> None:
        """Out of the index."""
        for group in self._groups:
            self.index.remove_group(self.names[engine], group, tuple(hashes))

    def _place(self, now: float, candidates: list[Candidate], chain: Chain) -> Placement:
        """The decision. An ablation chooses without its term; the full rule then prices the engine it
        chose."""
        placer = self._placer
        if self._without == "congestion":
            calm = replace(placer.outlook(now), strain=1.0)
            altered = place(candidates, chain, calm)
        elif self._alter is not None:
            altered = placer.place(now, [self._alter(candidate) for candidate in candidates], chain)
        else:
            return placer.place(now, candidates, chain)
        return placer.place(now, [each for each in candidates if each.engine == altered.engine], chain)
