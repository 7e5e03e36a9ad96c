"""Requests that fail while one kvpin follows another, by the way the port changes hands.

    alone        the old one stops, then the new one starts and binds the port
    queue        the same on a socket that a service manager holds: connections wait in its queue
    overlap      two on such a socket; the old one stops when the new one is ready
    reuseport    two with a socket each (SO_REUSEPORT); the old one stops when the new one is ready

An embedded engine answers. Half of the clients keep their connection, half open one for each request.

    python benchmarks/restart.py [--restarts 5] [--clients 16]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import harness
import httpx

from proxy.http.listeners import listen

HAND_ON = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); "
    "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1'); "
    "os.execv(sys.executable, [sys.executable, '-m', 'proxy.cli', 'serve', *sys.argv[2:]])"
)
BODY = {"model": "kvpin-tiny", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}


class Clients:
    """Clients that ask without a pause, until told to end."""

    def __init__(self, url: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self.longest_s = 0.0
        self._url, self._over = url, False

    async def ask(self, *, keeps: bool) -> None:
        """One client."""
        limits = httpx.Limits(max_keepalive_connections=None if keeps else 0)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=60, trust_env=False, limits=limits
        ) as client:
            while not self._over:
                began = time.perf_counter()
                try:
                    outcome = str((await client.post("/v1/chat/completions", json=BODY)).status_code)
                except httpx.HTTPError as error:
                    outcome = type(error).__name__
                    await asyncio.sleep(0.05)  # a port that is closed refuses thousands in a second
                self.outcomes[outcome] += 1
                self.longest_s = max(self.longest_s, time.perf_counter() - began)

    async def answered(self, more: int) -> None:
        """Waits for that many more answers."""
        enough = self.outcomes["200"] + more
        while self.outcomes["200"] < enough:
            await asyncio.sleep(0.01)

    def end(self) -> None:
        """No more requests."""
        self._over = True


def start(way: str, port: int, shared: socket.socket, log: Path, engine: str) -> subprocess.Popen[bytes]:
    """A kvpin on the port, in one of the ways."""
    flags = ["--engine", engine, "--log-format", "json"]
    if way == "alone":
        command = [sys.executable, "-m", "proxy.cli", "serve", "--port", str(port), *flags]
        return subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)
    listener = own(port) if way == "reuseport" else shared
    command = [sys.executable, "-c", HAND_ON, str(listener.fileno()), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, pass_fds=[listener.fileno()]
        )
    if listener is not shared:
        listener.close()
    return process


def own(port: int) -> socket.socket:
    """One more socket of the port."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    made.listen(2048)
    return made


async def logged(log: Path, text: str) -> None:
    """Waits for a line in a log."""
    while text not in log.read_text():  # noqa: ASYNC240 - small
        await asyncio.sleep(0.05)


async def stop(process: subprocess.Popen[bytes]) -> None:
    """Stops a kvpin in order."""
    process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(process.wait)


async def run(way: str, engine: str, restarts: int, clients: int, directory: Path) -> Clients:
    """Restarts kvpin some times in one of the ways, under load."""
    shared = listen("127.0.0.1", 0)
    port = shared.getsockname()[1]
    if way in ("alone", "reuseport"):
        shared.close()
    load, log = Clients(f"http://127.0.0.1:{port}"), directory / f"{way}-0"
    process = start(way, port, shared, log, engine)
    await logged(log, "engine is ready")
    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(load.ask(keeps=number % 2 == 0))
        for number in range(1, restarts + 1):
            await load.answered(50)
            log = directory / f"{way}-{number}"
            if way in ("alone", "queue"):
                await stop(process)
            following = start(way, port, shared, log, engine)
            await logged(log, "engine is ready")
            if way in ("overlap", "reuseport"):
                await load.answered(50)
                await stop(process)
            process = following
        await load.answered(50)
        load.end()
    await stop(process)
    shared.close()
    return load


async def main() -> None:
    """Runs all ways and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--engine", help="KIND=URL of an engine that runs; by default an embedded one")
    parser.add_argument("--ways", default="alone,queue,overlap,reuseport")
    options = parser.parse_args()
    os.environ["ENABLE_KV_CACHE_REUSE"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        port, process = harness.free_port(), None
        if options.engine is None:
            program = [sys.executable, "-m", "engine_adapter.torch_engine", "--port", str(port)]
            process = subprocess.Popen(  # noqa: ASYNC220 - before the clients start
                [*program, "--threads", "1"], stderr=subprocess.DEVNULL
            )
        engine = options.engine or f"embedded=http://127.0.0.1:{port}"
        try:
            print("| way | answered | failed | longest request |\n|---|---:|---|---:|")
            for way in options.ways.split(","):
                load = await run(way, engine, options.restarts, options.clients, Path(directory))
                failed = {name: count for name, count in load.outcomes.items() if name != "200"}
                said = ", ".join(f"{count} {name}" for name, count in sorted(failed.items())) or "0"
                print(f"| {way} | {load.outcomes['200']} | {said} | {load.longest_s:.1f} s |", flush=True)
        finally:
            if process is not None:
                process.terminate()
                process.wait()


if __name__ == "__main__":
    asyncio.run(main())
