"""The cost of viewers: CPU of kvpin with 0, 1 and 10 clients of its stream of events, under one load.

Requests arrive at a fixed rate at a real `kvpin serve`, whose two engines answer at once with a short stream.
The numbers of viewers take turns, so that a busy machine disturbs all of them alike.

    python benchmarks/viewers.py [--rate 200] [--seconds 10] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
from harness import kvpin
from hot_path import CHAT, Chats, cpu_s, instant_engine, listener_of
from large_tokenizer import DEFAULT_MODEL

from engine_adapter.prompt.chat import ChatTokenizer

VIEWERS = (0, 1, 10)
CLIENTS = 16


@dataclass(slots=True)
class Watched:
    """Bytes and events that one viewer received."""

    received: int = 0
    events: int = 0


@asynccontextmanager
async def viewer(url: str) -> AsyncIterator[Watched]:
    """A client that reads the stream."""
    watched, is_open = Watched(), asyncio.Event()

    async def read() -> None:
        async with (
            httpx.AsyncClient(timeout=60, trust_env=False) as client,
            client.stream("GET", f"{url}/admin/v1/events") as answer,
        ):
            async for chunk in answer.aiter_raw():
                is_open.set()
                watched.received += len(chunk)
                watched.events += chunk.count(b"event: ")

    task = asyncio.create_task(read())
    await is_open.wait()
    try:
        yield watched
    finally:
        task.cancel()


async def until_tokenised(url: str) -> None:
    """Until its tokenizer is loaded, kvpin asks the engines for tokens, which these do not have."""
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            pools = (await client.get(f"{url}/admin/v1/stats")).json()["pools"]
            if all("being loaded" not in pool["tokenisation"]["detail"] for pool in pools):
                return
            await asyncio.sleep(0.2)


async def send(port: int, bodies: list[bytes], rate: float, seconds: float) -> int:
    """Sends requests at `rate` a second, on kept connections; returns how many were answered."""
    loop, answered = asyncio.get_running_loop(), 0
    due = iter([loop.time() + number / rate for number in range(round(rate * seconds))])

    async def client(number: int) -> None:
        nonlocal answered
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for at in due:
            await asyncio.sleep(at - loop.time())
            body = bodies[(answered * CLIENTS + number) % len(bodies)]
            writer.write(
                f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
            )
            answered += (await reader.readuntil(b"\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return answered


async def measure(rate: float, seconds: float, rounds: int) -> None:
    """Prints a row for each number of viewers."""
    chats = Chats(ChatTokenizer.load(str(DEFAULT_MODEL)))
    bodies = [chats.body(200, stream=True) for _ in range(400)]
    used = {viewers: list[float]() for viewers in VIEWERS}
    last = {viewers: Watched() for viewers in VIEWERS}
    async with instant_engine() as one, instant_engine() as other:
        engines = [
            word
            for port in (one, other)
            for word in ("--engine", f"openai_compatible=http://127.0.0.1:{port},tokenizer={DEFAULT_MODEL}")
        ]
        running = kvpin(*engines)
        url = await asyncio.to_thread(running.__enter__)
        try:
            port = int(url.rpartition(":")[2])
            pid = listener_of(port)
            await until_tokenised(url)
            await send(port, bodies, rate, seconds / 2)
            for _ in range(rounds):
                for viewers in VIEWERS:
                    async with AsyncExitStack() as stack:
                        watching = [await stack.enter_async_context(viewer(url)) for _ in range(viewers)]
                        before = cpu_s(pid)
                        answered = await send(port, bodies, rate, seconds)
                        used[viewers].append((cpu_s(pid) - before) * 1e6 / answered)
                        last[viewers] = watching[0] if watching else Watched()
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)
    print(f"{rate:.0f} requests a second, {rounds} rounds of {seconds:.0f} s\n")
    print("| viewers | CPU of kvpin, µs a request | share of a core | events a second | KB/s a viewer |")
    print("|---:|---:|---:|---:|---:|")
    for viewers, micros in used.items():
        cost, got = statistics.median(micros), last[viewers]
        spread = f"{cost:.0f} ({min(micros):.0f} to {max(micros):.0f})"
        share, kilobytes = cost * rate / 1e6, got.received / seconds / 1000
        print(f"| {viewers} | {spread} | {share:.1%} | {got.events / seconds:.0f} | {kilobytes:.1f} |")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rate", type=float, default=200, help="requests a second (200)")
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement (10)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (3)")
    options = parser.parse_args()
    asyncio.run(measure(options.rate, options.seconds, options.rounds))


if __name__ == "__main__":
    main()
