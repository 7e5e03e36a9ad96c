"""kvpin in this process and loop, over a TensorRT-LLM fake on a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from engine_adapter import HttpTransport, Tier
from proxy.app import Proxy, build_app
from proxy.fleet.engine import Engine, EngineState
from proxy.request.records import RequestRecord
from proxy.settings import ApiKeySettings, EngineSettings, HealthSettings, Settings
from tests.fake_engines.tensorrt_llm import FakeTrtllm, RunningTrtllm
from tests.fake_engines.text import MODEL_DIR
from tests.fakes import is_tokenised, serving

KEYS = {"one": "key-of-one", "two": "key-of-two"}
DEADLINE_S = 60.0


@dataclass(frozen=True)
class TrtllmWorld:
    """A proxy and the fake behind it."""

    url: str
    proxy: Proxy
    fake: FakeTrtllm
    client: httpx.AsyncClient

    @property
    def engine(self) -> Engine:
        return self.proxy.fleet.engines["e"]

    @property
    def last(self) -> RequestRecord:
        return list(self.proxy.flow.requests)[-1]

    async def post(self, path: str, body: dict, tenant: str | None = None) -> httpx.Response:
        """A request, once kvpin knows all that the engine has told."""
        await until(self.is_settled)
        headers = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
        return await self.client.post(f"{self.url}/v1/{path}", json=body, headers=headers)

    async def operate(self, verb: str, **target: object) -> dict:
        """An operation of the admin API, once it is over."""
        answer = await self.client.post(f"{self.url}/admin/v1/{verb}", json=target)
        path = f"{self.url}/admin/v1/operations/{answer.json()['id']}"
        while (operation := (await self.client.get(path)).json())["state"] == "running":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return operation

    def is_settled(self) -> bool:
        """Whether all that the engine has told was read, and is what it holds."""
        engine, cache = self.engine, self.fake.cache
        if engine.state is not EngineState.READY or engine.ledger.in_flight or not is_tokenised(self.proxy):
            return False
        reader = getattr(engine.adapter, "_inner", engine.adapter)._poller.reader  # a NIM's, or its own
        known, held = reader.blocks(), [cache.on_gpu, len(cache.on_host)]
        is_read = reader._last == self.fake.events._next - 1
        return is_read and [known[Tier.GPU], known[Tier.HOST]] == held


async def until(is_so: Callable[[], bool]) -> None:
    """Waits for it, and a turn of the loop longer; fails when that does not come."""
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():  # noqa: ASYNC110 - state of other threads
            await asyncio.sleep(0.002)
        await asyncio.sleep(0)


@asynccontextmanager
async def kvpin_over(
    server: RunningTrtllm, *tenants: str, kind: str = "tensorrt_llm", **engine: str
) -> AsyncIterator[TrtllmWorld]:
    """A proxy over this server."""
    engine.setdefault("tokenizer", str(MODEL_DIR))
    settings = Settings(
        reuse=True,
        engines=(EngineSettings(id="e", kind=kind, url=server.url, **engine),),
        api_keys=tuple(ApiKeySettings(key=KEYS[tenant], tenant=tenant) for tenant in tenants),
        health=HealthSettings(interval_s=0.2),
    )
    proxy = Proxy(settings, HttpTransport())
    proxy.start()
    try:
        async with (
            serving(build_app(proxy)) as url,
            httpx.AsyncClient(trust_env=False, timeout=30, verify=False) as client,  # noqa: S501
        ):
            world = TrtllmWorld(url, proxy, server.fake, client)
            await until(lambda: world.engine.state is EngineState.READY)
            yield world
    finally:
        await proxy.stop()
