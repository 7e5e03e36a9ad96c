"""Bursts with a new prefix in common: kvpin beside placement by load alone.

No engine holds the prefix. Each request adds a question of its own. Engines compute 10,000 tokens a second.
Prints, for each size of the burst, length of the prefix and number of engines: mean and 99th percentile of
the times to first token; engines that the burst went to; requests of the busiest one, by the mean; and the
times over those by load alone. Simulated, kvpin has learned the engines' rates before, and they stand idle
(`--cold`: it has not; `--busy`: they computed prompts until a second before). With `--live`, kvpin with and
without reuse runs before mock vLLMs (`mock_engine.py`), which compute one prompt after the other.

    python benchmarks/placement_bursts.py [--bursts 8,64,200,512] [--prefixes 0,1000,8000] [--engines 2,5,16]
        [--seeds 1,2,3] [--models fifo,chunked] [--gap-ms 1] [--cold | --busy] [--live]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

import httpx
from router_client import play
from router_peers import Engine, running
from router_work import MIXES, Question, answer_ids, text_of, tokenizer, words
from routers import SETTLE_S, engines

from proxy.core.index.blocks import Chain
from proxy.replay.policy import Policy, SimFleet
from proxy.replay.rules import POLICIES
from proxy.replay.simulated_engine import EngineModel
from proxy.replay.simulator import Simulation, quantile_of
from proxy.replay.trace import TraceRequest

BLOCK_TOKENS = 16
PREFILL_TOK_S = 10_000.0
KV_TOKENS = 1_000_000
QUESTION_TOKENS = (50, 250)
ANSWER_TOKENS = (32, 96)
# Prompts before the burst, from which kvpin learns rates.
EARLIER = 160
EARLIER_LIVE = 24
EARLIER_TOKENS = (100, 10_000)
# kvpin, and the same by load alone: simulated, and live.
SIMULATED, LIVE = ("kvpin", "least-loaded"), ("kvpin", "kvpin-off")


class Outcome(NamedTuple):
    """One burst, or the means of several. Times in seconds."""

    mean_s: float
    p99_s: float
    used: float
    busiest: float

    def __str__(self) -> str:
        """As a cell of the table."""
        return f"{self.mean_s:.3f} / {self.p99_s:.3f}, {self.used:.0f}, {self.busiest:.1f}"


class BurstSimulation(Simulation):
    """A simulation that notes the engine of each request."""

    def __init__(self, fleet: SimFleet, policy: Policy) -> None:
        super().__init__(fleet, policy)
        self.engine_of: dict[int, int] = {}

    def started(self, now: float, engine: int, request: TraceRequest, gpu: int, host: int) -> None:
        """See `Listener`."""
        super().started(now, engine, request, gpu, host)
        self.engine_of[request.id] = engine


def outcome(ttfts: Sequence[float], placed: Sequence[object], count: int) -> Outcome:
    """The figures of a burst, which was `placed` on these of `count` engines."""
    ordered, requests = sorted(ttfts), Counter(placed)
    busiest = max(requests.values()) * count / len(placed)
    return Outcome(fmean(ordered), quantile_of(ordered, 0.99), len(requests), busiest)


def simulated(
    policy: str, burst: int, prefix: int, count: int, seed: int, args: argparse.Namespace
) -> Outcome:
    """A burst in the simulator."""
    dice, timed = Random(seed), list[tuple[float, TraceRequest]]()  # noqa: S311 - a simulation

    def add(at: float, shared: int, own: int) -> None:
        number, tokens = len(timed), shared + own
        hashes = list(range(shared // BLOCK_TOKENS))
        hashes += range((number + 1) * 10**6, (number + 1) * 10**6 + tokens // BLOCK_TOKENS - len(hashes))
        chain = Chain(tuple(hashes), tokens, BLOCK_TOKENS)
        timed.append((at, TraceRequest(number, at, chain, dice.randint(*ANSWER_TOKENS))))

    gap_s, rest_s = (1.5 / count, 1.0) if args.busy else (2.0, 30.0)
    before = 0 if args.cold else EARLIER
    for at in range(before):
        add(at * gap_s, 0, dice.randint(*EARLIER_TOKENS))
    for at in range(burst):
        add(before * gap_s + rest_s + at * args.gap_ms / 1000, prefix, dice.randint(*QUESTION_TOKENS))
    model = EngineModel(KV_TOKENS, prefill_tok_s=PREFILL_TOK_S, chunked=args.model == "chunked")
    fleet = SimFleet(count, model, BLOCK_TOKENS)
    simulation = BurstSimulation(fleet, POLICIES[policy](fleet, seed))
    simulation.play(timed, lambda _: None)
    ttfts = [seconds for at, seconds in simulation.ttfts.items() if at >= before]
    return outcome(ttfts, [simulation.engine_of[at] for at in range(before, len(timed))], count)


def live(router: str, burst: int, prefix: int, seed: int, served: Sequence[Engine]) -> Outcome:
    """A burst through kvpin, before engines that have forgotten everything."""
    for engine in served:
        httpx.post(f"{engine.url}/mock/restart").raise_for_status()
    dice = Random(seed)  # noqa: S311 - a simulation
    earlier = [question(dice, at * 0.5, "", dice.randint(*EARLIER_TOKENS)) for at in range(EARLIER_LIVE)]
    shared = text_of(dice.choices(tuple(words()), k=prefix))
    asked = [question(dice, 0.0, shared, dice.randint(*QUESTION_TOKENS)) for _ in range(burst)]
    with tempfile.TemporaryDirectory() as logs, running(router, served, Path(logs) / "log") as (url, _):
        asyncio.run(play([url], earlier, None))
        time.sleep(SETTLE_S)
        answers = asyncio.run(play([url], asked, None))
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {burst} requests failed: {failed[0]}")
    ttfts = [answer.first_token_s for answer in answers if answer.first_token_s is not None]
    return outcome(ttfts, [answer.engine for answer in answers], len(served))


def question(dice: Random, at: float, shared: str, tokens: int) -> Question:
    """A request with so many words of its own behind those it shares."""
    own = text_of(dice.choices(tuple(words()), k=tokens))
    messages = ({"role": "user", "content": shared + own},)
    token_ids = tokenizer().chat(list(messages)).token_ids
    answer = answer_ids(token_ids, dice.randint(*ANSWER_TOKENS))
    return Question(at, "", messages, token_ids, answer)


def show(burst: int, prefix: int, count: int, runs: Sequence[tuple[Outcome, Outcome]]) -> None:
    """A row of the table: both ways to place, over all runs."""
    ours, by_load = (Outcome(*map(fmean, zip(*each, strict=True))) for each in zip(*runs, strict=True))
    ratios = f"{ours.mean_s / by_load.mean_s:.2f} | {ours.p99_s / by_load.p99_s:.2f}"
    print(f"| {burst} | {prefix} | {count} | {ours} | {by_load} | {ratios} |", flush=True)


def show_title(title: str) -> None:
    """The head of a table."""
    print(f"\n{title}: mean / p99 TTFT in s, engines used, busiest ÷ mean\n")
    print("| burst | prefix | engines | kvpin | by load alone | mean ÷ | p99 ÷ |")
    print("|---:|---:|---:|---|---|---:|---:|")


def main() -> None:
    """Plays all bursts and prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, given in (
        ("bursts", "8,64,200,512"), ("prefixes", "0,1000,8000"), ("engines", "2,5,16"), ("seeds", "1,2,3"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", default=given)
    parser.add_argument("--models", default="fifo,chunked")
    parser.add_argument("--gap-ms", type=float, default=1.0, help="from one request to the next, simulated")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--live", action="store_true")
    args = parser.parse_args()
    bursts, prefixes, counts, seeds = (
        [int(each) for each in text.split(",")]
        for text in (args.bursts, args.prefixes, args.engines, args.seeds)
    )
    if args.live:
        show_title("live")
        for count in counts:
            with engines(replace(MIXES["a"], kv_tokens=KV_TOKENS), PREFILL_TOK_S, 15, count) as served:
                for burst, prefix in product(bursts, prefixes):
                    runs = [tuple(live(way, burst, prefix, seed, served) for way in LIVE) for seed in seeds]
                    show(burst, prefix, count, runs)
        return
    for model in args.models.split(","):
        show_title(model)
        args.model = model
        for burst, prefix, count in product(bursts, prefixes, counts):
            runs = [
                tuple(simulated(way, burst, prefix, count, seed, args) for way in SIMULATED) for seed in seeds
            ]
            show(burst, prefix, count, runs)


if __name__ == "__main__":
    main()
