"""Chats that hold images, through kvpin over a vLLM whose wire is exact, a fake here."""

from __future__ import annotations

import base64
import json
import random
from contextlib import asynccontextmanager

import pytest

from proxy.core.audit import Trust
from proxy.settings import EngineSettings
from tests.fake_engines.vllm import running_vllm
from tests.live.fake_world import KEYS, VllmWorld, proxy_over

pytestmark = pytest.mark.usefixtures("nothing_lingers")

SYSTEM = {"role": "system", "content": "You look at pictures and tell what is in them. " * 6}
PAGE = 16


class World(VllmWorld):
    """kvpin, and the server behind it."""

    async def ask(self, *parts, before=(SYSTEM,), **fields):
        """The tokens that were predicted and reported to be reused by a chat."""
        messages = [*before, {"role": "user", "content": list(parts)}]
        response = await self.chat(messages, **fields)
        assert response.status_code == 200, response.text
        details = response.json()["usage"]["prompt_tokens_details"]
        return int(response.headers["x-kvpin-predicted-tokens"]), details["cached_tokens"]

    async def chat(self, messages, tenant=None, **fields):
        body = {"model": "tiny", "max_tokens": 3, "messages": messages, **fields}
        return await self.post("chat/completions", body, tenant)


@asynccontextmanager
async def kvpin_over(vllm, *tenants, **settings):
    engines = [EngineSettings(id="e", kind="vllm", url=vllm.url)]
    async with proxy_over(engines, tenants, interval_s=0.05, **settings) as made:
        yield World(*made, {"e": vllm})


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


async def test_the_server_renders_what_holds_images_and_nothing_else(world, vllm):
    await world.ask(text("hello"))
    rendered = len(vllm.fake.rendered)  # when it was connected to
    await world.ask(text("hello"), text("again"))
    assert len(vllm.fake.rendered) == rendered
    await world.ask(image(CAT))
    assert len(vllm.fake.rendered) == rendered + 1
    await world.ask(image(CAT), ELSEWHERE)
    assert len(vllm.fake.rendered) == rendered + 1
    sent = [body for _, body in vllm.fake.seen[-2:]]
    assert "mm_payload" not in json.dumps(sent)


async def test_responses_hold_images_too(world):
    address = image(CAT)["image_url"]["url"]
    parts = [{"type": "input_text", "text": "What? " * 20}, {"type": "input_image", "image_url": address}]
    body = {"model": "tiny", "max_tokens": 3, "input": [{"role": "user", "content": parts}]}
    predicted = [
        int((await world.post("responses", body)).headers["x-kvpin-predicted-tokens"]) for _ in range(2)
    ]
    assert predicted[0] == 0 < predicted[1]
    assert world.last.prompt.media


async def test_before_an_image_that_may_change_text_is_followed(world):
    assert await world.ask(ELSEWHERE) == (0, 0)
    predicted, reported = await world.ask(ELSEWHERE)
    assert 4 * PAGE <= predicted < reported
    assert not world.last.prompt.whole
    checked = world.engine().audit.view().checked
    await world.ask(ELSEWHERE)
    assert world.engine().audit.view().checked == checked


async def test_so_it_is_on_a_server_that_does_not_render():
    with running_vllm(enable_scale_out=False, num_gpu_blocks=1000) as vllm:
        async with kvpin_over(vllm) as world:
            await world.ask(image(CAT))
            for content in (CAT, DOG):
                predicted, reported = await world.ask(image(content))
                assert 4 * PAGE <= predicted <= reported
            assert world.engine().audit.trust is Trust.PRECISE


async def test_a_uuid_means_one_image(world, vllm):
    await world.ask(image(CAT, uuid="u"))
    predicted, reported = await world.ask(image(CAT, uuid="u"))
    assert predicted == reported > 4 * PAGE
    assert (predicted, reported) == await world.ask(named("u"))
    response = await world.chat([{"role": "user", "content": [image(DOG, uuid="u")]}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[0].uuid"
    async with kvpin_over(vllm, trust_media_uuids=True) as trusting:
        for content in (CAT, DOG):
            predicted, reported = await trusting.ask(image(content, uuid="u"))
            assert predicted == reported


async def test_a_tenants_uuid_means_nothing_to_others(vllm):
    def said(*parts):
        return [{"role": "user", "content": [*parts]}]

    async with kvpin_over(vllm, *KEYS) as world:
        for tenant, content in (("one", CAT), ("two", DOG)):
            assert (await world.chat(said(image(content, uuid="u")), tenant)).status_code == 200
        assert sorted(vllm.fake.images.held.values()) == [CAT, DOG]
        await world.chat(said(image(CAT, uuid="of one")), "one")
        assert (await world.chat(said(named("of one")), "one")).status_code == 200
        assert (await world.chat(said(named("of one")), "two")).status_code == 400
