"""Is the number of engines that `kvpin replay` names right? Recorded live traffic of six engines, what replay
predicts for fewer from the recording alone, and the same traffic on that many engines.

The engines are mock vLLMs (`mock_engine.py`), the requests those of `router_work.py`, timed from when they
were due. Replay is given the recording and the target; it is told nothing about the engines.

    python benchmarks/capacity.py [--target-p99 1] [--requests 1000] [--rate 8] [--prefill-rate 3000]
                                  [--engines 6] [--workload a] [--seed 1] [--keep DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from harness import ROOT, kvpin
from router_client import play
from router_peers import Engine
from router_work import MIXES, Question, make_warm_up, make_work
from routers import SETTLE_S, engines

from proxy.replay.simulator import SEVERAL_SEEDS, quantile_of

P99 = 0.99
SEEDS = ",".join(map(str, SEVERAL_SEEDS))


def main() -> None:
    """Runs it, and prints a line for each number of engines."""
    arguments = _arguments()
    mix = replace(MIXES[arguments.workload], requests_per_s=arguments.rate)
    work = make_work(mix, arguments.seed)[: arguments.requests]
    keep = nullcontext(arguments.keep) if arguments.keep else tempfile.TemporaryDirectory()
    with keep as home, engines(mix, arguments.prefill_rate, 15, arguments.engines) as served:
        recording = Path(home, "traffic.jsonl")
        measured = {arguments.engines: run(served, work, recording)}
        needs, predicted = replayed(recording, arguments.target_p99)
        for count in sorted({needs["engines"], needs["engines_with_margin"]} - {*measured, None}):
            measured[count] = run(served[:count], work, None)
        if arguments.engines not in predicted:
            predicted |= replayed(recording, None, arguments.engines)[1]
    for count, p99_s in sorted(measured.items()):
        runs = sorted(predicted[count])
        draws, middle = f"{runs[0]:.3g} to {runs[-1]:.3g} in {len(runs)} runs", median(runs)
        off = middle / p99_s - 1
        print(f"{count} engines: p99 {middle:.3g} s predicted ({draws}), {p99_s:.3g} s measured, {off:+.0%}")


def run(served: Sequence[Engine], work: Sequence[Question], recording: Path | None) -> float:
    """The p99 time to first token of the work on these engines, which have forgotten everything."""
    for engine in served:
        httpx.post(f"{engine.url}/mock/restart").raise_for_status()
    options = [word for engine in served for word in ("--engine", f"vllm={engine.url}")]
    if recording is not None:
        options += ["--record-traffic", str(recording)]
    with kvpin(*options) as url:
        asyncio.run(play([url], make_warm_up(), "x-session-id"))
        time.sleep(SETTLE_S)
        answers = asyncio.run(play([url], work, "x-session-id"))
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    return quantile_of(sorted(answer.first_token_s or 0.0 for answer in answers), P99)


def replayed(
    recording: Path, target_s: float | None, count: int | None = None
) -> tuple[dict[str, Any], dict[int, list[float]]]:
    """Runs `kvpin replay` for a target, or for a number of engines, and prints its sentences. Returns the
    engines needed, and the p99s of each number of engines."""
    asked = (
        ["--target-p99", str(target_s)]
        if target_s is not None
        else ["--engines", str(count), "--seeds", SEEDS]
    )
    command = [sys.executable, "-m", "proxy.cli", "replay", str(recording), *asked, "--policies", "kvpin"]
    ran = subprocess.run([*command, "--json", "-"], cwd=ROOT, check=True, capture_output=True, text=True)
    document = json.loads(ran.stdout)
    if target_s is not None:
        shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        print(shown.stdout, flush=True)
    need = document["needs"][0] if document["needs"] else {}
    predicted = dict[int, list[float]]()
    for each in document["runs"]:
        predicted.setdefault(each["engines"], []).append(each["p99_ttft_s"])
    return need, predicted


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target-p99", type=float, default=1.0, help="seconds")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=8, help="requests a second")
    parser.add_argument("--prefill-rate", type=float, default=3000, help="tokens a second of an engine")
    parser.add_argument("--engines", type=int, default=6, help="of the recording")
    parser.add_argument("--workload", choices=MIXES, default="a")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=None, help="a directory for the recording")
    return parser.parse_args()


if __name__ == "__main__":
    main()
