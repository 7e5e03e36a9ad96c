"""Measures how soon blocks are freed when a client leaves, and what a killed engine costs.

There are two embedded engines. First, clients drop streams: the benchmark measures the time until the engines
have no active block. Then one engine is killed (SIGKILL) while streams run and new requests keep coming.

    python benchmarks/resilience.py [--cancels 10] [--streams 16] [--late 40]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections import Counter

import httpx
from harness import engine_pids, kvpin

ENGINE = "embedded: --threads 1 --kv-blocks 1024"


def chat(text: str, **fields: object) -> dict[str, object]:
    """A chat request."""
    return {
        "model": "kvpin-tiny",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        **fields,
    }


async def active(client: httpx.AsyncClient) -> int:
    """Blocks that running requests hold, over all engines."""
    stats = (await client.get("/admin/v1/stats")).json()
    return sum(engine["kv"]["gpu"]["active"] for pool in stats["pools"] for engine in pool["engines"])


async def cancels(client: httpx.AsyncClient, count: int) -> list[float]:
    """Seconds from dropping a stream to no active block."""
    seconds = []
    for number in range(count):
        body = chat(f"Endless story {number}.", max_tokens=4000, ignore_eos=True, stream=True)
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                break
        left = time.perf_counter()
        while await active(client):
            await asyncio.sleep(0.005)
        seconds.append(time.perf_counter() - left)
    return seconds


async def one_stream(client: httpx.AsyncClient, number: int) -> str:
    """Runs a long stream; returns how it ended."""
    body = chat(f"Story {number}.", max_tokens=150, ignore_eos=True, stream=True)
    text = b""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for chunk in answer.aiter_bytes():
                text += chunk
    except httpx.RemoteProtocolError:
        return "told in the stream, then broken" if b'"error"' in text else "broken without a word"
    return "complete" if text.endswith(b"[DONE]\n\n") else "ended early"


async def kill(client: httpx.AsyncClient, url: str, streams: int, late: int) -> None:
    """Kills an engine under load and prints what became of everything."""
    victim, pid = next(iter(engine_pids(url).items()))
    running = [asyncio.create_task(one_stream(client, number)) for number in range(streams)]
    await asyncio.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    killed = time.perf_counter()
    statuses: Counter[int] = Counter()
    for number in range(late):
        answer = await client.post("/v1/chat/completions", json=chat(f"Late {number}.", max_tokens=4))
        statuses[answer.status_code] += 1
    print(f"new requests          {dict(statuses)} (status: count)")
    print(f"streams in flight     {dict(Counter(await asyncio.gather(*running)))}")
    while (await client.get("/health/ready")).json()["engines"][victim] != "ready":
        await asyncio.sleep(0.1)
    print(f"engine back after     {time.perf_counter() - killed:.1f} s, by itself")


async def measure(url: str, arguments: argparse.Namespace) -> None:
    """Both measurements."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        seconds = await cancels(client, arguments.cancels)
        middle, worst = statistics.median(seconds) * 1000, max(seconds) * 1000
        print(
            f"blocks freed after    {middle:.0f} ms (median), {worst:.0f} ms (worst of {arguments.cancels})"
        )
        await kill(client, url, arguments.streams, arguments.late)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cancels", type=int, default=10)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--late", type=int, default=40)
    arguments = parser.parse_args()
    with kvpin("--managed", ENGINE, "--managed", ENGINE) as url:
        asyncio.run(measure(url, arguments))


if __name__ == "__main__":
    main()
