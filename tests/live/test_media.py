"""Chats that hold images, through kvpin over a vLLM whose wire is exact, a fake here."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from contextlib import asynccontextmanager

import httpx
import pytest

from engine_adapter import HttpTransport
from proxy.core.audit import Trust
from proxy.fleet import pool
from proxy.server.app import Proxy, build_app
from proxy.settings import ApiKeySettings, EngineSettings, HealthSettings, Settings
from tests.fake_engines.vllm import running_vllm
from tests.fakes import is_tokenised, serving

KEYS = {"red": "key-of-red", "blue": "key-of-blue"}
SYSTEM = {"role": "system", "content": "You look at pictures and tell what is in them. " * 6}
DEADLINE_S = 30.0
PAGE = 16


@pytest.fixture(autouse=True)
def nothing_lingers(monkeypatch):
    """What a request is about to leave behind counts until it ends, and here no longer."""
    monkeypatch.setattr(pool, "PENDING_LINGER_S", 0.0)


class World:
    """kvpin and the server behind it."""

    def __init__(self, url, proxy, vllm, client):
        self.url, self.proxy, self.vllm, self._client = url, proxy, vllm, client

    async def post(self, body, tenant=None, path="chat/completions"):
        """A request, once kvpin knows all that the server has told."""
        await self.settle()
        headers = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
        body = {"model": "tiny", "max_tokens": 3, **body}
        return await self._client.post(f"{self.url}/v1/{path}", json=body, headers=headers)

    async def ask(self, *parts, before=(SYSTEM,), **fields):
        """The tokens that were predicted and reported to be reused by a chat."""
        messages = [*before, {"role": "user", "content": list(parts)}]
        response = await self.post({"messages": messages, **fields})
        assert response.status_code == 200, response.text
        details = response.json()["usage"]["prompt_tokens_details"]
        return int(response.headers["x-kvpin-predicted-tokens"]), details["cached_tokens"]

    async def settle(self):
        async with asyncio.timeout(DEADLINE_S):
            while not await self._is_settled():  # noqa: ASYNC110 - state of other threads
                await asyncio.sleep(0.002)

    async def _is_settled(self):
        engine = self.proxy.fleet.engines["v"]
        if engine.state != "ready" or engine.audit.trust is not Trust.PRECISE or not is_tokenised(self.proxy):
            return False
        seen = (await engine.adapter.stats())["events"]["batches"]
        return engine.ledger.in_flight == 0 and seen == self.vllm.publisher.published

    @property
    def last(self):
        return list(self.proxy.flow.requests)[-1]


@asynccontextmanager
async def kvpin_over(vllm, *tenants, **settings):
    settings = Settings(
        reuse=True,
        engines=(EngineSettings(id="v", kind="vllm", url=vllm.url),),
        api_keys=tuple(ApiKeySettings(key=KEYS[tenant], tenant=tenant) for tenant in tenants),
        health=HealthSettings(interval_s=0.05),
        **settings,
    )
    proxy = Proxy(settings, HttpTransport())
    proxy.start()
    try:
        async with serving(build_app(proxy)) as url, httpx.AsyncClient(trust_env=False, timeout=30) as client:
            yield World(url, proxy, vllm, client)
    finally:
        await proxy.stop()


@pytest.fixture
def vllm():
    with running_vllm(num_gpu_blocks=1000) as vllm:
        yield vllm


@pytest.fixture
async def world(vllm):
    async with kvpin_over(vllm) as world:
        yield world


def image(content, **fields):
    address = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": address}, **fields}


def named(uuid):
    return {"type": "image_url", "image_url": None, "uuid": uuid}


def text(content):
    return {"type": "text", "text": content}


CAT, DOG = b"cat", b"dog"
ELSEWHERE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/cat.png"}}


async def test_predicted_is_reported(world):
    dice = random.Random(3)  # noqa: S311 - not for secrets
    talks = [[SYSTEM] for _ in range(5)]
    reused = 0
    for _ in range(40):
        talk = dice.choice(talks)
        images = [image(dice.choice((CAT, DOG, b"ship"))) for _ in range(dice.choice((0, 1, 2)))]
        parts = [text(dice.choice(("see " * 5, "what? " * 20))), *images, text("in one word")]
        salt = {"cache_salt": "s"} if dice.random() < 0.2 else {}
        predicted, reported = await world.ask(*parts, before=talk, **salt)
        assert predicted == reported
        reused += predicted
        talk += [{"role": "user", "content": parts}, {"role": "assistant", "content": "It is."}]
        if len(talk) > 7:
            del talk[1:]
    assert reused > 40 * PAGE
    assert world.last.prompt.media


async def test_what_images_share(world):
    question = text("What is there?")
    first = await world.ask(text("see"), image(CAT), question)
    again = await world.ask(text("see"), image(CAT), question)
    other = await world.ask(text("see"), image(DOG), question)
    moved = await world.ask(text("see " * 3), image(CAT), question)
    assert [predicted == reported for predicted, reported in (first, again, other, moved)] == [True] * 4
    # Another picture, or the same one at another place, shares the text before it alone.
    assert first[0] == 0
    assert again[0] > other[0] >= 4 * PAGE
    assert again[0] > moved[0] >= 4 * PAGE


async def test_the_server_renders_what_holds_images_and_nothing_else(world):
    await world.ask(text("hello"))
    rendered = len(world.vllm.fake.rendered)  # when it was connected to
    await world.ask(text("hello"), text("again"))
    assert len(world.vllm.fake.rendered) == rendered
    await world.ask(image(CAT))
    assert len(world.vllm.fake.rendered) == rendered + 1
    await world.ask(image(CAT), ELSEWHERE)
    assert len(world.vllm.fake.rendered) == rendered + 1
    sent = [body for _, body in world.vllm.fake.seen[-2:]]
    assert "mm_payload" not in json.dumps(sent)


async def test_responses_hold_images_too(world):
    address = image(CAT)["image_url"]["url"]
    parts = [{"type": "input_text", "text": "What? " * 20}, {"type": "input_image", "image_url": address}]
    body = {"input": [{"role": "user", "content": parts}]}
    predicted = [
        int((await world.post(body, path="responses")).headers["x-kvpin-predicted-tokens"]) for _ in range(2)
    ]
    assert predicted[0] == 0 < predicted[1]
    assert world.last.prompt.media


async def test_before_an_image_that_may_change_text_is_followed(world):
    assert await world.ask(ELSEWHERE) == (0, 0)
    predicted, reported = await world.ask(ELSEWHERE)
    assert 4 * PAGE <= predicted < reported
    assert not world.last.prompt.whole
    checked = world.proxy.fleet.engines["v"].audit.view().checked
    await world.ask(ELSEWHERE)
    assert world.proxy.fleet.engines["v"].audit.view().checked == checked


async def test_so_it_is_on_a_server_that_does_not_render():
    with running_vllm(enable_scale_out=False, num_gpu_blocks=1000) as vllm:
        async with kvpin_over(vllm) as world:
            await world.ask(image(CAT))
            for content in (CAT, DOG):
                predicted, reported = await world.ask(image(content))
                assert 4 * PAGE <= predicted <= reported
            assert world.proxy.fleet.engines["v"].audit.trust is Trust.PRECISE


async def test_a_uuid_means_one_image(world, vllm):
    await world.ask(image(CAT, uuid="u"))
    predicted, reported = await world.ask(image(CAT, uuid="u"))
    assert predicted == reported > 4 * PAGE
    assert (predicted, reported) == await world.ask(named("u"))
    response = await world.post({"messages": [{"role": "user", "content": [image(DOG, uuid="u")]}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[0].uuid"
    async with kvpin_over(vllm, trust_media_uuids=True) as trusting:
        for content in (CAT, DOG):
            predicted, reported = await trusting.ask(image(content, uuid="u"))
            assert predicted == reported


async def test_a_tenants_uuid_means_nothing_to_others(vllm):
    async with kvpin_over(vllm, *KEYS) as world:
        for tenant, content in (("red", CAT), ("blue", DOG)):
            messages = [{"role": "user", "content": [image(content, uuid="u")]}]
            assert (await world.post({"messages": messages}, tenant)).status_code == 200
        assert sorted(vllm.fake.images.held.values()) == [CAT, DOG]
        unknown = {"messages": [{"role": "user", "content": [named("red's")]}]}
        await world.post({"messages": [{"role": "user", "content": [image(CAT, uuid="red's")]}]}, "red")
        assert (await world.post(unknown, "red")).status_code == 200
        assert (await world.post(unknown, "blue")).status_code == 400
