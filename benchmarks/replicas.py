"""Several kvpins in front of the same engines, beside one kvpin and beside two other routers.

Four mock vLLMs (`mock_engine.py`) serve each setup in turn, with the workloads of `router_work.py` and, if
its file is named, an agentic trace (`agentic_work.py`). Each request goes to a replica drawn at random. The
exchange is a real one: Unix sockets, or a Valkey server from the wheel of the tests. With `--learned`, kvpin
follows the engines by their answers alone.

    python benchmarks/replicas.py [--workload a,b,c] [--agentic kvct_openloop_512.jsonl.gz] [--learned]
                                  [--setups one,two-redis,…] [--rate 40] [--seed 1] [--first]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from agentic_work import AGENTIC_KV_TOKENS, agentic_work
from harness import ROOT, free_port, some_of
from router_client import play
from router_peers import KVPIN, Engine, Start, cpu_s, running, started
from router_result import Reading, Result, summarise
from router_work import MIXES, MODEL_DIR, Question, make_warm_up, make_work
from routers import SETTLE_S, before_others, engines, told

sys.path.insert(0, str(ROOT))
from tests.valkey import Valkey

AGENTIC = "agentic"


@dataclass(frozen=True, slots=True)
class Setup:
    """The routers in front of the engines.

    Attributes:
        title: for the table.
        count: how many routers.
        exchange: of kvpins: `unix`, `redis`, or None for none.
        router: of `ROUTERS`.
    """

    title: str
    count: int
    exchange: str | None = None
    router: str = KVPIN


SETUPS = {
    "one": Setup("one kvpin", 1),
    "two-redis": Setup("two kvpins, Valkey", 2, "redis"),
    "four-redis": Setup("four kvpins, Valkey", 4, "redis"),
    "two-unix": Setup("two kvpins, Unix sockets", 2, "unix"),
    "two-alone": Setup("two kvpins, no exchange", 2),
    "two-sglang": Setup("two sglang-routers, cache_aware", 2, router="sglang-cache"),
}


@dataclass(frozen=True, slots=True)
class Load:
    """A workload: what engines can hold, and the requests."""

    title: str
    kv_tokens: int
    work: Sequence[Question]


def main() -> None:
    """Runs what was asked for, and prints a table of each workload."""
    arguments = _arguments()
    with before_others() if arguments.first else nullcontext():
        for load in _loads(arguments):
            _measure(load, arguments)


def _measure(load: Load, arguments: argparse.Namespace) -> None:
    print(f"\n{load.title}\n", flush=True)
    print(
        "| | hits | of one kvpin's | first token, mean ms | of one kvpin's | p99 ms | failed | CPU s | busy |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    mix = replace(MIXES["a"], kv_tokens=load.kv_tokens)
    first: Result | None = None
    with engines(mix, arguments.prefill_rate, arguments.token_ms) as served:
        for name in arguments.setups:
            result = run(SETUPS[name], load, served, arguments)
            first = first or result
            print(_row(SETUPS[name].title, result, first), flush=True)


def run(setup: Setup, load: Load, served: Sequence[Engine], arguments: argparse.Namespace) -> Result:
    """Plays a workload through a setup, before engines that have forgotten everything."""
    for engine in served:
        httpx.post(f"{engine.url}/mock/restart").raise_for_status()
    dice = random.Random(arguments.seed)  # noqa: S311 - not for secrets
    with replicas(setup, served, learned=arguments.learned) as (urls, used):
        asyncio.run(play(urls, make_warm_up(), None))
        time.sleep(SETTLE_S)
        before = Reading.now([told(engine) for engine in served], used())
        answers = asyncio.run(play([dice.choice(urls) for _ in load.work], load.work, None))
        after = Reading.now([told(engine) for engine in served], used())
    return summarise(load.title, setup.title, arguments.seed, load.work[-1].at, answers, (before, after))


@contextmanager
def replicas(
    setup: Setup, served: Sequence[Engine], *, learned: bool
) -> Iterator[tuple[list[str], Callable[[], float]]]:
    """Starts the routers of a setup. Yields their addresses, and a look at the CPU seconds of all."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls, looks = list[str](), list[Callable[[], float]]()
        exchange = None
        if setup.exchange == "unix":
            exchange = f"unix:{directory / 'bus'}"
        elif setup.exchange == "redis":
            server = Valkey()
            stack.callback(server.kill)
            exchange = server.url
        for number in range(setup.count):
            log = directory / f"{number}.log"
            if setup.router == KVPIN:
                url, look = stack.enter_context(kvpin(served, exchange, log, learned=learned))
            else:
                url, look = stack.enter_context(running(setup.router, served, log))
            urls.append(url)
            looks.append(look)
        yield urls, lambda: sum(look() for look in looks)


@contextmanager
def kvpin(
    served: Sequence[Engine], exchange: str | None, log: Path, *, learned: bool
) -> Iterator[tuple[str, Callable[[], float]]]:
    """Starts one kvpin. Yields its address, and a look at its CPU seconds."""
    port = free_port()
    with started("kvpin", kvpin_start(served, exchange, port, learned=learned), port, log) as process:
        yield f"http://127.0.0.1:{port}", lambda: cpu_s(process.pid)


def kvpin_start(served: Sequence[Engine], exchange: str | None, port: int, *, learned: bool) -> Start:
    """The way to start one kvpin. With `learned`, it gets no events of the engines."""
    command: list[str | Path] = [sys.executable, "-m", "proxy.cli", "serve", "--reuse", "--port", str(port)]
    for engine in served:
        kind = f"openai_compatible={engine.url},tokenizer={MODEL_DIR}" if learned else f"vllm={engine.url}"
        command += ["--engine", kind]
    if exchange is not None:
        command += ["--exchange", exchange]
    return Start(command, "/health/ready")


def _loads(arguments: argparse.Namespace) -> Iterator[Load]:
    for name in arguments.workload:
        mix = replace(MIXES[name], requests_per_s=arguments.rate)
        yield Load(f"({name}) {mix.title}", mix.kv_tokens, make_work(mix, arguments.seed))
    if arguments.agentic is not None:
        work = agentic_work(arguments.agentic, arguments.requests, arguments.rate)
        yield Load(f"({AGENTIC}) {len(work)} requests of coding agents", AGENTIC_KV_TOKENS, work)


def _row(title: str, result: Result, one: Result) -> str:
    hits = f"{100 * result.hits:.2f}% | {100 * result.hits / one.hits:.1f}%"
    mean = f"{result.mean_ms:.1f} | {100 * result.mean_ms / one.mean_ms:.0f}%"
    use = f"{result.router_cpu_s:.1f} | {100 * result.machine:.0f}%"
    return f"| {title} | {hits} | {mean} | {result.p99_ms:.0f} | {result.errors} | {use} |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", type=some_of(MIXES), default=list(MIXES), help="of " + ",".join(MIXES))
    parser.add_argument("--agentic", type=Path, default=None, help="the file of the agentic trace")
    parser.add_argument("--requests", type=int, default=600, help="of the agentic trace")
    parser.add_argument("--setups", type=some_of(SETUPS), default=list(SETUPS), help="of " + ",".join(SETUPS))
    parser.add_argument("--learned", action="store_true", help="engines without KV events")
    parser.add_argument("--rate", type=float, default=40, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prefill-rate", type=float, default=10_000, help="tokens a second of an engine")
    parser.add_argument("--token-ms", type=float, default=15, help="from token to token")
    parser.add_argument("--first", action="store_true", help="before other work on this machine; as root")
    return parser.parse_args()


if __name__ == "__main__":
    main()
