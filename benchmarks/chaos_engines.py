"""The engines of `chaos.py`, each a process behind relays that can be killed, stopped and filled up."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from chaos_relay import HOST, EventRelay, Relay
from harness import ROOT, free_port, llama_command
from router_work import MODEL as MOCK_MODEL

MOCK, EMBEDDED, LLAMA = MOCK_MODEL, "kvpin-tiny", "llama"
"""The names of the models that the engines of each kind serve."""
START_S = 300.0
# A file that may not grow is an error for the process, not its end.
_OUTLIVES_FULL_FILES = ("sh", "-c", "trap '' XFSZ; exec \"$@\"", "sh")


@dataclass(slots=True)
class Engine:
    """One engine.

    Attributes:
        id: its name at kvpin.
        model: what it serves.
        command: starts it.
        port: where it listens, after every start.
        option: what kvpin is told of it: its kind and more, with `{url}` for its address.
    """

    id: str
    model: str
    command: Sequence[str]
    port: int
    option: str
    relay: Relay
    events: EventRelay | None = None
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        """Starts the process; does not wait for it."""
        self.process = subprocess.Popen(
            [*_OUTLIVES_FULL_FILES, *self.command, "--port", str(self.port)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    async def until_healthy(self) -> None:
        """Returns once it serves. Raises TimeoutError."""
        async with httpx.AsyncClient() as client, asyncio.timeout(START_S):
            while True:
                try:
                    if (await client.get(f"http://{HOST}:{self.port}/health", timeout=2)).is_success:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)

    async def open(self) -> str:
        """Starts its relays. Returns what kvpin is told of the engine."""
        await self.relay.start()
        if self.events is not None:
            self.events.start()
        return self.option.format(url=self.relay.url)

    async def close(self) -> None:
        """Ends it and its relays."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                await asyncio.to_thread(self.process.wait, 20)
            except subprocess.TimeoutExpired:
                self.kill()
        await self.relay.stop()
        if self.events is not None:
            self.events.stop()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


def limit_files(pid: int, *, full: bool) -> None:
    """A disk without room, for one process: none of its files may have more than 0 bytes. Needs no rights."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if full else hard, hard))


def mock_engine(number: int, dice: random.Random) -> Engine:
    """A vLLM without a model, with the cache of one. Its events come through a relay."""
    port, events, replay = free_port(), free_port(), free_port()
    script = ROOT / "benchmarks" / "mock_engine.py"
    rates = ("--kv-tokens", "12000", "--prefill-rate", "8000", "--token-ms", "40")
    command = [sys.executable, str(script), *rates, "--event-ports", str(events), str(replay)]
    name, relay = f"mock-{number}", EventRelay(f"tcp://{HOST}:{events}", dice)
    option = f"vllm={{url}},id={name},events={relay.endpoint},replay=tcp://{HOST}:{replay}"
    return Engine(name, MOCK, command, port, option, Relay(port, dice), relay)


def embedded_engine(number: int, dice: random.Random) -> Engine:
    """An embedded engine with its tiny model and a cache that is too small."""
    sizes = ("--threads", "1", "--kv-blocks", "192", "--host-cache-bytes", "4MiB")
    command = [sys.executable, "-m", "engine_adapter.torch_engine", *sizes]
    name, port = f"embedded-{number}", free_port()
    return Engine(name, EMBEDDED, command, port, f"embedded={{url}},id={name}", Relay(port, dice))


def llama_engine(number: int, dice: random.Random, directory: Path) -> Engine:
    """A llama-server with fewer slots than conversations, which saves to `directory`."""
    sys.path.insert(0, str(ROOT))
    from scripts.make_gguf import gguf_path  # noqa: PLC0415 - needs packages that the other engines do not

    command = llama_command(gguf_path("tiny"), "--cache-ram", "0", slots=4, ctx=2048, save_dir=directory)
    name, port = f"llama-{number}", free_port()
    option = f"llama_server={{url}},id={name},model={LLAMA},host_cache_dir={directory}"
    return Engine(name, LLAMA, command, port, option, Relay(port, dice))


def open_sockets(pid: int) -> int:
    """Files of a process that are sockets."""
    count = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += str(path.readlink()).startswith("socket:")
        except FileNotFoundError:  # closed meanwhile
            continue
    return count


def resident_mb(pid: int) -> float:
    """Memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1e6
