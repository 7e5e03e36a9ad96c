"""Real SGLangs of which one computes prompts, one answers, and one does both alone, for comparison."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from proxy.core.audit import Trust
from proxy.fleet.engine import EngineState
from proxy.request.records import RequestRecord
from proxy.settings import EngineSettings
from tests.fakes import is_tokenised
from tests.live.fake_world import FakeWorld, proxy_over, until
from tests.live.server_world import MODEL, free_port, installed
from tests.sglang_live.sglang_world import SglangOptions, running_sglang

BOOTSTRAP_PORTS = range(8900, 9000)
# The decode server keeps the KV of answers that it interrupts in memory of the CPU, as there is no GPU.
_FLAGS = {
    "p": ("--disaggregation-mode", "prefill"),
    "d": ("--disaggregation-mode", "decode", "--disaggregation-decode-retraction-backup", "cpu_tensor"),
}


def options_of(name: str) -> SglangOptions:
    """Of the server of that name."""
    report = ("--enable-cache-report",)
    if name not in _FLAGS:
        return SglangOptions(flags=report)
    port = str(free_port(BOOTSTRAP_PORTS))
    nixl = ("--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", port)
    path = {"PYTHONPATH": installed("sglang", "nixl")}
    return SglangOptions(flags=(*report, *_FLAGS[name], *nixl), environment=path)


@dataclass(frozen=True)
class RealHalves(FakeWorld):
    """kvpin over the servers `p` and `d`.

    Attributes:
        single: address of a server that does both, behind no kvpin.
    """

    single: str

    def is_read(self, name: str) -> bool:
        engine = self.engine(name)
        is_exact = name == "d" or engine.audit.trust is Trust.PRECISE
        return engine.state is EngineState.READY and is_exact

    async def done(self) -> RequestRecord:
        """The record of the last request, once it is over."""
        engines = self.proxy.fleet.pools[MODEL].engines
        await until(lambda: not any(engine.leases for engine in engines.values()))
        return self.last


@asynccontextmanager
async def real_halves(tmp_path: Path) -> AsyncIterator[RealHalves]:
    """kvpin over a pair, and a single server."""
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(running_sglang(tmp_path / f"{name}.log", options_of(name)))
            for name in ("p", "d", "single")
        }
        for server in running.values():
            server.wait()
        engines = [EngineSettings(id=name, kind="sglang", url=running[name].url) for name in "pd"]
        async with proxy_over(engines, (), interval_s=5.0) as made:
            world = RealHalves(*made, running["single"].url)
            await until(lambda: all(map(world.is_read, "pd")) and is_tokenised(world.proxy))
            yield world
