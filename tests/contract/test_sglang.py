"""Compares what SGLang's adapter says with what the server does, fake or real."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine_adapter import CacheCleared, Capability, EngineRejected, KvTarget, KvVerb
from engine_adapter.http.control import ControlClient
from engine_adapter.sglang.requests import DetailsAnswer
from proxy.prompt import PromptBuilder, RegisteredTables, verify_exactness
from tests.contract.follower import check_predictions, complete, following, operated, tokens_of
from tests.engine_adapter.builders import body

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
JSON = {"content-type": "application/json"}
TOOL = {
    "type": "function",
    "function": {"name": "tide", "description": "潮位", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Brest"}'}}
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
ASKED = {"role": "user", "content": "Brest?"}
CHATS = {
    "a text": {"messages": [ASKED]},
    "parts": {"messages": [{"role": "user", "content": PARTS}]},
    "tools": {"messages": [ASKED], "tools": [TOOL]},
    "a call": {
        "messages": [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "4 m"},
        ],
        "tools": [TOOL],
    },
    "no tools to choose": {"messages": [ASKED], "tools": [TOOL], "tool_choice": "none"},
}


@pytest.fixture
def sglang(adapter_of, sglang_server):
    return adapter_of("sglang", sglang_server.url)


@pytest.fixture
async def control(sglang):
    client = ControlClient(sglang.spec)
    yield client
    await client.aclose()


async def flushed(adapter):
    return [progress.left for progress in await operated(adapter, KvVerb.FLUSH, KvTarget())]


async def test_connect_tells_everything(sglang):
    info = await sglang.connect()
    names = ("KV_EVENTS", "CACHED_TOKENS", "TOKENIZE", "CACHE_SALT", "FLUSH")
    assert info.capabilities == {Capability[name] for name in names}
    assert (info.tokens_per_block, info.gpu_blocks) == (16, 128)
    assert info.tokenizer
    assert info.version.startswith("SGLang 0.")
    (finding,) = sglang.findings()
    assert "what its GPU evicts is lost" in finding.problem


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS)
async def test_tokenize_equals_what_is_served(sglang, control, fields, stream):
    """Asked with the fields of a client's request, of which `/tokenize` refuses some."""
    request = fields | {"max_tokens": 1, "return_prompt_token_ids": True}
    served = await control.call("POST", CHAT, json=request)
    asked = body(**request, stream=stream, stream_options={"include_usage": True}, n=2)
    assert (await sglang.tokenize(CHAT, asked)).tolist() == served["choices"][0]["prompt_token_ids"]


async def test_chats_are_rendered_here_as_there(sglang):
    builder = PromptBuilder(await sglang.connect(), tables=RegisteredTables(), engines=lambda _: [sglang])
    assert await builder.load(builder.info.tokenizer)
    assert (await verify_exactness(builder, sglang)).source == "local"
    sources = {}
    for name, fields in CHATS.items():
        asked = body(**fields)
        prompt = await builder.build(CHAT, asked, salt=None)
        assert prompt.token_ids == await sglang.tokenize(CHAT, asked), name
        sources[name] = prompt.source
    assert sources.pop("no tools to choose") == "engine"
    assert set(sources.values()) == {"local"}


async def test_a_refused_request_is_told(sglang):
    for path, fields in ((CHAT, {"messages": []}), (COMPLETIONS, {"prompt": [1, 2]})):
        with pytest.raises(EngineRejected):
            await sglang.tokenize(path, body(**fields))


async def test_events_tell_what_requests_reuse(sglang, control):
    async with following(sglang) as follower:
        assert await flushed(sglang) == [{}]
        await check_predictions(follower, control, longest=500)


async def test_two_prompts_of_a_batch_compute_what_they_share_twice(sglang, control):
    """So kvpin lets the second wait. Which of them share a batch is the server's affair: one pair of many."""
    assert not (await sglang.connect()).shares_prefill
    for seed in range(20):
        tokens = tokens_of(f"batch {seed}", 100)
        reused = await asyncio.gather(*(complete(control, tokens) for _ in range(2)))
        assert reused[0] in (0, 96)
        if reused == [0, 0]:
            return
    pytest.fail("every second prompt reused the first's")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_the_client_gets_nothing_of_what_kvpin_asks_for(sglang, control, transport, n, stream):
    """Of a server that reports no cached tokens by itself."""
    tokens = tokens_of(f"details {n} {stream}", 100)
    await complete(control, tokens)
    asked = body(prompt=tokens, max_tokens=1, n=n, stream=stream, return_cached_tokens_details=True)
    async with await transport.send(sglang.prepare("POST", COMPLETIONS, JSON, asked)) as response:
        answer = await response.read()
    assert b"sglext" in answer
    reader = DetailsAnswer(streams=stream, hides_details=True)
    kept = reader.feed(answer) + reader.finish()
    assert (b"sglext" in kept, reader.cached_tokens()) == (False, 96)


async def test_a_flush_waits_for_a_moment_without_requests(sglang, sglang_server, control, transport):
    tokens = tokens_of("busy", 100)
    request = body(prompt=tokens, max_tokens=60, temperature=0, stream=True, ignore_eos=True)
    async with following(sglang) as follower:
        with sglang_server.decoding_for_long():
            async with await transport.send(sglang.prepare("POST", COMPLETIONS, JSON, request)) as response:
                await response.receive()
                await follower.until_held(tokens)
                flush = asyncio.create_task(flushed(sglang))
                await sglang.load()  # it was asked to by now
                sglang_server.go_on()
                await response.read()
        assert await flush == [{}]
        await follower.until(lambda: isinstance(follower.events[-1], CacheCleared))
        assert follower.would_reuse(tokens) == 0
        assert await complete(control, tokens) == 0


async def test_a_late_reader_gets_what_is_held(sglang, control, adapter_of):
    tokens = tokens_of("late", 100)
    await complete(control, tokens)
    async with following(adapter_of("sglang", sglang.spec.url)) as follower:
        assert follower.view.complete
        assert follower.held(tokens) == 96


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
async def test_each_rank_gets_its_requests(adapter_of, sglang_ranks, transport, path):
    """On every route, whatever the client says of it."""
    ranks = [adapter_of("sglang", sglang_ranks, dp_rank=rank) for rank in (0, 1)]
    for adapter in ranks:
        assert (await adapter.connect()).ranks == (0, 1)
    tokens = tokens_of(f"ranks {path}", 100)
    asked = {
        CHAT: {"messages": [{"role": "user", "content": " ".join(map(str, tokens))}], "max_tokens": 1},
        COMPLETIONS: {"prompt": tokens, "max_tokens": 1},
        GENERATE: {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}},
    }[path]

    async def reused(rank: int) -> bool:
        headers = JSON | {"x-data-parallel-rank": f"{1 - rank}", "x-override-routed-dp-rank": f"{1 - rank}"}
        request = ranks[rank].prepare("POST", path, headers, body(**asked, routed_dp_rank=1 - rank))
        async with await transport.send(request) as response:
            answer = json.loads(await response.read())
            assert response.status == 200, answer
        if path == GENERATE:
            return answer["meta_info"]["cached_tokens"] > 0
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    assert [await reused(rank) for rank in (0, 0, 1, 1, 0)] == [False, True, False, True, True]


async def test_a_flush_is_told_rank_by_rank(adapter_of, sglang_ranks, transport):
    ranks = [adapter_of("sglang", sglang_ranks, dp_rank=rank) for rank in (0, 1)]
    tokens = tokens_of("flushed ranks", 100)
    async with following(ranks[0]) as first, following(ranks[1]) as second:
        for adapter, follower in zip(ranks, (first, second), strict=True):
            asked = adapter.prepare("POST", COMPLETIONS, JSON, body(prompt=tokens, max_tokens=1))
            async with await transport.send(asked) as response:
                await response.read()
            await follower.until_held(tokens)
        assert await flushed(ranks[1]) == [{}]
        for follower in (first, second):
            await follower.until(lambda follower=follower: follower.held(tokens) == 0)
