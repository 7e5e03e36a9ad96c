"""Requests for responses, their answers as the SDK reads them, and an engine that gets chats."""

import json
from contextlib import asynccontextmanager
from dataclasses import replace

from openai.types.responses import Response as SdkResponse

from engine_adapter import JsonBody
from engine_adapter.types import RESPONSES_ROUTES
from proxy.request.tenants import ApiKey, Tenants
from proxy.request.translate import ResponseStore, ResponseTranslation
from tests.fakes import DONE, INFO, FakeAdapter, client_of, event, proxy_over
from tests.proxy.request.passing import passed

ROUTE = "/v1/responses"
USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 32, "created_cache_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
TOOL = {"type": "function", "name": "tide", "description": "Height", "parameters": {"type": "object"}}
SPACE = {
    "type": "namespace",
    "name": "sea",
    "description": "d",
    "tools": [TOOL, {"type": "custom", "name": "log"}],
}
FUNCTION = {
    "type": "function",
    "function": {"name": "tide", "description": "Height", "parameters": {"type": "object"}},
}


def translation(tenant=None, store=None, **fields):
    body = {"model": "m", "input": "hi", **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    return ResponseTranslation(JsonBody(json.dumps(body).encode()), tenant, store=store or ResponseStore())


def chat_of(**fields):
    return json.loads(translation(**fields).chat.raw)


def answered(made, finish="stop", usage=USAGE, **message):
    """The response of a translation, from a chat whose message has these fields."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    content = json.dumps({"model": "served", "choices": [choice], "usage": usage}).encode()
    response = json.loads(passed(made, whole=content).body)
    SdkResponse.model_validate(response)
    return response


def streamed(made, *deltas, finish="stop"):
    last = {"choices": [{"delta": {}, "finish_reason": finish}], "usage": USAGE}
    return events_from(made, *({"choices": [{"delta": delta}]} for delta in deltas), last)


def events_from(made, *chunks):
    return events_of(passed(made, chunks=[*map(event, chunks), DONE]).body)


def events_of(raw):
    events = []
    for part in raw.split(b"\n\n")[:-1]:
        name, data = part.split(b"\n")
        events.append(json.loads(data.removeprefix(b"data: ")))
        assert name.decode() == f"event: {events[-1]['type']}"
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    return events


CHAT = {
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": USAGE,
}
KEYS = {name: {"authorization": f"Bearer key-{name}"} for name in ("a", "b")}
TENANTS = Tenants(ApiKey.of(f"key-{name}", name) for name in KEYS)


async def chats(exchange):
    if exchange.json.get("stream"):
        last = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": USAGE}
        await exchange.stream(event({"choices": [{"delta": {"content": "hi"}}]}), event(last), DONE)
    else:
        await exchange.send(CHAT)


@asynccontextmanager
async def serving_chats(engine):
    """A client of a proxy over an engine that gets chats."""
    engine.script = chats
    adapter = FakeAdapter("a", engine.url, replace(INFO, served_as_chats=RESPONSES_ROUTES))
    async with proxy_over(adapter, tenants=TENANTS) as proxy, client_of(proxy) as client:
        yield client
        await proxy.settled()


async def ask(client, tenant="a", **fields):
    return await client.post(ROUTE, json={"model": "m", "input": "hi", **fields}, headers=KEYS[tenant])
