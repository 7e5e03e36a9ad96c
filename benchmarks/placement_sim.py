"""Placement policies on real traces, simulated: hits and times to first token, cell by cell.

Two traces, 4, 8 and 16 engines of 0.5M tokens, GPU only and with a host tier of four times that, at loads of
0.6, 0.9 and 1.1 of the engines' compute if nothing were cached; then kvpin with each term of its rule left
out. With --window-groups N, engines serve a hybrid model in the same memory: N layers with a sliding window
of 1,024 tokens for each layer of full attention, on the GPU only. The other routers see full attention
alone. Prints markdown. The traces are Mooncake's conversation trace and the agentic one, by these names in
DIR; tests/data/traces has excerpts of both.

    python benchmarks/placement_sim.py DIR [--loads 0.9] [--seeds 0,1,2] [--jobs 1] [--only peers|ablations]
        [--window-groups 3] [--policies all] [--engines 4,8,16] [--gpu-tokens 500000] [--limit REQUESTS]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybrid_cache import HybridModel
from other_routers import ABLATIONS

from proxy.replay.plan import ReplayPlan
from proxy.replay.report import over_seeds, rows
from proxy.replay.rules import ORACLE, POLICIES, resolve
from proxy.replay.simulated_engine import EngineModel
from proxy.replay.simulator import run_all
from proxy.replay.trace import Trace, TraceError, read_trace

TRACES = {
    "conversation": "mooncake_conversation_trace.jsonl.gz",
    "agentic": "kvct_openloop_512.jsonl.gz",
}
EXCERPTS = {"conversation": "conversation.jsonl.gz", "agentic": "agents.jsonl.gz"}
ENGINES = (4, 8, 16)
GPU_TOKENS = 500_000
HOST_TOKENS = {"GPU only": 0, "host tier": 4}  # times those on the GPU

Row = dict[str, Any]

PEERS = resolve(["all"])
POLICIES |= ABLATIONS  # here, where the processes that simulate find them, too


@dataclass(frozen=True)
class Block:
    """One trace, one kind of engine, one load: the rows of every policy and number of engines."""

    trace: str
    tier: str
    load: float
    rows: dict[tuple[str, int], Row]  # by policy and engines

    @property
    def engines(self) -> list[int]:
        """Numbers of engines, in the order they were asked for."""
        return list(dict.fromkeys(engines for _, engines in self.rows))

    @property
    def policies(self) -> list[str]:
        """In the order they were asked for."""
        return list(dict.fromkeys(policy for policy, _ in self.rows))

    def best(self, figure: str, engines: int, *, lowest: bool, without: Sequence[str] = (ORACLE,)) -> float:
        """The best value of a figure among the policies."""
        values = [
            row[figure]
            for (policy, count), row in self.rows.items()
            if count == engines and policy not in without and row[figure] is not None
        ]
        return min(values) if lowest else max(values)


def play(
    traces: dict[str, Trace],
    loads: Sequence[float],
    policies: Sequence[str],
    seeds: Sequence[int],
    args: argparse.Namespace,
) -> Iterator[Block]:
    """Runs everything."""
    tiers = {f"window layers {args.window_groups} : 1": 0} if args.window_groups else HOST_TOKENS
    for load in loads:
        for name, trace in traces.items():
            for tier, times in tiers.items():
                model = EngineModel(args.gpu_tokens, times * args.gpu_tokens, chunked=args.model == "chunked")
                if args.window_groups:
                    model = HybridModel(**asdict(model), window_groups=args.window_groups)
                plan = ReplayPlan((model,), args.engines, policies, seeds, load=load)
                began = time.monotonic()
                outcomes = run_all(trace, plan.runs(trace), jobs=args.jobs)
                merged = {(row["policy"], row["engines"]): row for row in over_seeds(rows(outcomes))}
                asked = {(p, n): merged[p, n] for p in plan.policies for n in args.engines}
                print(
                    f"{name}, {tier}, {load:g}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True
                )
                yield Block(name, tier, load, asked)


def cell(block: Block, policy: str, engines: int) -> str:
    """Hits, mean and p99, the best of each in bold."""
    row = block.rows[policy, engines]
    parts = []
    for figure, digits, lowest in (
        ("hit_percent", 1, False),
        ("mean_ttft_s", 3, True),
        ("p99_ttft_s", 2, True),
    ):
        value = row[figure]
        if value is None:
            continue
        spread = row["spread"][figure]
        text = f"{value:.{digits}f}" + (f"±{spread:.{digits}f}" if figure == "mean_ttft_s" and spread else "")
        is_best = policy != ORACLE and value == block.best(figure, engines, lowest=lowest)
        parts.append(f"**{text}**" if is_best else text)
    return " / ".join(parts)


def show_peers(block: Block) -> None:
    """One table of all policies."""
    print(f"\n{block.trace}, {block.tier}, load {block.load:g}: hit % / mean TTFT s / p99 s\n")
    print("| policy | " + " | ".join(f"N={engines}" for engines in block.engines) + " |")
    print("|---|" + "---|" * len(block.engines))
    for policy in block.policies:
        print(f"| {policy} | " + " | ".join(cell(block, policy, engines) for engines in block.engines) + " |")


def show_goals(blocks: Sequence[Block]) -> None:
    """Our times and hits beside the best of the others, figure by figure."""
    print("\nkvpin ÷ the best of the others (below 1 is better for times); hits: points behind the best\n")
    print("| cell | mean TTFT | p99 | hits |")
    print("|---|---:|---:|---:|")
    others = ("kvpin", ORACLE)
    for block in blocks:
        for engines in block.engines:
            own = block.rows["kvpin", engines]
            mean, p99 = (
                own[figure] / block.best(figure, engines, lowest=True, without=others)
                for figure in ("mean_ttft_s", "p99_ttft_s")
            )
            behind = block.best("hit_percent", engines, lowest=False, without=others) - own["hit_percent"]
            where = f"{block.trace} N={engines}, {block.tier}, {block.load:g}"
            print(f"| {where} | {mean:.2f} | {p99:.2f} | {behind:+.1f} |")


def show_ablations(blocks: Sequence[Block]) -> None:
    """Mean times of kvpin without a term, over those of kvpin."""
    cells = [(block, engines) for block in blocks for engines in block.engines]
    print("\nmean TTFT without a term ÷ with all of them\n")
    names = (f"{b.trace[:5]} {n}{' host' if HOST_TOKENS.get(b.tier) else ''} {b.load:g}" for b, n in cells)
    print("| left out | " + " | ".join(names) + " |")
    print("|---|" + "---:|" * len(cells))
    for policy in blocks[0].policies[1:]:
        ratios = (
            block.rows[policy, engines]["mean_ttft_s"] / block.rows["kvpin", engines]["mean_ttft_s"]
            for block, engines in cells
        )
        print(
            f"| {policy.removeprefix('kvpin-no-')} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |"
        )


def main() -> None:
    """Reads the traces, runs and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--loads", default="0.6,0.9,1.1")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--model", choices=("fifo", "chunked"), default="fifo")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--window-groups", type=int, default=0)
    parser.add_argument("--policies", help="in place of all")
    parser.add_argument("--engines", default=",".join(map(str, ENGINES)))
    parser.add_argument("--gpu-tokens", type=int, default=GPU_TOKENS)
    parser.add_argument("--only", choices=("peers", "ablations"))
    args = parser.parse_args()
    loads = [float(load) for load in args.loads.split(",")]
    seeds = [int(seed) for seed in args.seeds.split(",")]
    args.engines = tuple(int(count) for count in args.engines.split(","))
    is_excerpt = (args.folder / EXCERPTS["agentic"]).exists()
    files = EXCERPTS if is_excerpt else TRACES
    try:
        traces = {name: read_trace(args.folder / file, limit=args.limit) for name, file in files.items()}
    except TraceError as error:
        sys.exit(f"{error}\nDIR has to hold {' and '.join(TRACES.values())}")
    if args.only != "ablations":
        blocks = []
        peers = PEERS if args.policies is None else resolve(args.policies.split(","))
        for block in play(traces, loads, peers, seeds, args):
            show_peers(block)
            blocks.append(block)
        show_goals(blocks)
    if args.only != "peers":
        show_ablations(list(play(traces, loads, ("kvpin", *ABLATIONS), seeds, args)))


if __name__ == "__main__":
    main()
