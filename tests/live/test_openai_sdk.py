"""The stock OpenAI SDK against kvpin."""

from __future__ import annotations

import asyncio
import time

import httpx
import openai
import pytest
from openai import OpenAI

from tests.live.answers import becomes, user

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def client(kvpin):
    with OpenAI(base_url=kvpin.base_url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


def test_completions_by_text_and_by_token_ids(client, model):
    by_text = client.completions.create(model=model, prompt="The harbour is", max_tokens=6, temperature=0)
    raw = client.completions.with_raw_response.create(
        model=model, prompt=[300, 301, 302, 303], max_tokens=6, temperature=0
    )
    by_ids = raw.parse()
    assert by_text.choices[0].finish_reason == "length"
    assert by_ids.usage.prompt_tokens == 4
    assert raw.headers["x-kvpin-engine"].startswith("embedded-")
    assert raw.headers["x-kvpin-predicted-tokens"] == "0"
    assert raw.headers["x-kvpin-cached-tokens"] == "0"


@pytest.mark.parametrize(
    ("changes", "error", "param"),
    [
        ({"model": "no-such-model"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"stop": [1]}, openai.BadRequestError, "stop"),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.BadRequestError, None),
        ({"extra_body": {"cache_salt": ""}}, openai.BadRequestError, "cache_salt"),
    ],
)
def test_each_client_error_has_its_class_and_field(client, model, changes, error, param):
    asked = {"model": model, "messages": user("Hi."), "max_tokens": 1} | changes
    with pytest.raises(error) as caught:
        client.chat.completions.create(**asked)
    assert caught.value.body["message"]
    if param is not None:
        assert caught.value.param is not None
        assert caught.value.param.startswith(param)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_blocks(kvpin, model, stream):
    body = {
        "model": model,
        "messages": user(f"Tell me everything, {stream}."),
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": stream,
    }
    async with httpx.AsyncClient(base_url=kvpin.base_url, timeout=60) as client:
        request = asyncio.create_task(read_some(client, body))
        await becomes(lambda: active_blocks(kvpin) > 0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    left = time.monotonic()
    await until_idle(kvpin)
    assert time.monotonic() - left < 10  # generous: the figure is measured in benchmarks


async def read_some(client, body):
    async with client.stream("POST", "/chat/completions", json=body) as answer:
        async for _ in answer.aiter_bytes():
            pass


def active_blocks(kvpin):
    return sum(engine["kv"]["gpu"]["active"] for engine in kvpin.engines().values())


async def until_idle(kvpin):
    await becomes(lambda: active_blocks(kvpin) == 0)
