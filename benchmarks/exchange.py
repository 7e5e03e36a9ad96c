"""Several kvpins in front of the same engines: how soon one sees what another placed, what that costs and
brings.

    python benchmarks/exchange.py [--requests 600] [--redis redis://127.0.0.1:6379]

`seen` is measured in one process, whose clock both kvpins share: from `lease` at one to `begin` at the
other. Engines are scripted and send no KV events. `cpu` is user and system time of all kvpins together.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from proxy.core.placement.placer import Placer
from proxy.fleet.pool import Pool
from proxy.peers.bus import Bus, UnixBus
from proxy.peers.redis_bus import RedisBus
from tests.fakes import INFO, FakeAdapter, FakeEngine, FakeProxy, client_of, proxy_over

ENGINES = 8
SESSIONS = 80
TURNS = 5
SYSTEM_TOKENS, TURN_TOKENS = 160, 480
RUNNING = 4
PREFILL_TOK_S = 20_000
Make = Callable[[int], Bus]


@dataclass
class Result:
    """Figures of one setup: cached per prompt token, seconds until the other sees a request, CPU."""

    hits: float
    cpu_ms: float
    seen: list[float] = field(default_factory=list)

    def row(self, title: str) -> str:
        """As a row of the table."""
        if not self.seen:
            return f"| {title} | {self.hits:.3f} | {self.cpu_ms:.2f} | – | – |"
        ordered = sorted(1000 * each for each in self.seen)
        median, p99 = statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]
        return f"| {title} | {self.hits:.3f} | {self.cpu_ms:.2f} | {median:.2f} | {p99:.2f} |"


class Caching(FakeEngine):
    """Keeps every prompt it has seen, by blocks of 16 tokens, and counts what it reused."""

    def __init__(self, engine_id: str) -> None:
        super().__init__(engine_id, self.serve)
        self._blocks: set[int] = set()
        self.reused = self.prompts = 0

    async def serve(self, exchange: Any) -> None:  # noqa: ANN401 - the fake's own
        """Answers a completion."""
        prompt, reused, key, counts = exchange.json["prompt"], 0, 0, True
        for end in range(16, len(prompt) + 1, 16):
            key = hash((key, *prompt[end - 16 : end]))
            counts = counts and key in self._blocks
            reused += 16 * counts
            self._blocks.add(key)
        self.reused += reused
        self.prompts += len(prompt)
        details = {"cached_tokens": reused}
        await asyncio.sleep((len(prompt) - reused) / PREFILL_TOK_S)
        await exchange.send({"usage": {"completion_tokens": 1, "prompt_tokens_details": details}})


def _adapter(engine: FakeEngine) -> FakeAdapter:
    """An engine with room for everything, as a kvpin sees it."""
    return FakeAdapter(engine.id, engine.url, info=replace(INFO, gpu_blocks=100_000))


async def measure(count: int, make: Make | None, requests: int) -> Result:
    """Runs the workload over `count` kvpins, clients at random."""
    dice, began, seen = random.Random(1), dict[tuple[int, ...], float](), list[float]()  # noqa: S311
    lease, begin = Pool.lease, Placer.begin

    def noted(self: Pool, placement: Any, chain: Any, *rest: Any, **more: Any) -> Any:  # noqa: ANN401
        began[chain.hashes] = time.perf_counter()
        self.placer.is_own = True
        leased = lease(self, placement, chain, *rest, **more)
        self.placer.is_own = False
        return leased

    def watched(self: Placer, now: float, engine: str, work: Any, chain: Any, **more: Any) -> Any:  # noqa: ANN401
        if not getattr(self, "is_own", False):
            seen.append(time.perf_counter() - began[chain.hashes])
        return begin(self, now, engine, work, chain, **more)

    Pool.lease, Placer.begin = noted, watched  # type: ignore[method-assign]
    try:
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(Caching(f"e{n}")) for n in range(ENGINES)]
            proxies: list[FakeProxy] = [
                await stack.enter_async_context(
                    proxy_over(*map(_adapter, engines), reuse=True, exchange=make)
                )
                for _ in range(count)
            ]
            clients = [await stack.enter_async_context(client_of(proxy)) for proxy in proxies]
            while make is not None and not all(
                proxy.peers.is_ready and len(proxy.peers.stats().peers) == count - 1 for proxy in proxies
            ):
                await asyncio.sleep(0.01)
            before = resource.getrusage(resource.RUSAGE_SELF)
            await _ask(clients, dice, requests)
            after = resource.getrusage(resource.RUSAGE_SELF)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            hits = sum(engine.reused for engine in engines) / sum(engine.prompts for engine in engines)
    finally:
        Pool.lease, Placer.begin = lease, begin  # type: ignore[method-assign]
    return Result(hits, 1000 * cpu_s / requests, seen)


async def _ask(clients: list[Any], dice: random.Random, requests: int) -> None:
    """Conversations of `TURNS` turns over four system prompts; each turn goes to any kvpin."""
    systems = [[dice.randrange(500) for _ in range(SYSTEM_TOKENS)] for _ in range(4)]
    chats = [systems[n % 4] + [n] for n in range(SESSIONS)]
    gate = asyncio.Semaphore(RUNNING)

    async def turn(chat: int) -> None:
        async with gate:
            body = {"model": "m", "prompt": chats[chat], "max_tokens": 1}
            response = await dice.choice(clients).post("/v1/completions", json=body)
            response.raise_for_status()

    for _ in range(max(requests // SESSIONS, 1)):
        order = dice.sample(range(SESSIONS), SESSIONS)
        await asyncio.gather(*map(turn, order))
        for chat in order:
            chats[chat] = chats[chat] + [dice.randrange(500) for _ in range(TURN_TOKENS)]


async def _main(requests: int, redis: str | None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        bus = Path(directory) / "bus"
        setups: list[tuple[str, int, Make | None]] = [
            ("one kvpin", 1, None),
            ("two, no exchange", 2, None),
            ("two, Unix sockets", 2, lambda owner: UnixBus(bus, owner)),
        ]
        if redis is not None:
            setups.append(("two, Redis", 2, lambda _: RedisBus(redis, "benchmark")))
        print("| setup | cached / prompt tokens | CPU ms a request, engines included | seen ms | p99 |")
        print("|---|---|---|---|---|")
        for title, count, make in setups:
            print((await measure(count, make, requests)).row(title), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=SESSIONS * TURNS)
    parser.add_argument("--redis")
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(arguments.requests, arguments.redis))
