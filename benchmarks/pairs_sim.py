"""When one engine should compute a prompt for another: rules of routers on traces, simulated.

Engines mix prefills and decoding, as vLLM does. All rules choose the two engines by kvpin's costs. Only the
rule that divides a request differs:

    no roles   every engine does both parts
    shared     likewise, and kvpin lets an engine read what another one holds where that costs less
    never      decoders compute all prompts; the prefillers are idle
    always     each request that lacks 64 tokens or more is divided
    threshold  as llm-d: if 512 tokens or more, of 1,024 or more, are not cached on the decoder
    local      as Dynamo: unless fewer than 2,048 tokens, and less than 0.7 of the prompt, are not cached
               there, or every prefiller has more than two prompts
    ppd        as PPD (arXiv 2603.13358): further turns that find most of their prompt on a decoder stay;
               others are divided
    conserve   as ConServe (arXiv 2606.01839): first turns are divided, and further ones go to the decoder
               that answered the turn before
    kvpin      if the pair costs less than any single engine

Prints, for each ratio of prefillers to decoders, load and rate of transfer: the time to first token, mean and
99th percentile; the 99th percentile of the gaps between tokens; the share of requests that were divided. With
several seeds, which move the arrivals a little, these are means over the seeds.

    python benchmarks/pairs_sim.py DIR [--ratios 1:3,2:2] [--loads 0.3,0.6,0.9] [--transfers 50000,400000]
        [--seeds 0] [--limit REQUESTS] [--traces conversation,agentic]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import NamedTuple

from placement_sim import EXCERPTS, TRACES

from engine_adapter.types import Role, Tier
from proxy.core.index.blocks import BlockHash
from proxy.core.placement.decision import Placement
from proxy.core.placement.pairs import MIN_PULL_TOKENS
from proxy.core.placement.placer import PlacedRequest, Placer
from proxy.replay.simulated_engine import EngineModel, Listener, SimEngine
from proxy.replay.simulator import arrivals, fitting, quantile_of, speedup_for_load
from proxy.replay.trace import Trace, TraceRequest, read_trace

MODEL = EngineModel(500_000, chunked=True)
LATENCY_S = 0.005
HANDSHAKE_S = 0.2
# Gaps between tokens are counted in steps of this many seconds.
GAP_STEP_S = 0.001


class Waiting(NamedTuple):
    """Facts that rules decide by: the prompt, tokens that the decoder lacks, prompts that wait at the least
    busy prefiller, and whether a decoder answered an earlier turn."""

    n_tokens: int
    uncached: int
    queued: int
    goes_on: bool


RULES: dict[str, Callable[[Waiting], bool] | None] = {
    "no roles": lambda _: False,
    "shared": None,
    "never": lambda _: False,
    "always": lambda _: True,
    "threshold": lambda at: at.uncached >= 512 and at.n_tokens >= 1024,
    "local": lambda at: not (at.uncached < 2048 and at.uncached < 0.7 * at.n_tokens) and at.queued <= 2,
    "ppd": lambda at: not (at.goes_on and at.uncached < 0.5 * at.n_tokens),
    "conserve": lambda at: not at.goes_on,
    "kvpin": None,
}
WITHOUT_ROLES = ("no roles", "shared")


class Figures(NamedTuple):
    """The outcome of a run, or the means of several; times in seconds."""

    mean_ttft_s: float
    p99_ttft_s: float
    p99_gap_s: float
    divided: float


class PairEngine(SimEngine):
    """An engine that can also get prompts whose KV is there, and counts the gaps between tokens.

    Attributes:
        gaps: gap in milliseconds → tokens.
        pulled: requests whose KV was moved here.
    """

    def __init__(self, position: int, model: EngineModel, tokens_per_block: int, listener: Listener) -> None:
        super().__init__(position, model, tokens_per_block, listener)
        self.gaps = Counter[int]()
        self.pulled = set[int]()

    @property
    def queued(self) -> int:
        """Prompts that wait or are computed."""
        return len(self._waiting) + (self._current is not None)

    def _count(self, now: float) -> None:
        since, streams = now - self._last, len(self._streams)
        if since > 0 and streams:
            computing = self._current is not None and self._restored_at <= self._last
            rate = self._model.rates(streams, prefilling=computing)[1]
            self.gaps[round(1 / rate / GAP_STEP_S)] += round(since * rate * streams * 1000)
        super()._count(now)

    def _start(self, now: float) -> None:
        before = self._current
        super()._start(now)
        if self._current is not None and self._current is not before and self._current.id in self.pulled:
            self._left, self._uncached = 1.0, 0


@dataclass(slots=True)
class Legs:
    """A request that is served.

    Attributes:
        source: the engine that computes its prompt for another; None if none does.
    """

    request: TraceRequest
    at: float
    target: int
    second: PlacedRequest
    decode: Placement
    source: int | None = None
    first: PlacedRequest | None = None
    prefill: Placement | None = None
    moved_at: float = 0.0


@dataclass
class PairRun(Listener):
    """One trace under one rule."""

    prefillers: int
    decoders: int
    rule: str
    transfer_tok_s: float
    tokens_per_block: int
    ttfts: list[float] = field(default_factory=list)
    divided: int = 0

    def __post_init__(self) -> None:
        total = self.prefillers + self.decoders
        self.engines = [PairEngine(at, MODEL, self.tokens_per_block, self) for at in range(total)]
        self.names = [f"e{at}" for at in range(total)]
        self.placer = Placer(self.tokens_per_block)
        for name in self.names:
            self.placer.add(name, gpu_blocks=MODEL.gpu_tokens // self.tokens_per_block)
        shared = self.rule in WITHOUT_ROLES
        self.sources = [] if shared else list(range(self.prefillers))
        self.targets = list(range(0 if shared else self.prefillers, total))
        self.beginnings = frozenset[BlockHash]()
        self.homes = dict[BlockHash, str]()  # last block of a prompt → the engine that answered it
        self.met = set[tuple[int, int]]()
        self.running: dict[int, Legs] = {}
        self.agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self.numbers = count()

    # --- events -----------------------------------------------------------------------------------------

    def play(self, timed: Sequence[tuple[float, TraceRequest]]) -> Figures:
        """Plays all requests, to the last token of the last one."""
        self.beginnings = beginnings([request for _, request in timed])
        for at, request in timed:
            self._at(at, lambda now, request=request: self._arrive(now, request))
        while self.agenda:
            now, _, happens = heappop(self.agenda)
            happens(now)
        gaps = sum((engine.gaps for engine in self.engines), Counter[int]())
        ordered = sorted(self.ttfts)
        return Figures(
            sum(ordered) / len(ordered),
            quantile_of(ordered, 0.99),
            _quantile(gaps, 0.99) * GAP_STEP_S,
            self.divided / len(ordered),
        )

    def _at(self, time: float, happens: Callable[[float], None]) -> None:
        heappush(self.agenda, (time, next(self.numbers), happens))

    def _plan(self, engine: PairEngine) -> None:
        """Plans the engine's next event."""
        due = engine.due

        def advance(now: float) -> None:
            if engine.due == due:
                engine.advance(now)
                self._plan(engine)

        if due < float("inf"):
            self._at(due, advance)

    def _submit(self, now: float, at: int, request: TraceRequest) -> None:
        engine = self.engines[at]
        engine.submit(now, request)
        self._plan(engine)

    def _arrive(self, now: float, request: TraceRequest) -> None:
        chain, placer = request.chain, self.placer
        matches = placer.match(chain)
        last = placer.last_engine(request.session)

        def candidates(of: Sequence[int]) -> list:
            named = [self.names[at] for at in of]
            return [placer.candidate(now, name, matches.get(name), is_last=name == last) for name in named]

        decode, prefill = self._decide(now, request, candidates(self.targets), candidates(self.sources))
        if chain.hashes and chain.hashes[-1] not in self.beginnings:
            self.homes[chain.hashes[-1]] = decode.engine
        part = Role.BOTH if prefill is None else Role.DECODE
        second = placer.begin(now, decode.engine, decode.work, chain, session=request.session, part=part)
        legs = self.running[request.id] = Legs(request, now, self.names.index(decode.engine), second, decode)
        if prefill is None:
            self._submit(now, legs.target, request)
            return
        self.divided += 1
        legs.prefill, legs.source = prefill, self.names.index(prefill.engine)
        legs.first = placer.begin(now, prefill.engine, prefill.work, chain, part=Role.PREFILL)
        self._submit(now, legs.source, TraceRequest(request.id, request.at, chain, 1))

    def _decide(
        self, now: float, request: TraceRequest, targets: list, sources: list
    ) -> tuple[Placement, Placement | None]:
        """The engine that answers the request, and another one that computes its prompt, if there is one."""
        placer, chain, rule = self.placer, request.chain, RULES[self.rule]
        if rule is None:
            named, holders = {each.engine for each in targets}, [] if sources else targets
            placement = placer.place(now, targets, chain, placer.prefillers(now, sources, named, holders))
            pair = placement.pair
            return (placement, None) if pair is None else (pair.decode, pair.prefill)
        home = next((self.homes[each] for each in reversed(chain.hashes) if each in self.homes), None)
        if self.rule == "conserve" and home is not None:
            targets = [each for each in targets if each.engine == home]
        decode = placer.place(now, targets, chain)
        if not sources:
            return decode, None
        queued = min(self.engines[at].queued for at in self.sources)
        divides = decode.uncached_tokens >= MIN_PULL_TOKENS and rule(
            Waiting(request.n_tokens, decode.uncached_tokens, queued, home is not None)
        )
        return decode, placer.place(now, sources, chain) if divides else None

    # --- called by the engines --------------------------------------------------------------------------

    def first_token(self, now: float, engine: int, request: TraceRequest) -> None:
        """A prompt is computed, or its KV has come."""
        legs = self.running[request.id]
        if engine == legs.source and legs.first is not None and legs.prefill is not None:
            self.placer.first_token(now, legs.first)
            self.placer.end(now, legs.first, legs.prefill.uncached_tokens)
            self.placer.settled(legs.first)
            legs.first, legs.moved_at = None, now
            link = engine, legs.target
            handshake_s = 0.0 if link in self.met else HANDSHAKE_S
            self.met.add(link)
            moving_s = LATENCY_S + handshake_s + legs.decode.uncached_tokens / self.transfer_tok_s
            self._at(now + moving_s, lambda then: self._moved(then, legs))
            return
        self.ttfts.append(now - legs.at)
        if legs.source is not None:
            names, pulled = self.names, legs.decode.uncached_tokens
            waited = self.engines[engine].queued > 0
            self.placer.transfers.measured(
                now, names[legs.source], names[engine], 0 if waited else pulled, now - legs.moved_at
            )
        self.placer.first_token(now, legs.second)

    def _moved(self, now: float, legs: Legs) -> None:
        self.engines[legs.target].pulled.add(legs.request.id)
        self._submit(now, legs.target, legs.request)

    def finished(self, now: float, engine: int, request: TraceRequest) -> None:
        """A stream, or a first leg, has ended."""
        legs = self.running[request.id]
        is_whole = legs.source is None or (legs.first is None and legs.moved_at < now)
        if engine == legs.target and is_whole:
            del self.running[request.id]
            self.placer.end(now, legs.second, legs.decode.uncached_tokens)
            self.placer.settled(legs.second)

    def stored(self, engine: int, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """KV events reach the router at once."""
        self.placer.index.store(self.names[engine], tier, tuple(hashes))

    def removed(self, engine: int, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """KV events reach the router at once."""
        self.placer.index.remove(self.names[engine], tier, tuple(hashes))


def beginnings(requests: Sequence[TraceRequest]) -> frozenset[BlockHash]:
    """The blocks on which prompts go on differently: no turn of one conversation ends with them."""
    after: dict[BlockHash, set[BlockHash]] = {}
    for request in requests:
        for block, following in pairwise(request.chain.hashes):
            after.setdefault(block, set()).add(following)
    return frozenset(block for block, following in after.items() if len(following) > 1)


def _quantile(counts: Counter[int], share: float) -> int:
    """The smallest value that `share` of the counted do not exceed."""
    left = share * counts.total()
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return 0


def run(
    trace: Trace,
    ratio: tuple[int, int],
    load: float,
    transfer_tok_s: float,
    rule: str,
    seeds: Sequence[int] = (0,),
) -> Figures:
    """The figures of one rule: means over the seeds."""
    speedup = speedup_for_load(trace, MODEL, sum(ratio), load)
    known = {request.id for request in fitting(trace, MODEL)}
    played = list[Figures]()
    for seed in seeds:
        timed = [each for each in arrivals(trace, speedup, seed) if each[1].id in known]
        played.append(PairRun(*ratio, rule, transfer_tok_s, trace.tokens_per_block).play(timed))
    return Figures(*map(fmean, zip(*played, strict=True)))


def cells(args: argparse.Namespace) -> Iterator[tuple[str, Trace, tuple[int, int], float, float]]:
    """All that is asked for."""
    excerpt = (args.folder / EXCERPTS["agentic"]).exists()
    for name in args.traces.split(","):
        trace = read_trace(args.folder / (EXCERPTS if excerpt else TRACES)[name], limit=args.limit)
        for ratio in args.ratios.split(","):
            prefillers, decoders = map(int, ratio.split(":"))
            for load in map(float, args.loads.split(",")):
                for rate in map(float, args.transfers.split(",")):
                    yield name, trace, (prefillers, decoders), load, rate


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--ratios", default="1:3,2:2")
    parser.add_argument("--loads", default="0.3,0.6,0.9")
    parser.add_argument("--transfers", default="50000,400000")
    parser.add_argument("--traces", default="conversation,agentic")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    print("mean TTFT s / p99 TTFT s / p99 gap ms / divided %\n")
    print("| trace, P:D, load, transfer tok/s | " + " | ".join(RULES) + " |")
    print("|---|" + "---|" * len(RULES))
    seeds, played = [int(seed) for seed in args.seeds.split(",")], list[dict[str, Figures]]()
    for name, trace, ratio, load, rate in cells(args):
        results = {rule: run(trace, ratio, load, rate, rule, seeds) for rule in RULES}
        shown = [
            f"{each.mean_ttft_s:.3f} / {each.p99_ttft_s:.2f} / "
            f"{each.p99_gap_s * 1000:.0f} / {each.divided:.0%}"
            for each in results.values()
        ]
        print(f"| {name} {ratio[0]}:{ratio[1]} {load:g} {rate:g} | " + " | ".join(shown) + " |", flush=True)
        played.append(results)
    summarise(played)


def summarise(played: Sequence[dict[str, Figures]]) -> None:
    """Counts the cells in which kvpin wins. Ties are within 2%."""
    total = len(played)
    with_roles = [rule for rule in RULES if rule not in (*WITHOUT_ROLES, "kvpin")]
    bounded = lowest = both = 0
    for results in played:
        own = results["kvpin"]
        rivals = [results[rule] for rule in with_roles]
        bounded += own.mean_ttft_s <= 1.02 * min(results[each].mean_ttft_s for each in ("always", "never"))
        lowest += own.mean_ttft_s <= 1.02 * min(each.mean_ttft_s for each in rivals)
        # No rule with as short a TTFT has shorter gaps.
        rival = min(rivals, key=lambda each: each.mean_ttft_s)
        is_lowest = own.mean_ttft_s <= 1.02 * rival.mean_ttft_s
        both += is_lowest and own.p99_gap_s <= 1.02 * rival.p99_gap_s
    print(f"\nkvpin's mean TTFT, of {total} cells")
    print(f"- is at most 2% above the better of always and never in {bounded}")
    print(f"- is the lowest of the rules with roles, or at most 2% above it, in {lowest}")
    print(f"- is so with a p99 of gaps at most 2% above that of the rule with the next best TTFT in {both}")
    for rule in RULES:
        ratios = [results["kvpin"].mean_ttft_s / results[rule].mean_ttft_s for results in played]
        print(f"- is {geometric_mean(ratios):.2f} times that of {rule} (geometric mean)")


if __name__ == "__main__":
    main()
