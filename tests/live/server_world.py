"""Real inference servers with a kvpin in front, for live tests: the parts that all kinds share.

running_server(log, command, …)   →  one server as a process group, ended with the tests
server_world(tmp_path, "vllm", …) →  clients → kvpin → several servers, which can be restarted
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_adapter import BlocksRemoved, EngineUnavailable
from engine_adapter.events.fields import KeyReader
from engine_adapter.events.subscriber import EventEndpoints, KvEventSubscriber
from tests.live.answers import until
from tests.live.conftest import Kvpin, running_kvpin
from tests.processes import answers, wait_until

ROOT = Path(__file__).parents[2]
MODEL = "tiny"
"""The name by which every server serves its model."""
START_S = 300.0
STOP_S = 60.0
WAIT_S = 120.0


def installed(script: str, *arguments: str) -> str:
    """What a script of scripts/ prints, which installs the server on first use (minutes). A failed
    installation fails the test."""
    command = [ROOT / "scripts" / script, *arguments]
    install = subprocess.run(command, capture_output=True, text=True, check=False)
    if install.returncode:
        pytest.fail(f"scripts/{script} ended with {install.returncode}:\n{install.stderr}", pytrace=False)
    return install.stdout.strip()


@dataclass(slots=True)
class RunningServer:
    """A started server; `wait` until it answers at `url`.

    Attributes:
        event_port: first port of its events.
        ready: path that answers 200 once it serves.
    """

    port: int
    event_port: int
    ready: str
    process: subprocess.Popen[bytes] = field(repr=False)
    log: Path = field(repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Returns once it serves."""
        wait_until(lambda: answers(self.url + self.ready), self.process, self.log, START_S)

    def kill(self) -> None:
        """Kills it and its workers at once."""
        _kill_group(self.process)


@contextmanager
def running_server(
    log: Path,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    port: int,
    event_port: int,
    ready: str = "/health",
) -> Iterator[RunningServer]:
    """Starts a server, yields it at once, and ends it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ("sh", "-c", _UNTIL_STDIN_ENDS, "sh", *command),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
            start_new_session=True,
        )
    try:
        yield RunningServer(port, event_port, ready, process, log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        _kill_group(process)


# Runs a command with a watcher in its process group, which ends both when standard input closes. The workers
# of these servers survive its death otherwise, and the servers survive that of the tests.
_UNTIL_STDIN_ENDS = 'exec 3<&0; { cat <&3; kill -KILL 0; } & exec "$@" 3<&- </dev/null'


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_S)
    if process.stdin is not None:
        process.stdin.close()


_given: set[int] = set()


def free_port(ports: Sequence[int]) -> int:
    """A port that is free, as is the next one. Ports given before come last: their server may yet begin to
    listen."""
    for port in sorted(random.sample(ports, len(ports)), key=lambda port: port in _given):
        try:
            with socket.create_server(("", port)), socket.create_server(("", port + 1)):
                _given.update((port - 1, port, port + 1))
                return port
        except OSError:
            continue
    pytest.fail(f"no free port from {ports[0]} to {ports[-1]}")


def passed(tell: Callable[..., None], *tests: str, **environment: str) -> int:
    """Runs tests of the contract suite with real servers, which `environment` names: all pass. Returns their
    number."""
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    variables = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    summary = done.stdout.strip().rpartition("\n")[2]
    tell(summary)
    assert done.returncode == 0, done.stdout
    found = re.search(r"(\d+) passed", summary)
    assert found is not None
    return int(found[1])


StartServer = Callable[[Path, int, int], AbstractContextManager[RunningServer]]
"""(log, HTTP port, event port; 0 for free ones) → a server that starts."""


@dataclass(slots=True)
class ServerWorld:
    """Servers of one kind and the kvpin in front of them. The engine of server n is called `KIND-n`; one of
    several ranks, `KIND-n-dpR`.

    Attributes:
        kvpin: the running proxy; another one after `restart_kvpin`.
        servers: the running servers; another one at its place after `restart`.
        engines: names of the engines of each server.
    """

    kvpin: Kvpin
    servers: list[RunningServer]
    engines: list[tuple[str, ...]]
    _start_server: Callable[[int, int], RunningServer] = field(repr=False)
    _start_kvpin: Callable[[], Kvpin] = field(repr=False)
    _stop_kvpin: Callable[[], None] = field(repr=False)

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        """Sends a data-plane request, e.g. to `chat/completions`, and expects 200."""
        url = f"{self.kvpin.base_url}/{path}"
        body = {"model": MODEL, "max_tokens": 8, "temperature": 0, **body}
        answer = httpx.post(url, json=body, timeout=WAIT_S, trust_env=False, **options)
        assert answer.is_success, answer.text
        return answer

    def admin(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        """Runs an admin operation to its end, e.g. `admin("flush", {"all": True})`."""
        operation = self.kvpin.admin("POST", verb, json=body).raise_for_status().json()
        assert operation["state"] == "done", operation
        return operation

    def engine(self, number: int = 0) -> dict[str, Any]:
        """What kvpin reports of a server's first engine."""
        return self._engine(self.engines[number][0])

    def record(self, request_id: str) -> dict[str, Any]:
        """kvpin's record of a finished request."""
        return self.kvpin.record(request_id)

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        """Polls until `holds` returns something true, and returns that."""
        return until(holds, what, self.kvpin.log.read_text)

    def until_exact(self, number: int = 0) -> None:
        """Waits until a server's engines are ready and kvpin's view of them is up to date."""

        def is_exact() -> bool:
            engines = map(self._engine, self.engines[number])
            return all(engine["state"] == "ready" and engine["trust"] == "precise" for engine in engines)

        self.until(is_exact, f"an exact view of server {number}")

    def restart(self, number: int = 0) -> None:
        """Kills a server and starts another on the same ports, without telling kvpin."""
        old = self.servers[number]
        old.kill()
        self.servers[number] = self._start_server(old.port, old.event_port)
        self.servers[number].wait()

    def restart_kvpin(self) -> None:
        """Stops kvpin cleanly and starts another with the same options."""
        self._stop_kvpin()
        self.kvpin = self._start_kvpin()
        for number in range(len(self.servers)):
            self.until_exact(number)

    def _engine(self, name: str) -> dict[str, Any]:
        return self.kvpin.engines().get(name, {"state": "unconnected", "trust": None})


async def count_evictions(port: int, read_keys: KeyReader, add: Callable[[int], None]) -> None:
    """Tells `add` the blocks that a server evicts, by its own events, also after its restart. Never ends."""
    endpoints = EventEndpoints(f"tcp://127.0.0.1:{port}", None)
    while True:
        with suppress(EngineUnavailable):
            subscriber = KvEventSubscriber(endpoints, read_keys=read_keys)
            async with aclosing(subscriber.events()) as events:
                async for event in events:
                    if isinstance(event, BlocksRemoved):
                        add(len(event.hashes))


@contextmanager
def server_world(
    tmp_path: Path,
    kind: str,
    start: StartServer,
    *,
    servers: int = 1,
    ranks: int = 1,
    options_of: Callable[[RunningServer], str] | None = None,
    kvpin_flags: tuple[str, ...] = (),
) -> Iterator[ServerWorld]:
    """Starts servers and a kvpin with reuse in front of them; ends all of them, kvpin cleanly.

    Args:
        tmp_path: for logs.
        kind: of engine.
        start: starts one of them.
        servers: how many.
        ranks: data-parallel ranks of each, which are an engine each.
        options_of: further options of the `--engine` of a server, e.g. where its events are to be read.
        kvpin_flags: further flags of `kvpin serve`.
    """
    with ExitStack() as stack, ExitStack() as proxies:
        starts = 0

        def log(name: str) -> Path:
            nonlocal starts
            starts += 1
            return tmp_path / f"{name}-{starts}.log"

        def start_server(port: int = 0, event_port: int = 0) -> RunningServer:
            return stack.enter_context(start(log(kind), port, event_port))

        running = [start_server() for _ in range(servers)]
        for server in running:
            server.wait()
        names = [f"{kind}-{number}" for number in range(servers)]
        engines = [
            f"--engine={kind}={server.url},id={name}{',' + options_of(server) if options_of else ''}"
            for name, server in zip(names, running, strict=True)
        ]

        def start_kvpin() -> Kvpin:
            return proxies.enter_context(running_kvpin(log("kvpin"), *engines, *kvpin_flags))

        of_ranks = [(name,) if ranks == 1 else tuple(f"{name}-dp{r}" for r in range(ranks)) for name in names]
        world = ServerWorld(start_kvpin(), running, of_ranks, start_server, start_kvpin, proxies.close)
        for number in range(servers):
            world.until_exact(number)
        yield world
