"""Real vLLMs with a NixlConnector: some compute prompts, others pull their KV and answer.

kvpin runs in this process, so that the engines that answer can be made to look slow: else, with a model this
small, no pair would be worth its transfer.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from proxy.core.audit import Trust
from proxy.core.placement.placer import Placer
from proxy.fleet.pool import Pool
from proxy.request.records import RequestRecord
from proxy.settings import EngineSettings
from tests.fakes import is_tokenised
from tests.live.fake_world import FakeWorld, proxy_over, until
from tests.live.server_world import MODEL, ROOT, RunningServer, free_port
from tests.vllm_live.vllm_world import VllmOptions, running_vllm

BLOCKS = 200
SIDE_CHANNELS = range(5600, 5700, 2)
ROLES = {"p": "kv_producer", "d": "kv_consumer", "b": "kv_both"}
CONNECTOR = {
    "kv_connector": "NixlConnector",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
}
_FETCHED = 'source="external_kv_transfer"'


def nixl() -> str:
    """The directories that contain NIXL for the vLLM of scripts/vllm; installs it on first use."""
    command = [ROOT / "scripts" / "vllm", "nixl"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def with_connector(name: str) -> VllmOptions:
    """Of an engine of that name. In dev mode, it tells kvpin its role."""
    connector = CONNECTOR | {"kv_role": ROLES[name[0]]}
    return VllmOptions(
        blocks=BLOCKS,
        flags=("--kv-transfer-config", json.dumps(connector), "--enable-scale-out"),
        environment={
            "PYTHONPATH": nixl(),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(SIDE_CHANNELS)),
        },
    )


@dataclass(frozen=True)
class RealPairs(FakeWorld):
    """kvpin, and the addresses of the engines behind it: `p0`, `p1` … compute prompts, `d0` … answer, `b0` …
    do both."""

    servers: dict[str, str]
    running: dict[str, RunningServer]
    start: Callable[[str], RunningServer]

    async def restart(self, name: str) -> None:
        """Starts an engine that was killed, at its address, and waits until it is used."""
        self.running[name] = await asyncio.to_thread(self.start, name)
        await until(lambda: self.is_quiet(name) and self.is_read(name))

    @property
    def pool(self) -> Pool:
        return self.proxy.fleet.pools[MODEL]

    @property
    def placer(self) -> Placer:
        return self.pool.placer

    def named(self, kind: str) -> list[str]:
        return [name for name in self.servers if name.startswith(kind)]

    async def pace(self, pace: float, kind: str = "d") -> None:
        """Engines that answer look so slow, once kvpin uses them: on a busy machine, they may be lost."""
        for name in self.named(kind):
            await until(lambda name=name: name in self.placer.books)
            self.placer.books[name].rates.pace = pace

    def is_read(self, name: str) -> bool:
        return self.engine(name).audit.trust is Trust.PRECISE

    async def done(self) -> RequestRecord:
        """The record of the last request, once it is over."""
        await until(lambda: not any(engine.leases for engine in self.pool.engines.values()))
        return self.last

    async def fetched_tokens(self) -> float:
        """Prompt tokens whose KV came from other engines, by the servers' own counts."""
        total = 0.0
        for name in (*self.named("d"), *self.named("b")):
            lines = (await self.client.get(f"{self.servers[name]}/metrics")).text.splitlines()
            named = [line for line in lines if line.startswith("vllm:prompt_tokens_by_source_total")]
            total += sum(float(line.split()[-1]) for line in named if _FETCHED in line)
        return total


@asynccontextmanager
async def real_pairs(tmp_path: Path, pairs: int, kinds: str = "pd") -> AsyncIterator[RealPairs]:
    """kvpin over so many engines of each kind."""
    names = [f"{kind}{number}" for number in range(pairs) for kind in kinds]
    options = {name: with_connector(name) for name in names}
    running = dict[str, RunningServer]()
    with ExitStack() as stack:

        def start(name: str) -> RunningServer:
            last = running.get(name)
            ports = {"port": last.port, "event_port": last.event_port} if last is not None else {}
            server = stack.enter_context(running_vllm(tmp_path / f"{name}.log", options[name], **ports))
            server.wait()
            return server

        for name in names:
            running[name] = start(name)
        engines = [EngineSettings(id=name, kind="vllm", url=server.url) for name, server in running.items()]
        async with proxy_over(engines, (), interval_s=5.0) as made:
            urls = {name: server.url for name, server in running.items()}
            world = RealPairs(*made, urls, running, start)
            await until(lambda: all(map(world.is_read, names)) and is_tokenised(world.proxy))
            yield world
