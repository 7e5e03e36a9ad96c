"""kvpin over SGLang fakes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine_adapter import Capability
from proxy.core.audit import Trust
from proxy.settings import EngineSettings
from tests.fake_engines.sglang import RunningSglang
from tests.live.fake_world import FakeWorld, proxy_over


@dataclass(frozen=True)
class SglangWorld(FakeWorld):
    """A proxy and the fakes behind it, by engine id: the server, and the rank of it."""

    fakes: dict[str, tuple[RunningSglang, int]]

    def is_read(self, name: str) -> bool:
        """See `FakeWorld.is_read`."""
        running, rank = self.fakes[name]
        engine = self.engine(name)
        if not engine.can(Capability.KV_EVENTS):
            return True
        view = engine.view
        seen = [view.counts.stored, view.counts.removed] if view is not None else None
        return engine.audit.trust is Trust.PRECISE and seen == running.told(rank)


@asynccontextmanager
async def kvpin_over(
    *fakes: tuple[RunningSglang, int | None], tenants: tuple[str, ...] = (), **engine: str
) -> AsyncIterator[SglangWorld]:
    """A proxy over these servers; with a rank, one engine for it."""
    behind = {"e" if len(fakes) == 1 else f"e{at}": fake for at, fake in enumerate(fakes)}
    engines = [
        EngineSettings(id=name, kind="sglang", url=running.url, dp_rank=rank, **engine)
        for name, (running, rank) in behind.items()
    ]
    async with proxy_over(engines, tenants, interval_s=0.05) as made:
        yield SglangWorld(*made, {name: (running, rank or 0) for name, (running, rank) in behind.items()})
