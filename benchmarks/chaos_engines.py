"""The engines of `chaos.py`, each a process behind relays that can be killed, stopped and filled up."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        model: the served name.
        command: starts it.
        port: the same after every start.
        settings: its entry in kvpin's settings, without id and address.
    """

    id: str
    model: str
    command: Sequence[str]
    port: int
    settings: dict[str, Any]
    relay: Relay
    events: EventRelay | None = None
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self, *more: str) -> None:
        """Starts the process, with `more` flags; does not wait for it."""
        self.process = subprocess.Popen(
            [*_OUTLIVES_FULL_FILES, *self.command, "--port", str(self.port), *more],
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

    @property
    def entry(self) -> dict[str, Any]:
        """Its entry in kvpin's settings, once its relays listen."""
        return {"id": self.id, "url": self.relay.url, **self.settings}

    async def open(self) -> None:
        """Starts its relays."""
        await self.relay.start()
        if self.events is not None:
            self.events.start()

    async def close(self) -> None:
        """Ends the engine and its relays."""
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
        """Sends SIGKILL."""
        self.process.kill()
        self.process.wait()


def limit_files(pid: int, *, full: bool) -> None:
    """A disk without room, for one process: none of its files may have more than 0 bytes. Needs no rights."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if full else hard, hard))


def mock_engine(
    number: int, dice: random.Random, flags: Sequence[str] = (), settings: Mapping[str, Any] | None = None
) -> Engine:
    """A vLLM without a model, with the cache of one and texts of its own. Its events come through a relay."""
    port, events, replay = free_port(), free_port(), free_port()
    script = str(ROOT / "benchmarks" / "chaos_mock.py")
    command = [sys.executable, script, "--number", str(number), "--event-ports", str(events), str(replay)]
    command += flags
    relay = EventRelay(f"tcp://{HOST}:{events}", dice)
    own = {"kind": "vllm", "events": relay.endpoint, "replay": f"tcp://{HOST}:{replay}", **(settings or {})}
    return Engine(f"mock-{number}", MOCK, command, port, own, Relay(port, dice), relay)


def embedded_engine(number: int, dice: random.Random) -> Engine:
    """An embedded engine with its tiny model and a cache that is too small."""
    sizes = ("--threads", "1", "--kv-blocks", "192", "--host-cache-bytes", "4MiB")
    command = [sys.executable, "-m", "engine_adapter.torch_engine", *sizes]
    port = free_port()
    return Engine(f"embedded-{number}", EMBEDDED, command, port, {"kind": "embedded"}, Relay(port, dice))


def llama_engine(number: int, dice: random.Random, directory: Path) -> Engine:
    """A llama-server with fewer slots than conversations, which saves to `directory`."""
    sys.path.insert(0, str(ROOT))
    from scripts.make_gguf import gguf_path  # noqa: PLC0415 - needs packages that the other engines do not

    command = llama_command(gguf_path("tiny"), "--cache-ram", "0", slots=4, ctx=2048, save_dir=directory)
    port = free_port()
    settings = {"kind": "llama_server", "model": LLAMA, "host_cache_dir": str(directory)}
    return Engine(f"llama-{number}", LLAMA, command, port, settings, Relay(port, dice))


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
