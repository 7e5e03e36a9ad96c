"""kvpin and other routers, live, with the same engines and the same requests.

Four mock vLLMs (`mock_engine.py`: caches and clocks of real size, KV events, metrics) serve each router in
turn, and look like new processes to each. Peers are real releases, installed on first use
(`router_peers.py`). The seed alone decides when requests come (`router_work.py`); they are timed from when
they were due. The engines compute prompts one after the other, and decode is free, which kvpin's queue term
assumes; `kvpin replay --model chunked` compares the rules without that assumption.

    python benchmarks/routers.py [--workload a,b,c] [--routers kvpin,sglang-cache,…] [--seed 1] [--rounds 1]
                                 [--json PATH] [--trace PATH] [--first] [--window-groups 5]

Everything runs on one machine. With `--first` (Linux, as root) other work there waits. With `--trace`, each
workload is also written as a trace for `kvpin replay`, its name added to the file's. With --window-groups,
engines serve a hybrid model (`mock_engine.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
from harness import ROOT, free_port, some_of, wait_ready
from rich.console import Console
from router_client import play
from router_peers import DIRECT, ROUTERS, Engine, RouterUnavailableError, Start, end, running
from router_result import EngineRecord, Reading, Result, summarise, table
from router_work import MIXES, Mix, Question, make_warm_up, make_work, write_trace

ENGINES = 4
MOCK = Start([sys.executable, ROOT / "benchmarks" / "mock_engine.py"], "/health")
# For the events of the warm-up to arrive, and those who look at engines to look once.
SETTLE_S = 2.0


def main() -> None:
    """Runs what was asked for, prints a table for each workload and says what could not be measured."""
    arguments = _arguments()
    with before_others() if arguments.first else nullcontext():
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """See `main`."""
    results: list[Result] = []
    missing: dict[str, str] = {}
    for name in arguments.workload:
        mix = MIXES[name]
        mix = replace(mix, requests_per_s=arguments.rate or mix.requests_per_s)
        seeds = range(arguments.seed, arguments.seed + arguments.rounds)
        works = {seed: make_work(mix, seed) for seed in seeds}
        if arguments.trace is not None:
            path = arguments.trace.with_stem(f"{arguments.trace.stem}-{name}")
            write_trace(works[arguments.seed], path)
            print(f"the trace of ({name}) with seed {arguments.seed} is in {path}", file=sys.stderr)
        with engines(
            mix, arguments.prefill_rate, arguments.token_ms, window_groups=arguments.window_groups
        ) as served:
            for seed, work in works.items():
                for router in arguments.routers:
                    try:
                        results.append(run(name, router, seed, work, served))
                        print(results[-1].line(), file=sys.stderr)
                    except RouterUnavailableError as error:
                        missing[router] = str(error)
                        print(f"({name}) {router}: not measured: {error}", file=sys.stderr)
    _report(arguments, results, missing)


@contextmanager
def before_others() -> Iterator[None]:
    """Takes the processors before all else that runs. Where sessions are scheduled as one (autogroup), the
    session has to be moved up, too; it is moved back."""
    os.nice(-15)
    group = Path("/proc/self/autogroup")
    if not group.exists():
        yield
        return
    former = group.read_text().split()[-1]
    group.write_text("-19")
    try:
        yield
    finally:
        group.write_text(former)


def run(workload: str, router: str, seed: int, work: Sequence[Question], served: Sequence[Engine]) -> Result:
    """Plays a workload through a router, before engines that have forgotten everything.

    Raises:
        RouterUnavailableError: it cannot be installed or started.
    """
    for engine in served:
        httpx.post(f"{engine.url}/mock/restart").raise_for_status()
    with ExitStack() as stack:
        urls, used = [engine.url for engine in served], _nothing
        if router != DIRECT:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url, used = stack.enter_context(running(router, served, logs / "router.log"))
            urls = [url]
        header = ROUTERS[router].session_header
        asyncio.run(play(urls, make_warm_up(), header))
        time.sleep(SETTLE_S)
        before = Reading.now([told(engine) for engine in served], used())
        answers = asyncio.run(play(urls, work, header))
        after = Reading.now([told(engine) for engine in served], used())
    return summarise(workload, router, seed, work[-1].at, answers, (before, after))


@contextmanager
def engines(
    mix: Mix,
    prefill_rate: float,
    token_ms: float,
    count: int = ENGINES,
    window_groups: int = 0,
    start: Start = MOCK,
) -> Iterator[list[Engine]]:
    """Starts the engines of a workload; ends them. `start`: the way to start each, without its options."""
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            port = free_port()
            command = [*start.command, "--port", str(port), "--kv-tokens", str(mix.kv_tokens)]
            command += ["--prefill-rate", str(prefill_rate), "--token-ms", str(token_ms)]
            command += ["--window-groups", str(window_groups)]
            environment = {**os.environ, **start.environment}
            process = subprocess.Popen(command, cwd=ROOT, env=environment, process_group=0)
            stack.callback(end, process)
            started.append((f"http://127.0.0.1:{port}", process))
        for url, process in started:
            wait_ready(f"{url}{start.health}", process, 120)
        yield [Engine(url, _events_of(url)) for url, _ in started]


def _events_of(url: str) -> str:
    source = httpx.get(f"{url}/kv_event_sources").raise_for_status().json()["0"]
    return source["endpoint"].replace("*", "127.0.0.1")


def told(engine: Engine) -> EngineRecord:
    """Counts of an engine since it was restarted."""
    return msgspec.json.decode(httpx.get(f"{engine.url}/mock").raise_for_status().content, type=EngineRecord)


def _nothing() -> float:
    return 0.0


def _report(arguments: argparse.Namespace, results: list[Result], missing: dict[str, str]) -> None:
    console = Console(width=170)
    for name in arguments.workload:
        mix = MIXES[name]
        title = f"({name}) {mix.title}; {ENGINES} engines × {mix.kv_tokens:,} tokens"
        console.print(table(title, [result for result in results if result.workload == name]))
    for router, why in missing.items():
        console.print(f"not measured: {ROUTERS[router].title}: {why}")
    if arguments.json is not None:
        arguments.json.write_bytes(
            msgspec.json.format(msgspec.json.encode({"results": results, "not_measured": missing}))
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", type=some_of(MIXES), default=list(MIXES), help="of " + ",".join(MIXES))
    parser.add_argument(
        "--routers", type=some_of(ROUTERS), default=list(ROUTERS), help="of " + ",".join(ROUTERS)
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1, help="with seeds from --seed on")
    parser.add_argument(
        "--rate", type=float, default=None, help="requests a second, in place of the workload's"
    )
    parser.add_argument("--prefill-rate", type=float, default=10_000, help="tokens a second of an engine")
    parser.add_argument("--token-ms", type=float, default=15, help="from token to token")
    parser.add_argument("--window-groups", type=int, default=0, help="window layers for each full layer")
    parser.add_argument("--json", type=Path, default=None, help="all figures")
    parser.add_argument("--trace", type=Path, default=None, help="the workloads for kvpin replay")
    parser.add_argument("--first", action="store_true", help="before other work on this machine; as root")
    return parser.parse_args()


if __name__ == "__main__":
    main()
