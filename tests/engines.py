"""Real embedded engines for tests: one shared process, more on demand, and servers in a thread."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvicorn
from starlette.types import ASGIApp

from engine_adapter import EngineSpec, make_options
from tests.forks import Forked, start
from tests.processes import address_in, answers, wait_until

START_S = 120.0
STOP_S = 30.0
DEFAULT_FLAGS = ("--kv-blocks", "256", "--host-cache-bytes", str(64 << 20))
"""Flags of the shared engine: 256 blocks of 16 tokens, and a host tier."""


def engine_spec(kind: str, url: str, engine_id: str = "e", **fields) -> EngineSpec:
    """A description whose `fields` are those of every engine and those of its kind."""
    common = {name: fields.pop(name) for name in EngineSpec.__slots__ if name in fields}
    return EngineSpec(kind, url, engine_id, **common, options=make_options(kind, fields))


@dataclass(slots=True)
class RunningEngine:
    """A `kvpin engine` process that answers at `url`."""

    url: str
    process: subprocess.Popen[bytes] | Forked = field(repr=False)
    log: Path = field(repr=False)

    def kill(self) -> None:
        """Ends it at once, as a crash would."""
        self.process.kill()
        self.process.wait(STOP_S)


@contextmanager
def running_engine(log: Path, *flags: str, program: Sequence[str] = ()) -> Iterator[RunningEngine]:
    """Starts an engine with `flags` on a free port; yields it once it serves; ends it. `program`: Python's
    arguments that run it, instead of a fork."""
    words = ("--port", "0", "--threads", "1", "--exit-with-parent", *flags)
    with log.open("wb") as output:
        process: subprocess.Popen[bytes] | Forked
        if program:
            process = subprocess.Popen(
                [sys.executable, *program, *words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        else:
            process = start("engine_adapter.torch_engine", *words, output=output, with_input=True)
    try:
        pattern = r"listening on (http://\S+?),"
        url = wait_until(lambda: address_in(log, pattern), process, log, START_S)
        wait_until(lambda: answers(f"{url}/health"), process, log, START_S)
        yield RunningEngine(url, process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
        if process.stdin is not None:
            process.stdin.close()


class QuickServer(uvicorn.Server):
    """Without signal handlers, and without uvicorn's ticks and pauses of 0.1 s: tests end at once."""

    GRACE_S = 0.2

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._over = asyncio.Event()

    def stop(self) -> None:
        """Ends it; also from another thread."""
        self._loop.call_soon_threadsafe(self._over.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._over.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        state, ends = self.server_state, self._loop.time() + self.GRACE_S
        for connection in [*state.connections]:
            connection.shutdown()
        while (state.connections or state.tasks) and self._loop.time() < ends:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)
        for task in state.tasks:
            task.cancel()
        await self.lifespan.shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def served(app: ASGIApp, **options) -> Iterator[str]:
    """Serves an ASGI app on a free port in a thread, with options of uvicorn; yields its address."""
    config = uvicorn.Config(app, port=0, log_config=None, log_level="error", access_log=False, **options)
    server = QuickServer(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            pytest.fail("the server did not start")
        time.sleep(0.001)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()
        thread.join(STOP_S)


@pytest.fixture(scope="session")
def embedded_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """One engine for the whole session. Tests share its cache: use prompts or salts of your own."""
    with running_engine(tmp_path_factory.mktemp("engine") / "log", *DEFAULT_FLAGS) as engine:
        yield engine


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[Callable[..., RunningEngine]]:
    """Starts engines of a test's own: `start_engine("--kv-blocks", "64")`. Each takes seconds."""
    with ExitStack() as engines:
        count = 0

        def start(*flags: str) -> RunningEngine:
            nonlocal count
            count += 1
            return engines.enter_context(running_engine(tmp_path / f"engine-{count}.log", *flags))

        yield start
