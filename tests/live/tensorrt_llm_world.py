"""kvpin over a TensorRT-LLM fake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine_adapter import Tier
from proxy.fleet.engine import EngineState
from proxy.settings import EngineSettings
from tests.fake_engines.tensorrt_llm import FakeTrtllm, RunningTrtllm
from tests.fake_engines.text import MODEL_DIR
from tests.live.fake_world import FakeWorld, proxy_over, until


@dataclass(frozen=True)
class TrtllmWorld(FakeWorld):
    """A proxy and the fake behind it."""

    fake: FakeTrtllm

    def is_read(self, name: str) -> bool:
        """Whether all that the engine has told was read, and is what it holds."""
        adapter, cache = self.engine(name).adapter, self.fake.cache
        if self.fake.publisher is not None:  # events do not tell what lies on the host
            position = adapter.event_position()
            taken = -1 if position is None else position.sequence
            return taken == self.fake.publisher.published - 1 and adapter._watch.blocks == len(cache)
        reader = getattr(adapter, "_inner", adapter)._poller.reader  # a NIM's, or its own
        known, held = reader.blocks(), [cache.on_gpu, len(cache.on_host)]
        is_read = reader._last == self.fake.events._next - 1
        return is_read and [known[Tier.GPU], known[Tier.HOST]] == held


@asynccontextmanager
async def kvpin_over(
    server: RunningTrtllm, *tenants: str, kind: str = "tensorrt_llm", **engine: str
) -> AsyncIterator[TrtllmWorld]:
    """A proxy over this server."""
    engine.setdefault("tokenizer", str(MODEL_DIR))
    engines = [EngineSettings(id="e", kind=kind, url=server.url, **engine)]
    async with proxy_over(engines, tenants, interval_s=0.2) as made:
        world = TrtllmWorld(*made, server.fake)
        await until(lambda: world.engine().state is EngineState.READY)
        yield world
