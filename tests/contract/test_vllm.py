"""Compares what vLLM's adapter says with what the server does, fake or real."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from engine_adapter import BlocksStored, CacheCleared, Capability, EngineRejected, KvTarget, KvVerb
from engine_adapter.http.control import ControlClient
from tests.contract.follower import check_predictions, complete, following, operated, tokens_of
from tests.engine_adapter.builders import body


@pytest.fixture
def vllm(adapter_of, vllm_server):
    return adapter_of("vllm", vllm_server.url)


@pytest.fixture
async def control(vllm):
    client = ControlClient(vllm.spec)
    yield client
    await client.aclose()


async def test_connect_tells_everything(vllm):
    info = await vllm.connect()
    names = ("KV_EVENTS", "CACHED_TOKENS", "TOKENIZE", "RENDER", "CACHE_SALT", "FLUSH")
    assert info.capabilities >= {Capability[name] for name in names}
    assert (info.tokens_per_block, info.gpu_blocks) == (32, 99)
    assert info.tokenizer
    assert info.version.startswith("vLLM 0.")
    assert vllm.findings() == ()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi 🙂"}]}),
        ("/v1/completions", {"prompt": "Once upon a time"}),
        ("/v1/completions", {"prompt": [9, 8, 7]}),
    ],
)
async def test_tokenize_equals_what_is_served(vllm, control, path, fields):
    request = fields | {"max_tokens": 1, "return_token_ids": True}
    served = await control.call("POST", path, json=request)
    told = served.get("prompt_token_ids") or served["choices"][0]["prompt_token_ids"]
    assert (await vllm.tokenize(path, body(**request))).tolist() == told
    assert (await vllm.render(path, body(**request))).token_ids.tolist() == told


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
    ],
)
async def test_other_routes_tell_their_prompts(vllm, path, fields):
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    ids = await vllm.tokenize("/v1/chat/completions", body(**chat))
    assert await vllm.tokenize(path, body(**fields)) == ids


async def test_a_refused_request_names_its_field(vllm):
    with pytest.raises(EngineRejected) as caught:
        await vllm.tokenize("/v1/completions", body(prompt=""))
    assert caught.value.status == 400
    with pytest.raises(EngineRejected):
        await vllm.tokenize("/v1/chat/completions", body(messages=[]))


async def test_events_tell_what_requests_reuse(vllm, control):
    async with following(vllm) as follower:
        await operated(vllm, KvVerb.FLUSH, KvTarget())
        await check_predictions(follower, control, longest=700)


async def test_what_decoding_fills_is_told(vllm, control):
    tokens = tokens_of("decoded", 70)
    async with following(vllm) as follower:
        request = {"prompt": tokens, "max_tokens": 59, "temperature": 0, "ignore_eos": True}
        request["return_token_ids"] = True
        answer = await control.call("POST", "/v1/completions", json=request)
        longer = tokens + answer["choices"][0]["token_ids"]
        assert len(longer) == 129
        await follower.until_held(longer)
        assert await complete(control, longer) == follower.would_reuse(longer) == 128


async def test_prompts_whose_logprobs_are_wanted_reuse_nothing(vllm, control):
    tokens = tokens_of("logprobs", 100)
    assert await complete(control, tokens) == 0
    assert await complete(control, tokens) == 96
    await vllm.connect()
    for fields in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
        request = body(prompt=tokens, max_tokens=1, **fields)
        async with vllm.hold("/v1/completions", request, KvTarget(array("i", tokens))) as hold:
            assert hold.cached_tokens == 0
        assert await complete(control, tokens, **fields) == 0


async def test_a_flush_forgets_everything_and_says_so(vllm, control):
    tokens = tokens_of("flush", 100)
    async with following(vllm) as follower:
        await complete(control, tokens)
        await follower.until_held(tokens)
        (progress,) = await operated(vllm, KvVerb.FLUSH, KvTarget())
        assert progress.done == progress.total >= 3
        assert isinstance(follower.events[-1], CacheCleared)
        assert follower.would_reuse(tokens) == 0
        assert await complete(control, tokens) == 0


async def test_while_requests_run_nothing_is_flushed(vllm, vllm_server, transport):
    tokens = tokens_of("busy", 100)
    request = body(prompt=tokens, max_tokens=600, temperature=0, stream=True, ignore_eos=True)
    async with following(vllm) as follower:
        sent = vllm.prepare("POST", "/v1/completions", {"content-type": "application/json"}, request)
        with vllm_server.decoding_for_long():
            async with await transport.send(sent) as response:
                await response.receive()
                await follower.until_held(tokens)
                (progress,) = await operated(vllm, KvVerb.FLUSH, KvTarget())
        assert (progress.done, progress.left["busy"]) == (0, progress.total)
        assert not isinstance(follower.events[-1], CacheCleared)


async def test_without_replay_reused_blocks_become_known(adapter_of, vllm, control):
    """If it connects late without a replay, requests report the blocks they reuse."""
    tokens = tokens_of("late", 100)
    await complete(control, tokens)
    sources = await control.get("/kv_event_sources")
    address = sources["0"]["endpoint"].replace("*", "127.0.0.1")
    late = adapter_of("vllm", vllm.spec.url, events=address)
    async with following(late) as follower:
        assert not follower.view.complete
        assert follower.held(tokens) == 0
        request = body(prompt=tokens, max_tokens=1, temperature=0)
        # Events sent before the subscription is ready are missed.
        while follower.held(tokens) != 96:
            async with late.hold("/v1/completions", request, KvTarget(array("i", tokens))) as hold:
                assert hold.body.get("vllm_xargs") == {"kv_cache_report_mode": "full"}
                await control.call("POST", "/v1/completions", content=hold.body.raw)
            await asyncio.sleep(0.01)
        assert isinstance(follower.events[-1], BlocksStored)
        await operated(late, KvVerb.FLUSH, KvTarget())
        async with late.hold("/v1/completions", request, None) as hold:
            assert hold.body is request
