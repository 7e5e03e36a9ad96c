"""Real vLLMs with a kvpin in front, for live tests and benchmarks.

vllm_world(tmp_path, servers=2)  →  clients → kvpin → vLLMs on a CPU, each with its own cache and events
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.make_checkpoint import RANK, checkpoint_path
from tests.live.conftest import Kvpin, running_kvpin
from tests.processes import answers, wait_until

ROOT = Path(__file__).parents[2]
MODEL, LORA = "tiny", "ada"
BLOCK = 32  # tokens; attention on a CPU takes multiples of 32
START_S = 300.0
STOP_S = 60.0
WAIT_S = 120.0
POLL_S = 0.02
# Below the ephemeral ports, so that none is taken while an engine starts or restarts.
HTTP_PORTS = range(8200, 8300)
EVENT_PORTS = range(5800, 5998, 2)


@functools.cache
def vllm() -> str:
    """Path of the command, which is installed on first use (minutes). A failed installation fails the
    test."""
    install = subprocess.run([ROOT / "scripts" / "vllm"], capture_output=True, text=True, check=False)
    if install.returncode:
        pytest.fail(f"scripts/vllm ended with {install.returncode}:\n{install.stderr}", pytrace=False)
    return install.stdout.strip()


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How a vLLM is started.

    Attributes:
        blocks: cache size in blocks of 32 tokens; vLLM keeps one of them.
        context: `--max-model-len`, in tokens; a request of that length must fit into the blocks.
        buffer_steps: event batches in its replay buffer.
        model: directory of another model, without a LoRA adapter.
        flags: more flags, which override the others.
        environment: more environment variables.
    """

    blocks: int = 100
    context: int = 1024
    buffer_steps: int = 10_000
    model: Path | None = None
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class RunningVllm:
    """A started vLLM; `wait` until it answers at `url`.

    Attributes:
        event_port: port of its events; the next one is for replays.
    """

    port: int
    event_port: int
    process: subprocess.Popen[bytes] = field(repr=False)
    log: Path = field(repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Returns once it serves."""
        wait_until(lambda: answers(f"{self.url}/health"), self.process, self.log, START_S)

    def kill(self) -> None:
        """Kills it and its workers at once."""
        _kill_group(self.process)


@contextmanager
def running_vllm(
    log: Path, options: VllmOptions | None = None, *, port: int = 0, event_port: int = 0
) -> Iterator[RunningVllm]:
    """Starts a vLLM, yields it at once, and ends it. Without ports it takes free ones."""
    options = options or VllmOptions()
    port = port or free_port(HTTP_PORTS)
    event_port = event_port or free_port(EVENT_PORTS)
    with log.open("wb") as output:
        process = subprocess.Popen(
            ("sh", "-c", _UNTIL_STDIN_ENDS, "sh", vllm(), *_arguments(options, port, event_port)),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT, **options.environment},
            start_new_session=True,
        )
    try:
        yield RunningVllm(port, event_port, process, log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        _kill_group(process)


# Runs a command with a watcher in its process group, which ends both when standard input closes. vLLM's
# workers survive its death otherwise, and vLLM survives that of the tests.
_UNTIL_STDIN_ENDS = 'exec 3<&0; { cat <&3; kill -KILL 0; } & exec "$@" 3<&- </dev/null'

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def _arguments(options: VllmOptions, port: int, event_port: int) -> list[str]:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{event_port}",
        "replay_endpoint": f"tcp://*:{event_port + 1}",
        "buffer_steps": options.buffer_steps,
        "topic": f"kv@{MODEL}",
    }
    model = options.model or checkpoint_path("model")
    lora = f"--enable-lora --max-lora-rank {RANK} --lora-modules {LORA}={checkpoint_path('lora')}".split()
    return [
        *("serve", str(model), "--served-model-name", MODEL, "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-num-seqs", "8"),
        *("--max-model-len", str(options.context), "--num-gpu-blocks-override", str(options.blocks)),
        *("--block-size", str(BLOCK), "--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *(() if options.model else lora),
        *("--kv-events-config", json.dumps(events)),
        *options.flags,
    ]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_S)
    if process.stdin is not None:
        process.stdin.close()


def free_port(ports: Sequence[int]) -> int:
    """A port that is free, as is the next one."""
    for port in random.sample(ports, len(ports)):
        try:
            with socket.create_server(("", port)), socket.create_server(("", port + 1)):
                return port
        except OSError:
            continue
    pytest.fail(f"no free port from {ports[0]} to {ports[-1]}")


@dataclass(slots=True)
class VllmWorld:
    """vLLMs and the kvpin in front of them. The engine of server n is called `vllm-n`.

    Attributes:
        kvpin: the running proxy; another one after `restart_kvpin`.
        servers: the running vLLMs; another one at its place after `restart`.
    """

    kvpin: Kvpin
    servers: list[RunningVllm]
    _start_server: Callable[[int, int], RunningVllm] = field(repr=False)
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
        """What kvpin reports of an engine."""
        return self.kvpin.engines().get(f"vllm-{number}", {"state": "unconnected", "trust": None})

    def record(self, request_id: str) -> dict[str, Any]:
        """kvpin's record of a finished request."""

        def finished() -> dict[str, Any] | None:
            answer = self.kvpin.admin("GET", f"requests/{request_id}")
            return answer.json() if answer.status_code == httpx.codes.OK else None

        return self.until(finished, f"the record of {request_id}")

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        """Polls until `holds` returns something true, and returns that."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if result := holds():
                return result
            time.sleep(POLL_S)
        raise AssertionError(f"{what} did not come to be:\n{self.kvpin.log.read_text()}")

    def until_exact(self, number: int = 0) -> None:
        """Waits until an engine is ready and kvpin's view of it is up to date."""

        def is_exact() -> bool:
            engine = self.engine(number)
            return engine["state"] == "ready" and engine["trust"] == "precise"

        self.until(is_exact, f"an exact view of engine {number}")

    def restart(self, number: int = 0) -> None:
        """Kills a vLLM and starts another on the same ports, without telling kvpin."""
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


@contextmanager
def vllm_world(
    tmp_path: Path,
    options: VllmOptions | None = None,
    *,
    servers: int = 1,
    options_of: Callable[[RunningVllm], str] | None = None,
    kvpin_flags: tuple[str, ...] = (),
) -> Iterator[VllmWorld]:
    """Starts vLLMs and a kvpin with reuse in front of them; ends all of them, kvpin cleanly.

    Args:
        tmp_path: for logs.
        options: of every vLLM.
        servers: how many.
        options_of: further options of the `--engine` of a server, e.g. where its events are to be read.
        kvpin_flags: further flags of `kvpin serve`.
    """
    with ExitStack() as stack, ExitStack() as proxies:
        starts = 0

        def log(name: str) -> Path:
            nonlocal starts
            starts += 1
            return tmp_path / f"{name}-{starts}.log"

        def start_server(port: int = 0, event_port: int = 0) -> RunningVllm:
            return stack.enter_context(running_vllm(log("vllm"), options, port=port, event_port=event_port))

        running = [start_server() for _ in range(servers)]
        for server in running:
            server.wait()
        engines = [
            f"--engine=vllm={server.url},id=vllm-{number}{',' + options_of(server) if options_of else ''}"
            for number, server in enumerate(running)
        ]

        def start_kvpin() -> Kvpin:
            return proxies.enter_context(running_kvpin(log("kvpin"), *engines, *kvpin_flags))

        world = VllmWorld(start_kvpin(), running, start_server, start_kvpin, proxies.close)
        for number in range(servers):
            world.until_exact(number)
        yield world
