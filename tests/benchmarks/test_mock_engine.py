import asyncio
import json
from array import array

import httpx
import pytest

from engine_adapter.events.wire import EventReader
from engine_adapter.types import CacheCleared
from proxy.core.index.blocks import chain, namespace_root
from proxy.core.index.match import Match
from proxy.core.index.prefix_index import PrefixIndex
from proxy.core.index.view import EngineView
from tests.fake_engines.cache import CachePrompt

RATE = 1e6


@pytest.fixture
def core(script):
    return script.TimedCore(script.QuickCache(16, 64), script.Clock(RATE, 0.0), lambda: None)


async def served(core, tokens, answer=1):
    async with core.generate(CachePrompt(tuple(tokens)), answer) as generation:
        output = [token async for token in generation.output]
    return generation.cached_tokens, tuple(output)


async def test_what_a_prompt_before_left_is_found_when_the_next_begins(core):
    prompts = [range(100), range(100), range(50, 150)]
    answers = await asyncio.gather(*(served(core, tokens) for tokens in prompts))
    assert [cached for cached, _ in answers] == [0, 96, 0]  # the second came while the first was computed
    assert core.record.busy_s == pytest.approx((100 + 4 + 100) / RATE)
    assert (core.record.requests, len(core.record.first_token_s)) == (3, 3)


async def test_an_answer_is_that_of_the_workload_and_is_cached(core, script):
    _, output = await served(core, range(100), answer=20)
    assert output == script.answer_ids(range(100), 20)
    cached, _ = await served(core, [*range(100), *output, 1])
    assert cached == 112  # all of the 120 tokens but the last, whose KV is not there yet


async def test_the_least_recently_used_prompt_makes_room(core):
    for start in (0, 1000, 2000, 0, 3000):
        await served(core, range(start, start + 16 * 16))
    # 64 pages hold four prompts less what the answers took; 1000 is the one not used for longest.
    assert [(await served(core, range(start, start + 16 * 16)))[0] for start in (0, 2000, 3000)] == [240] * 3


async def test_a_client_that_leaves_while_it_waits_holds_nothing(core):
    slow = asyncio.create_task(served(core, range(1000, 1200)))
    waits = asyncio.create_task(served(core, range(200)))
    await asyncio.sleep(0)
    waits.cancel()
    await slow
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert (core.running, core.waiting, core.cache.used) == (0, 0, 0)
    assert (await served(core, range(200)))[0] == 0


async def test_events_of_a_hybrid_model_tell_kvpin_what_it_reuses(script):
    options = script.VllmOptions(num_gpu_blocks=129)
    engine = script.MockVllm(options, script.Clock(RATE, 0.0), window_groups=2, window_tokens=33)
    index, reader, root, heard = PrefixIndex(), EventReader(), namespace_root("m"), 0
    index.add_engine("a")
    view = EngineView("a", index, lambda _salt, _lora: root, 16)
    view.apply(CacheCleared())
    predicted, reused = [], []
    lengths, owns = (100, 100, 200, 300, 40, 200, 300, 100, 300), (0, 1, 1, 2, 3, 1, 4, 1, 2)
    for length, own in zip(lengths, owns, strict=True):
        tokens = array("i", [*range(100), *range(1000 * own, 1000 * own + length)])
        asked = chain(root, tokens, None, 16)
        match = index.match(asked.hashes, asked.reusable).get("a", Match())
        predicted.append(min(match.blocks, asked.reusable) * 16)
        reused.append((await served(engine.cores[0], tokens, answer=20))[0])
        for _, payload in list(engine.publishers[0]._buffer)[heard:]:
            heard += 1
            for event in reader.read(payload):
                view.apply(event)
    engine.close()
    assert predicted == reused
    assert len(set(reused)) > 3


async def test_a_restart_forgets_what_it_was_sent(script):
    engine = script.MockVllm(script.VllmOptions(kv_events=False), script.Clock(RATE, 0.0))
    transport = httpx.ASGITransport(engine.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        body = {"model": "tiny", "prompt": "a b c"}
        for path in ("/v1/completions", "/v1/completions/render"):
            (await client.post(path, json=body)).raise_for_status()
        assert (len(engine.seen), len(engine.rendered)) == (1, 1)
        (await client.post("/mock/restart")).raise_for_status()
    assert (engine.seen, engine.rendered) == ([], [])
    assert engine.cores[0].record.requests == 0
    engine.close()


async def test_a_quick_stream_says_what_the_fakes_own_says(script):
    engine = script.MockVllm(script.VllmOptions(model=script.MODEL), script.Clock(RATE, 0.0))
    body = {"model": script.MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    body |= {"stream": True, "return_token_ids": True}

    async def events(**more):
        answer = await client.post(script.CHAT, json=body | more)
        told = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        return [(event["choices"], event.get("prompt_token_ids")) for event in told if event["choices"]]

    async with httpx.AsyncClient(transport=httpx.ASGITransport(engine.app), base_url="http://e") as client:
        assert await events() == await events(vllm_xargs={})
    engine.close()
