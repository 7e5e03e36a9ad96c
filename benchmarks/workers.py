"""`kvpin serve --workers N`: requests per second, CPU per request, and how far that reaches.

    python benchmarks/workers.py [--workers 1,2,4] [--requests 4096] [--quick]

The engines of `learned` send no KV events (`native/engine.c`, as `openai_compatible`); those of `events` are
vLLMs without a model (`mock_engine.py`). Both answer at once. Chats of 1000 tokens come from 64 connections,
and then the next turn of each. `rps` is what this machine served, with the load generator and the engines on
the same cores: where those take most of the time, it says little.

CPU per request is user and system time of all processes of kvpin. It needs no free core, but where few
requests come, what kvpin does when idle counts, too. What several take more than one is the price of being
several:
c(N) = c(1) + tell + hear * (N - 1), because a worker tells of its own requests once, and hears of all the
others' and of all KV events. `reach` is N / c(N), for N workers on a core each, and for numbers that were not
run by the line through those that were.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cost_native import NativeError, mock_engine, play, write_bodies
from cost_work import MODEL, Chats, Load
from harness import ROOT, free_port, some_of, wait_ready
from process_cost import cpu_s
from router_work import MODEL as EVENTS_MODEL
from router_work import MODEL_DIR

ENGINES = 2
CONNECTIONS = 64
TOKENS = 1000
READY_S = 120
# Seconds for tokenizers to be loaded and checked.
SETTLE_S = 5
REACHES = (4, 8, 16)
CHOICES = [str(number) for number in range(1, 17)]


@dataclass(frozen=True, slots=True)
class Run:
    """One kvpin under load: requests a second, and CPU seconds of a request."""

    workers: int
    rps: float
    cpu: float


@contextmanager
def learned_engines() -> Iterator[list[str]]:
    """Engines without KV events; yields kvpin's flags for them."""
    with ExitStack() as stack:
        engines = [stack.enter_context(mock_engine()) for _ in range(ENGINES)]
        more = f"model={MODEL},tokenizer={MODEL_DIR}"
        yield [f"--engine=openai_compatible={each.url},id=e{n},{more}" for n, each in enumerate(engines)]


@contextmanager
def event_engines() -> Iterator[list[str]]:
    """Engines whose KV events are followed."""
    with ExitStack() as stack:
        flags = [f"--model-alias={MODEL}={EVENTS_MODEL}"] if MODEL != EVENTS_MODEL else []
        for number in range(ENGINES):
            port, events, replay = free_port(), free_port(), free_port()
            script = [sys.executable, str(ROOT / "benchmarks" / "mock_engine.py"), "--port", str(port)]
            speed = ["--prefill-rate", "1e9", "--token-ms", "0", "--kv-tokens", "4000000"]
            process = subprocess.Popen([*script, *speed, "--event-ports", str(events), str(replay)])
            stack.callback(process.wait)
            stack.callback(process.kill)
            wait_ready(f"http://127.0.0.1:{port}/health", process, READY_S)
            address = f"vllm=http://127.0.0.1:{port},id=e{number}"
            where = f"events=tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay}"
            flags.append(f"--engine={address},{where},tokenizer={MODEL_DIR}")
        yield flags


@contextmanager
def kvpin(flags: Sequence[str], workers: int) -> Iterator[tuple[int, int]]:
    """Runs it; yields its port and its process."""
    port = free_port()
    command = [sys.executable, "-m", "proxy.cli", "serve", "--port", str(port), "--workers", str(workers)]
    process = subprocess.Popen(
        [*command, "--log-level", "error", *flags],
        cwd=ROOT,
        env={**os.environ, "ENABLE_KV_CACHE_REUSE": "1"},
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_ready(f"http://127.0.0.1:{port}/health/ready", process, READY_S)
        time.sleep(SETTLE_S)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(60)


def measure(flags: Sequence[str], workers: int, load: Load) -> Run:
    """Chats and their next turns, after a few that warm it up. Raises NativeError."""
    chats = Chats(MODEL_DIR, seed=1)
    (warm_up,) = chats.waves(Load("warm-up", TOKENS, CONNECTIONS, 2 * CONNECTIONS, 2 * CONNECTIONS))
    (wave,) = chats.waves(load)
    with kvpin(flags, workers) as (port, pid), tempfile.TemporaryDirectory() as directory:
        bodies = Path(directory) / "bodies"
        write_bodies(bodies, warm_up.first)
        play(port, CONNECTIONS, len(warm_up.first), bodies)
        cpu, wall_s, answered = -cpu_s(pid), 0.0, 0
        for part in (wave.first, wave.next):
            write_bodies(bodies, part)
            played = play(port, CONNECTIONS, len(part), bodies)
            if played.failed:
                raise NativeError(f"{played.failed} requests failed: {played.errors[0]}")
            wall_s += played.wall_s
            answered += len(played.took_us)
        cpu += cpu_s(pid)
    return Run(workers, answered / wall_s, cpu / answered)


def cpu_of(runs: Sequence[Run], workers: int) -> float:
    """CPU seconds of a request with that many workers: measured, or by the line through what was measured."""
    measured = {run.workers: run.cpu for run in runs}
    if workers in measured:
        return measured[workers]
    several = [run for run in runs if run.workers > 1] or list(runs)
    first, last = several[0], several[-1]
    steps = last.workers - first.workers
    hear = (last.cpu - first.cpu) / steps if steps else max(first.cpu - runs[0].cpu, 0.0)
    return last.cpu + hear * (workers - last.workers)


def rows(name: str, runs: Sequence[Run]) -> Iterator[str]:
    """The table's rows of one kind of engines."""
    one = runs[0].cpu
    measured = {run.workers: run for run in runs}
    for workers in sorted({*measured, *REACHES}):
        cpu = cpu_of(runs, workers)
        rps = f"{measured[workers].rps:.0f}" if workers in measured else "–"
        share = max(cpu - one, 0.0) / cpu
        reach = f"{workers / cpu:.0f} | {one / cpu * workers:.1f}x"
        yield f"| {name} | {workers} | {rps} | {1e6 * cpu:.0f} | {share:.0%} | {reach} |"


def main() -> None:
    """Runs all and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=some_of(CHOICES), default=["1", "2", "4"], help="e.g. 1,2,4")
    parser.add_argument("--requests", type=int, default=4096, help="chats, each with a next turn")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    arguments = parser.parse_args()
    count = arguments.requests // (10 if arguments.quick else 1)
    load = Load("chats", TOKENS, CONNECTIONS, count, count)
    numbers = sorted({1, *map(int, arguments.workers)})
    print(
        "| engines | workers | rps here | CPU a request, µs | of it for being several | reach, rps | by one |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, engines in (("learned", learned_engines), ("events", event_engines)):
        with engines() as flags:
            runs = [measure(flags, workers, load) for workers in numbers]
        print("\n".join(rows(name, runs)), flush=True)


if __name__ == "__main__":
    try:
        main()
    except NativeError as problem:
        sys.exit(f"workers.py: {problem}")
