"""When one engine should compute a prompt for another: rules of routers, on sockets.

kvpin runs over mock engines that take time for prefills, tokens and transfers (`mock_engine.py --nixl`): some
compute prompts for the others. The rules are those of `pairs_sim.py`. Each takes the place of kvpin's own
inside kvpin, so only the rule differs: all choose the two engines by kvpin's costs. Every rule gets the same
requests at the same times, and fresh engines.

    python benchmarks/pairs_live.py [--rates 2,4] [--seconds 60] [--seed 1] [--prefillers 2] [--decoders 2]

Prints a table in Markdown: the time to first token, mean and 99th percentile, in seconds; the share of
requests that were divided; and failures. `pairs_live.py serve RULE …` is `kvpin serve …` under a rule.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
from chaos_pairs import results_of
from harness import ROOT, running
from msgspec.structs import replace
from pairs_sim import RULES, WITHOUT_ROLES, Waiting
from router_client import Answer, play
from router_work import MIXES, Question, make_work

from proxy.cli.main import main as kvpin
from proxy.core.index.blocks import Chain
from proxy.core.placement import placer
from proxy.core.placement.decision import Candidate, Outlook, Placement
from proxy.core.placement.pairs import Prefillers, best_pair, place_with_pairs
from proxy.core.placement.scores import Scores, place

LIVE = [name for name in RULES if name not in WITHOUT_ROLES]
# Engines: tokens a second that they compute and move, and what they hold.
PREFILL_RATE, TRANSFER_RATE, KV_TOKENS = 4000, 40_000, 100_000
# Other routers have no limit for a first leg. Not much longer than kvpin's limit for a first byte.
PATIENCE_S = 60.0
_THREADS = {"OMP_NUM_THREADS": "1"}


Placing = Callable[[Sequence[Candidate], Prefillers | None, Chain, Outlook], Placement]


def serve(rule_name: str, arguments: Sequence[str]) -> None:
    """Runs kvpin under a rule."""
    vars(placer)["place_with_pairs"] = by_rule(rule_name, place_with_pairs)
    sys.argv = ["kvpin", "serve", *arguments]
    kvpin()


def by_rule(rule_name: str, own: Placing) -> Placing:
    """Places requests by a rule; `own` is kvpin's."""
    rule = RULES[rule_name]
    if rule is None:
        return own

    def place_by_rule(
        candidates: Sequence[Candidate], prefillers: Prefillers | None, chain: Chain, outlook: Outlook
    ) -> Placement:
        if prefillers is None:
            return own(candidates, prefillers, chain, outlook)
        decoders = [each for each in candidates if each.engine in prefillers.decoders]
        home = [each for each in decoders if each.is_last]  # it answered the turn before
        if rule_name == "conserve" and home:
            decoders = home
        decode = place(decoders, chain, outlook)
        queued = min(each.load.in_flight for each in prefillers.candidates)
        if not rule(Waiting(chain.n_tokens, decode.uncached_tokens, queued, bool(home))):
            return decode
        chosen = [each for each in decoders if each.engine == decode.engine]
        placement = best_pair(chosen, prefillers, chain, outlook, Scores(chosen, chain, outlook))
        if placement is None or placement.pair is None:
            return decode
        return replace(placement, pair=replace(placement.pair, patience_s=PATIENCE_S))

    return place_by_rule


def run(rule: str, work: Sequence[Question], prefillers: int, decoders: int) -> tuple[list[Answer], float]:
    """The answers under one rule, and the share of requests that were divided."""
    with ExitStack() as stack:
        engines = []
        for number in range(prefillers + decoders):
            role = "prefill" if number < prefillers else "decode"
            flags = ("--nixl", "--prefill-rate", str(PREFILL_RATE), "--transfer-rate", str(TRANSFER_RATE))
            script = str(ROOT / "benchmarks" / "mock_engine.py")
            command = [sys.executable, script, "--kv-tokens", str(KV_TOKENS), *flags]
            environment = {**os.environ, **_THREADS}
            url = stack.enter_context(running(command, environment, "/health", 300, Path(os.devnull)))
            engines.append(f"--engine=vllm={url},id={role}-{number},role={role}")
        command = [sys.executable, __file__, "serve", rule, "--reuse", *engines]
        url = stack.enter_context(running(command, dict(os.environ), "/health/ready", 300, Path(os.devnull)))
        until_ready(url, len(engines))
        answers = asyncio.run(play([url], work, "x-session-id"))
        results = results_of(httpx.get(f"{url}/metrics", timeout=30).text)
        return answers, sum(results.values()) / len(work)


def until_ready(url: str, engines: int) -> None:
    """Waits until kvpin uses this many engines."""
    for _ in range(600):
        states = httpx.get(f"{url}/health/ready", timeout=30).json()["engines"]
        if list(states.values()).count("ready") == engines:
            return
        asyncio.run(asyncio.sleep(0.2))
    raise TimeoutError(f"not all engines are ready: {states}")


def row(rule: str, answers: Sequence[Answer], divided: float) -> str:
    """One row of the table."""
    good = sorted(each.first_token_s for each in answers if each.first_token_s is not None and not each.error)
    failed = sum(bool(each.error) for each in answers)
    late = max(each.sent_late_s for each in answers)
    return (
        f"| {rule} | {statistics.fmean(good):.3f} | {good[int(0.99 * (len(good) - 1))]:.2f} | {divided:.0%} "
        f"| {failed} | {late:.2f} |"
    )


def main() -> None:
    """Runs and prints."""
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="2,4", help="requests a second")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prefillers", type=int, default=2)
    parser.add_argument("--decoders", type=int, default=2)
    parser.add_argument("--rules", default=",".join(LIVE))
    arguments = parser.parse_args()
    for rate in map(float, arguments.rates.split(",")):
        mix, requests = MIXES["a"], round(rate * arguments.seconds)
        work = make_work(dataclasses.replace(mix, requests_per_s=rate), arguments.seed)[:requests]
        print(f"\n{rate:g} requests a second, {len(work)} requests, seed {arguments.seed}\n")
        print("| rule | mean TTFT s | p99 TTFT s | divided | failed | latest sent s |")
        print("|---|---|---|---|---|---|")
        for rule in arguments.rules.split(","):
            answers, divided = run(rule, work, arguments.prefillers, arguments.decoders)
            print(row(rule, answers, divided), flush=True)
            for error in {each.error for each in answers if each.error}:
                print(error, file=sys.stderr)


if __name__ == "__main__":
    main()
