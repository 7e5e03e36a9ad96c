"""kvpin in this process and loop, over fake engines on sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from engine_adapter import HttpTransport
from proxy.core.audit import Trust
from proxy.fleet.engine import Engine, EngineState
from proxy.request.records import RequestRecord
from proxy.server.app import Proxy, build_app
from proxy.settings import ApiKeySettings, EngineSettings, HealthSettings, Settings
from tests.fake_engines.text import words
from tests.fake_engines.vllm import RunningVllm
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

    def is_idle(self) -> bool:
        """Whether nothing is in flight, here and in the ledgers."""
        engines = self.proxy.fleet.engines.values()
        return all(not engine.leases and not engine.ledger.in_flight for engine in engines)


@dataclass(frozen=True)
class VllmWorld(FakeWorld):
    """A proxy over fakes of vLLM, by engine id."""

    fakes: dict[str, RunningVllm]

    def is_read(self, name: str) -> bool:
        """See `FakeWorld.is_read`."""
        engine = self.engine(name)
        position = engine.adapter.event_position()
        taken = -1 if position is None else position.sequence
        return engine.audit.trust is Trust.PRECISE and taken == self.fakes[name].publisher.published - 1


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
    **more: bool,
) -> AsyncIterator[tuple[str, Proxy, httpx.AsyncClient]]:
    """A proxy over these engines, its address and a client; `more` are settings."""
    settings = Settings(
        **{"reuse": True} | more,
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


def predicted(answer: httpx.Response) -> int:
    """The tokens that kvpin foresaw to be reused."""
    return int(answer.headers["x-kvpin-predicted-tokens"])


class Talks:
    """Random requests: talks that go on, texts, token ids; whole and streamed; of these tenants and models.

    `size` is how long texts and answers are; half of the chats and all texts have the fields `hints`.
    Without `has_texts`, all are chats.
    """

    TEXTS = (
        "The cache of a serving engine holds the keys and values of every token it has seen. ",
        "You are a helpful assistant who answers questions about the weather in Paris, in one sentence. ",
    )

    def __init__(
        self,
        world: FakeWorld,
        seed: int,
        *,
        tenants: Sequence[str | None] = (None,),
        models: Sequence[str] = ("tiny",),
        size: int = 1,
        hints: dict | None = None,
        has_texts: bool = True,
    ) -> None:
        self.world, self.random = world, random.Random(seed)  # noqa: S311
        self.tenants, self.models, self.size, self.hints = tenants, models, size, hints or {}
        self.kinds = [self._talk] * 3 + [self._text] * has_texts
        self.texts = [text * 2 * size for text in self.TEXTS]
        self.talks: list[tuple[str | None, str, list[dict]]] = []

    async def some(self, count: int) -> list[tuple[int, int, bool]]:
        """What was predicted and reported of each, and whether the prediction was firm."""
        return [await self._one() for _ in range(count)]

    async def _one(self) -> tuple[int, int, bool]:
        answer = await self.random.choice(self.kinds)()
        assert answer.status_code == 200, answer.text
        record = self.world.last
        return predicted(answer), record.reported_tokens, record.placement.firm

    async def _talk(self) -> httpx.Response:
        if not self.talks or self.random.random() < 0.25:
            begin = [{"role": "system", "content": self.random.choice(self.texts)}]
            self.talks.append((self.random.choice(self.tenants), self.random.choice(self.models), begin))
        tenant, model, messages = self.random.choice(self.talks[-6:])
        messages.append({"role": "user", "content": self._words(self.random.randint(1, 30 * self.size))})
        most = self.random.randint(1, 20 * self.size)
        body = {"model": model, "messages": messages, "max_tokens": most}
        body |= self.hints if self.random.random() < 0.5 else {}
        if self.random.random() < 0.4:
            return await self.world.post("chat/completions", body | {"stream": True}, tenant)
        answer = await self.world.post("chat/completions", body, tenant)
        content = answer.json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
        return answer

    async def _text(self) -> httpx.Response:
        prompt = self.random.choice(self.texts) + self._words(self.random.randint(0, 3 * self.size))
        if self.random.random() < 0.5:
            prompt = self.random.sample(words(), 3) + list(words()[:90])
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "stream": self.random.random() < 0.5}
        return await self.world.post("completions", body | self.hints, self.random.choice(self.tenants))

    def _words(self, count: int) -> str:
        return " ".join(self.random.choice(self.texts).split()[:count])
