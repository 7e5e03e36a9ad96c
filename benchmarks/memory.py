"""Memory of kvpin with reuse on, in front of two engines and with a vocabulary of 150,000 entries.

kvpin runs as users start it. It loads the tokenizer, then serves new chats: half of them short, half long.
The engines answer at once with fixed bytes. Figures are of the kvpin process, in MB, from the kernel.

    python benchmarks/memory.py [--requests 2000] [--vocabulary 150000]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
from cold_start import make_tokenizer
from harness import kvpin
from hot_path import DEFAULT_MODEL, Chats, drive, instant_engine, listener_of

from engine_adapter.prompt.chat import ChatTokenizer

ENGINES, CLIENTS = 2, 4
SHORT, LONG = 200, 4000
LOAD_S = 300.0
FIELDS = ("VmRSS", "RssAnon", "VmHWM", "Threads")


def memory(pid: int) -> dict[str, int]:
    """Resident memory, what of it no file backs, its peak (all MB), and the number of threads."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = {name: int(amount) for name, amount in re.findall(r"(\w+):\s+(\d+)", status)}
    return {name: found[name] if name == "Threads" else found[name] // 1024 for name in FIELDS}


async def wait_until_loaded(url: str) -> None:
    """Returns once kvpin tokenises by itself."""
    async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(LOAD_S):
        while True:
            pools = (await client.get("/admin/v1/stats")).json()["pools"]
            if pools and pools[0]["tokenisation"]["source"] == "local":
                return
            await asyncio.sleep(0.2)


async def measure(tokenizer: Path, requests: int) -> None:
    """Prints a row for each step."""
    chats = Chats(ChatTokenizer.load(str(DEFAULT_MODEL)))
    print("| after | RSS | of it anonymous | peak | threads |\n|---|---:|---:|---:|---:|")

    def row(name: str, pid: int) -> None:
        print(f"| {name} | " + " | ".join(str(value) for value in memory(pid).values()) + " |", flush=True)

    async with AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(instant_engine()) for _ in range(ENGINES)]
        engines = [f"openai_compatible=http://127.0.0.1:{port},tokenizer={tokenizer}" for port in ports]
        running = kvpin(*(word for engine in engines for word in ("--engine", engine)))
        started = time.monotonic()
        url = await asyncio.to_thread(running.__enter__)
        stack.push_async_callback(asyncio.to_thread, running.__exit__, None, None, None)
        port = int(url.rpartition(":")[2])
        pid = listener_of(port)
        await wait_until_loaded(url)
        row(f"the tokenizer, {time.monotonic() - started:.0f} s", pid)
        for tokens in (SHORT, LONG):
            bodies = (chats.body(tokens) for _ in range(requests // 2))
            await drive(port, bodies, CLIENTS)
            row(f"{requests // 2} chats of {tokens} tokens", pid)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="half short, half long (2000)")
    parser.add_argument("--vocabulary", type=int, default=150_000, help="entries of the tokenizer (150000)")
    options = parser.parse_args()
    asyncio.run(measure(make_tokenizer(options.vocabulary), options.requests))


if __name__ == "__main__":
    main()
