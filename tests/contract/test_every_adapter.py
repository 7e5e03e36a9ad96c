"""Tests every adapter against the contract `EngineAdapter`."""

from __future__ import annotations

import json
from contextlib import aclosing, nullcontext

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter import (
    ENGINE_KINDS,
    Capability,
    EngineRejected,
    EngineSpecError,
    EngineUnavailable,
    Headers,
    JsonBody,
    KvTarget,
    KvVerb,
    NotSupported,
    PromptTable,
    make_adapter,
)
from engine_adapter.http.adapter import read_models
from engine_adapter.types import MESSAGES_ROUTES, EngineSpec, token_array
from tests.engines import served
from tests.fake_engines.text import decode

CHAT = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 3, "temperature": 0}
TARGET = KvTarget(token_array([1, 2, 3]))
ONLY_TEXT = ("lmdeploy",)
"""Kinds whose completions take no token ids."""


def body(**fields) -> JsonBody:
    return JsonBody(json.dumps(CHAT | fields).encode())


async def drained(iterator):
    async with aclosing(iterator) as items:
        return [item async for item in items]


USES = {
    Capability.KV_EVENTS: lambda adapter: drained(adapter.events()),
    Capability.TOKENIZE: lambda adapter: adapter.tokenize("/v1/chat/completions", body()),
    Capability.FLUSH: lambda adapter: drained(adapter.operate(KvVerb.FLUSH, TARGET)),
    Capability.OFFLOAD: lambda adapter: drained(adapter.operate(KvVerb.OFFLOAD, TARGET)),
    Capability.RESTORE: lambda adapter: drained(adapter.operate(KvVerb.RESTORE, TARGET)),
    Capability.PIN: lambda adapter: adapter.pin(TARGET, 1.0),
    Capability.PROMPT_TABLES: lambda adapter: adapter.put_prompt_table(PromptTable("t", 1, 1, 1, b"")),
}


async def test_connect_says_what_it_is_and_changes_nothing(adapter):
    first, second = await adapter.connect(), await adapter.connect()
    assert first == second
    assert first.model
    assert first.instance
    assert first.max_model_len is None or first.max_model_len > 0


async def test_it_says_what_the_engine_says_of_its_model(adapter):
    async with httpx.AsyncClient(trust_env=False) as client:
        models = (await client.get(f"{adapter.spec.url}/v1/models")).json()
    assert (await adapter.connect()).card == read_models(models).card


async def test_it_gets_messages_of_anthropics_api_as_chats(adapter):
    assert (await adapter.connect()).served_as_chats >= MESSAGES_ROUTES


async def test_load_counts_requests(adapter):
    load = await adapter.load()
    assert (load.running, load.waiting) == (0, 0)
    assert load.gpu_usage is None or 0 <= load.gpu_usage <= 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_prepared_request_is_answered(adapter, transport, path):
    asked = {"prompt": "Hello"} if path == "/v1/completions" else {"messages": CHAT["messages"]}
    asked |= {"model": (await adapter.connect()).model, "max_tokens": 3, "temperature": 0}
    sent = JsonBody(json.dumps(asked).encode())
    headers = {"content-type": "application/json", "host": "proxy", "x-request-id": "r", "x-kvpin-x": "y"}
    request = adapter.prepare("POST", path, headers, sent)
    assert request.body == sent.raw
    assert not {"host", "x-kvpin-x", "authorization"} & set(dict(Headers(request.headers)))
    async with await transport.send(request) as response:
        answer = json.loads(await response.read())
        assert response.status == 200
        reported = adapter.cached_tokens(response.headers)
    assert reported in (None, (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens"))


async def test_a_made_up_name_of_a_model_is_served_or_not_found(adapter, transport):
    headers = {"content-type": "application/json"}
    request = adapter.prepare("POST", "/v1/chat/completions", headers, body(model="made-up"))
    async with await transport.send(request) as response:
        await response.read()
    assert response.status in ((200,) if (await adapter.connect()).any_model else (200, 404))


async def test_tokens_are_those_of_the_route(adapter):
    info = await adapter.connect()
    if Capability.TOKENIZE in info.capabilities:
        assert len(await adapter.tokenize("/v1/chat/completions", body())) > 0
        with pytest.raises(EngineRejected):  # with any body
            await adapter.tokenize("/v1/embeddings", body(input="Hello"))


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_held_request_is_answered_and_its_reuse_is_what_was_said(adapter, transport, streamed):
    """Sends a request twice: the hold's prediction for the second equals the engine's report."""
    info = await adapter.connect()
    path, sent = "/v1/completions", list(range(300, 340))
    given = decode(sent) if adapter.spec.kind in ONLY_TEXT else sent
    fields = {"model": info.model, "prompt": given, "max_tokens": 2, "temperature": 0}
    if streamed:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    prompt = KvTarget(token_array(sent))
    for _ in range(2):
        async with adapter.hold(path, JsonBody(json.dumps(fields).encode()), prompt) as hold:
            request = adapter.prepare("POST", path, {"content-type": "application/json"}, hold.body)
            async with await transport.send(request) as response:
                raw = await response.read()
            answer, reported = raw, None
            if hold.answer is not None:
                hold.answer.feed(raw)
                finished, reported = hold.answer.finish(), hold.answer.cached_tokens()
                answer = finished if hold.answer.assembles else raw
        assert response.status == 200
    if not streamed and given == sent:
        assert json.loads(answer)["usage"]["prompt_tokens"] == len(sent)
    if hold.cached_tokens is not None:
        assert reported == hold.cached_tokens > 0


async def test_completions_take_token_ids_or_refuse_them(adapter):
    """Warming and `doctor --probe` send token ids."""
    model = (await adapter.connect()).model
    sent = JsonBody(json.dumps({"model": model, "prompt": [300, 301], "max_tokens": 1}).encode())
    refuses = adapter.spec.kind in ONLY_TEXT
    with pytest.raises(EngineRejected, match="token ids") if refuses else nullcontext():
        async with adapter.hold("/v1/completions", sent, KvTarget(token_array([300, 301]))):
            pass


async def test_what_is_forecast_is_within_the_prompt(adapter):
    await adapter.connect()
    forecast = adapter.forecast(TARGET)
    assert forecast is None or 0 <= forecast.cached_tokens < len(TARGET.token_ids)


async def test_a_hold_of_no_prompt_goes_as_it_is(adapter):
    await adapter.connect()
    async with adapter.hold("/v1/models", None, None) as hold:
        assert (hold.body, hold.answer) == (None, None)


async def test_cached_tokens_of_headers_that_say_nothing(adapter):
    assert adapter.cached_tokens({}) is None
    assert adapter.cached_tokens({"x-kv-cached-tokens": "many"}) is None


async def test_a_stream_comes_piece_by_piece(adapter, transport):
    headers = {"content-type": "application/json"}
    sent = body(model=(await adapter.connect()).model, stream=True, ignore_eos=True)
    request = adapter.prepare("POST", "/v1/chat/completions", headers, sent)
    async with await transport.send(request) as response:
        data = await response.read()
    assert data.endswith(b"data: [DONE]\n\n")


async def test_what_is_not_declared_is_not_supported(adapter):
    missing = set(USES) - (await adapter.connect()).capabilities
    for capability in missing:
        with pytest.raises(NotSupported) as caught:
            await USES[capability](adapter)
        assert caught.value.capability == capability.value
        assert f"has no {capability.value!r}: {caught.value.instead}" in str(caught.value)
    if Capability.PIN in missing:
        with pytest.raises(NotSupported):
            await adapter.unpin("x")
    if Capability.PROMPT_TABLES in missing:
        with pytest.raises(NotSupported):
            await adapter.delete_prompt_table("x")


@pytest.mark.parametrize("target", [TARGET, KvTarget(cache_salt="s"), KvTarget(lora="ada")])
async def test_who_can_only_flush_everything_refuses_a_part(adapter, target):
    if adapter.spec.kind not in ("vllm", "sglang", "tensorrt_llm", "nim"):
        pytest.skip("it flushes parts, or nothing")
    await adapter.connect()
    with pytest.raises(NotSupported, match="can only flush everything"):
        await drained(adapter.operate(KvVerb.FLUSH, target))


async def test_lower_tiers_are_asked_only_where_there_are_some(adapter):
    has_some = (await adapter.connect()).tokens_per_chunk is not None
    assert await adapter.lookup(TARGET) is None or has_some


async def test_stats_are_for_people(adapter):
    stats = await adapter.stats()
    assert isinstance(stats, dict)
    json.dumps(stats)


@pytest.mark.parametrize("kind", ENGINE_KINDS)
async def test_nobody_there_is_unavailable(adapter_of, kind):
    adapter = adapter_of(kind, "http://127.0.0.1:1")
    for call in (adapter.connect, adapter.load):
        with pytest.raises(EngineUnavailable):
            await call()


@pytest.mark.parametrize("kind", ENGINE_KINDS)
def test_a_bad_address_is_told_at_once(kind):
    with pytest.raises(EngineSpecError):
        make_adapter(EngineSpec(kind=kind, url="localhost:8000", id="e"))


async def test_another_kind_of_engine_is_not_taken_for_ours(adapter_of):
    with served(Starlette(routes=[Route("/kv/info", lambda _: JSONResponse({"engine": "another"}))])) as url:
        with pytest.raises(EngineUnavailable, match="GET /kv/info: the answer is not as expected"):
            await adapter_of("embedded", url).connect()
        with pytest.raises(EngineRejected):
            await adapter_of("embedded", url).load()
