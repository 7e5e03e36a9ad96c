"""kvpin in this process and loop, over fake engines on sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from engine_adapter import HttpTransport
from proxy.fleet.engine import Engine, EngineState
from proxy.request.records import RequestRecord
from proxy.server.app import Proxy, build_app
from proxy.settings import ApiKeySettings, EngineSettings, HealthSettings, Settings
from tests.fakes import is_tokenised, serving

KEYS = {"one": "key-of-one", "two": "key-of-two"}
DEADLINE_S = 60.0


@dataclass(frozen=True)
class FakeWorld:
    """A proxy over fakes."""

    url: str
    proxy: Proxy
    client: httpx.AsyncClient

    def engine(self, name: str = "e") -> Engine:
        return self.proxy.fleet.engines[name]

    @property
    def last(self) -> RequestRecord:
        return list(self.proxy.flow.requests)[-1]

    async def post(self, path: str, body: dict, tenant: str | None = None) -> httpx.Response:
        """A request, once kvpin knows all that the engines have told. Returns when its record is there."""
        await self.settle()
        headers = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
        answer = await self.client.post(f"{self.url}/v1/{path}", json=body, headers=headers)
        await self.recorded(answer)
        return answer

    async def recorded(self, answer: httpx.Response) -> None:
        """Waits for an answer's record: an audit asks the engine for its token ids before it is written."""
        if answer.is_success:
            await until(lambda: self.proxy.flow.requests.get(answer.headers["x-request-id"]) is not None)

    async def operate(self, verb: str, **target: object) -> dict:
        """An operation of the admin API, once it is over."""
        answer = await self.client.post(f"{self.url}/admin/v1/{verb}", json=target)
        path = f"{self.url}/admin/v1/operations/{answer.json()['id']}"
        while (operation := (await self.client.get(path)).json())["state"] == "running":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return operation

    async def settle(self) -> None:
        """Waits until every engine is ready and its view is what its events have told."""
        for name in self.proxy.fleet.engines:
            await until(lambda name=name: self.is_quiet(name) and self.is_read(name))

    def is_quiet(self, name: str) -> bool:
        """Whether an engine is ready and runs nothing."""
        engine = self.engine(name)
        return engine.state is EngineState.READY and not engine.ledger.in_flight and is_tokenised(self.proxy)

    def is_read(self, name: str) -> bool:
        """Whether the view of an engine is what its events have told."""
        raise NotImplementedError


async def until(is_so: Callable[[], bool]) -> None:
    """Waits for it, and a turn of the loop longer; fails when that does not come."""
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():  # noqa: ASYNC110 - state of other threads
            await asyncio.sleep(0.002)
        await asyncio.sleep(0)


@asynccontextmanager
async def proxy_over(
    engines: Sequence[EngineSettings],
    tenants: Sequence[str],
    interval_s: float,
    *,
    reuse: bool = True,
    otel: bool = False,
) -> AsyncIterator[tuple[str, Proxy, httpx.AsyncClient]]:
    """A proxy over these engines, its address and a client."""
    settings = Settings(
        reuse=reuse,
        otel=otel,
        engines=tuple(engines),
        api_keys=tuple(ApiKeySettings(key=KEYS[tenant], tenant=tenant) for tenant in tenants),
        health=HealthSettings(interval_s=interval_s),
    )
    proxy = Proxy(settings, HttpTransport())
    proxy.start()
    try:
        async with (
            serving(build_app(proxy)) as url,
            httpx.AsyncClient(trust_env=False, timeout=30, verify=False) as client,  # noqa: S501
        ):
            yield url, proxy, client
    finally:
        await proxy.stop()
