"""The stock OpenAI SDK against kvpin."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.fakes import CHAT, FakeEngine, answer
from tests.live.answers import becomes, user
from tests.live.conftest import running_kvpin

pytestmark = pytest.mark.live

TOOL = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "Height of the tide",
        "parameters": {"type": "object", "properties": {"port": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def client(kvpin):
    with OpenAI(base_url=kvpin.base_url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


def test_chat_fills_usage(client, model):
    answer = client.chat.completions.create(model=model, messages=user("Hello!"), max_tokens=8)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_is_the_answer_in_pieces(client, model):
    asked = {"model": model, "messages": user("Count the ships."), "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].choices == []
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_usage_in_a_stream_only_when_asked(client, model):
    chunks = list(
        client.chat.completions.create(model=model, messages=user("Hi."), max_tokens=3, stream=True)
    )
    assert all(chunk.usage is None for chunk in chunks)


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


def test_models(client, model):
    assert [entry.id for entry in client.models.list().data] == [model]
    assert client.models.retrieve(model).id == model


def test_tools_reach_the_template(client, model):
    messages = [
        *user("How high is the water?"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "tide", "arguments": '{"port": "Brest"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4 m"},
    ]
    asked = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0}
    with_tools = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="auto")
    without = client.chat.completions.create(**asked)
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens + 20


def test_a_request_id_goes_through(client, model):
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=user("Hi."), max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"


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


def test_a_route_no_engine_has_is_not_found(client, model):
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(model=model, input="Hi.")


@pytest.mark.parametrize(("failure", "stream"), [(503, False), (429, True), (500, False), ("drop", True)])
async def test_the_sdk_retries_what_the_only_engine_failed_once(tmp_path, failure, stream):
    failures = [failure]

    async def script(exchange):
        if exchange.target != CHAT or not failures:
            await answer(exchange)
        elif failures.pop() == "drop":
            exchange.die()
        else:
            await exchange.send({"error": {"message": "not now"}}, status=failure)

    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine("a", script))
        starting = running_kvpin(tmp_path / "log", "--engine", f"openai_compatible={engine.url}", reuse=False)
        proxy = await asyncio.to_thread(starting.__enter__)
        stack.push_async_callback(asyncio.to_thread, starting.__exit__, None, None, None)
        client = await stack.enter_async_context(AsyncOpenAI(base_url=proxy.base_url, api_key="unused"))
        got = await client.chat.completions.create(model="m", messages=user("Hi."), stream=stream)
        text = (
            [chunk.choices[0].delta.content async for chunk in got]
            if stream
            else [got.choices[0].message.content]
        )
        assert (text, failures) == (["hi"], [])
        asked = [exchange for exchange in engine.seen if exchange.target == CHAT]
        assert [exchange.headers["x-stainless-retry-count"] for exchange in asked] == ["0", "1"]


async def test_fifty_streams_at_once(kvpin, model):
    async with AsyncOpenAI(base_url=kvpin.base_url, api_key="unused", timeout=120) as client:

        async def one(number):
            stream = await client.chat.completions.create(
                model=model, messages=user(f"Story {number}."), max_tokens=16, temperature=0, stream=True
            )
            return [chunk async for chunk in stream][-1].choices[0].finish_reason

        assert await asyncio.gather(*(one(number) for number in range(50))) == ["length"] * 50
    await until_idle(kvpin)


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
