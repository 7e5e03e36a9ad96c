"""kvpin in this process and loop, over SGLang fakes on sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from engine_adapter import Capability, HttpTransport
from proxy.app import Proxy, build_app
from proxy.core.audit import Trust
from proxy.fleet.engine import Engine, EngineState
from proxy.request.records import RequestRecord
from proxy.settings import ApiKeySettings, EngineSettings, HealthSettings, Settings
from tests.fake_engines.sglang import RunningSglang
from tests.fakes import is_tokenised, serving

KEYS = {"one": "key-of-one", "two": "key-of-two"}
DEADLINE_S = 60.0


@dataclass(frozen=True)
class SglangWorld:
    """A proxy and the fakes behind it, by engine id: the server, and the rank of it."""

    url: str
    proxy: Proxy
    fakes: dict[str, tuple[RunningSglang, int]]
    client: httpx.AsyncClient

    def engine(self, name: str = "e") -> Engine:
        return self.proxy.fleet.engines[name]

    @property
    def last(self) -> RequestRecord:
        return list(self.proxy.flow.requests)[-1]

    async def post(self, path: str, body: dict, tenant: str | None = None) -> httpx.Response:
        """A request, once kvpin knows all that the engines have told."""
        await self.settle()
        headers = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
        return await self.client.post(f"{self.url}/v1/{path}", json=body, headers=headers)

    async def operate(self, verb: str, **target: object) -> dict:
        """An operation of the admin API, once it is over."""
        answer = await self.client.post(f"{self.url}/admin/v1/{verb}", json=target)
        path = f"{self.url}/admin/v1/operations/{answer.json()['id']}"
        while (operation := (await self.client.get(path)).json())["state"] == "running":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return operation

    async def settle(self) -> None:
        """Waits until every engine is ready and its view is what its events have told."""
        for name in self.fakes:
            await until(lambda name=name: self._is_settled(name))

    def _is_settled(self, name: str) -> bool:
        running, rank = self.fakes[name]
        engine = self.engine(name)
        if engine.state is not EngineState.READY or engine.ledger.in_flight or not is_tokenised(self.proxy):
            return False
        if not engine.can(Capability.KV_EVENTS):
            return True
        view = engine.view
        seen = [view.counts.stored, view.counts.removed] if view is not None else None
        return engine.audit.trust is Trust.PRECISE and seen == running.told(rank)


async def until(is_so: Callable[[], bool]) -> None:
    """Waits for it; fails when that does not come."""
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():  # noqa: ASYNC110 - state of other threads
            await asyncio.sleep(0.002)


@asynccontextmanager
async def kvpin_over(
    *fakes: tuple[RunningSglang, int | None], tenants: tuple[str, ...] = (), **engine: str
) -> AsyncIterator[SglangWorld]:
    """A proxy over these servers; with a rank, one engine for it."""
    names = ["e" if len(fakes) == 1 else f"e{at}" for at in range(len(fakes))]
    settings = Settings(
        reuse=True,
        engines=tuple(
            EngineSettings(id=name, kind="sglang", url=running.url, dp_rank=rank, **engine)
            for name, (running, rank) in zip(names, fakes, strict=True)
        ),
        api_keys=tuple(ApiKeySettings(key=KEYS[tenant], tenant=tenant) for tenant in tenants),
        health=HealthSettings(interval_s=0.05),
    )
    proxy = Proxy(settings, HttpTransport())
    behind = {name: (running, rank or 0) for name, (running, rank) in zip(names, fakes, strict=True)}
    proxy.start()
    try:
        async with serving(build_app(proxy)) as url, httpx.AsyncClient(trust_env=False, timeout=30) as client:
            yield SglangWorld(url, proxy, behind, client)
    finally:
        await proxy.stop()
