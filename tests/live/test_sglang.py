"""kvpin over SGLang, whose servers are wire-exact fakes here: what is predicted is what they report."""

from __future__ import annotations

import asyncio

import pytest

from engine_adapter.sglang import adapter
from proxy.core.audit import Trust
from proxy.fleet.engine import TOKENS_PER_BLOCK
from tests.fake_engines.sglang import running_sglang
from tests.fake_engines.text import encode
from tests.live.fake_world import KEYS, Talks, predicted, until
from tests.live.sglang_world import kvpin_over

pytestmark = pytest.mark.usefixtures("nothing_lingers")

TEXTS = [text * 2 for text in Talks.TEXTS]


@pytest.mark.parametrize(("page_size", "cache_report"), [(1, False), (16, True), (64, False)])
async def test_what_is_predicted_is_reported(page_size, cache_report):
    """Over evictions, a flush and a restart."""
    options = {"page_size": page_size, "capacity": 2000 // page_size, "enable_cache_report": cache_report}
    with running_sglang(loras=("calm",), **options) as running:
        async with kvpin_over((running, None), tenants=("one", "two")) as world:
            talks = Talks(world, page_size, tenants=("one", "two"), models=("tiny", "tiny", "calm"))
            outcomes = await talks.some(40)
            assert running.told()[1] > 0  # pages were evicted
            assert (await world.operate("flush", all=True))["state"] == "done"
            assert len(running.core.cache) == 0
            outcomes += await talks.some(25)
            before = world.engine().info.instance
            running.fake.restart()
            await until(lambda: world.engine().info.instance != before)
            outcomes += await talks.some(25)
            engine = world.engine()
            counts = engine.audit.view()
            assert (engine.audit.trust, engine.view.counts.orphaned) == (Trust.PRECISE, 0)
    # Pages smaller than kvpin's blocks may be reused up to a block further.
    within = TOKENS_PER_BLOCK if page_size == 1 else 1
    assert [(said, was) for said, was, _ in outcomes if not 0 <= was - said < within] == []
    assert counts.exact == counts.checked == len(outcomes)
    assert all(firm for *_, firm in outcomes)
    assert sum(was for _, was, _ in outcomes) > 1000


async def test_tenants_share_nothing_and_neither_do_extra_keys():
    body = {"model": "tiny", "prompt": list(range(100, 180)), "max_tokens": 2}
    keyed = body | {"extra_key": "k"}
    with running_sglang(page_size=16) as running:
        async with kvpin_over((running, None), tenants=("one", "two")) as world:
            found = []
            for tenant, sent in [("one", body), ("two", body), ("one", keyed), ("two", keyed)] * 2:
                answer = await world.post("completions", sent, tenant)
                found.append((predicted(answer), world.last.reported_tokens))
    # What an extra key shares is not foreseen, and leaves all else as it was.
    assert found == [(0, 0)] * 4 + [(64, 64)] * 2 + [(0, 64)] * 2
    sent = [body for _, body in running.fake.seen]
    assert len({body["cache_salt"] for body in sent}) == 4
    assert not any("extra_key" in body for body in sent)


async def test_a_server_that_cuts_long_prompts_gets_them_and_nothing_is_expected_of_them():
    options = {"max_model_len": 128, "server_info": {"allow_auto_truncate": True}}
    with running_sglang(page_size=16, **options) as running:
        async with kvpin_over((running, None)) as world:
            for length in (123, 124, 4000):
                asked = {"model": "tiny", "prompt": list(range(100, 100 + length)), "max_tokens": 2}
                assert (await world.post("completions", asked)).status_code == 200
                assert (world.last.prompt is None) is (length > 123)
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "word " * 4000}]}
            assert (await world.post("chat/completions", chat | {"max_tokens": 2})).status_code == 200
            assert world.last.prompt is None


async def test_each_rank_of_a_server_is_an_engine():
    body = {"model": "tiny", "prompt": list(range(100, 180)), "max_tokens": 2}
    with running_sglang(ranks=2, page_size=16) as running:
        async with kvpin_over((running, 0), (running, 1)) as world:
            found = [await world.post("completions", body) for _ in range(3)]
            found.append(await world.post("completions", body | {"prompt": list(range(300, 380))}))
            served = [world.engine(name).ledger.placed for name in ("e0", "e1")]
            flushed = await world.operate("flush", engine="e0")
    assert [predicted(answer) for answer in found] == [0, 64, 64, 0]
    assert sorted(served) == [1, 3]
    homes = [answer.headers["x-kvpin-engine"] for answer in found]
    assert len(set(homes[:3])) == 1
    assert homes[3] != homes[0]
    assert [rank for rank, _ in running.fake.seen] == [int(home[1]) for home in homes]
    assert flushed["state"] == "done"


async def test_a_flush_of_a_busy_server_is_told_as_such_and_the_view_stays_right(monkeypatch):
    monkeypatch.setattr(adapter, "_FLUSH_S", 0)
    body = {"model": "tiny", "prompt": list(range(100, 180)), "max_tokens": 2}
    with running_sglang(page_size=16) as running:
        async with kvpin_over((running, None)) as world:
            await world.post("completions", body)
            running.core.hold()
            busy = asyncio.create_task(world.post("completions", body | {"stream": True}))
            await until(lambda: running.core.running == 1)
            part = (await world.operate("flush", all=True))["engines"][0]
            running.core.release()
            await busy
            assert (part["done"], part["left"]) == (0, {"busy": 5})  # pages of the prompt
            answer = await world.post("completions", body)
            assert predicted(answer) == world.last.reported_tokens == 64
            by_prompt = await world.operate("flush", token_ids=body["prompt"])
            answer = await world.post("completions", body)
            assert predicted(answer) == world.last.reported_tokens == 64
    assert by_prompt["state"] == "failed"
    assert "flush the whole engine" in by_prompt["error"]


async def test_a_prompt_waits_for_another_that_computes_its_beginning():
    """In one batch, both would compute it."""
    body = {"model": "tiny", "prompt": list(range(100, 180)), "max_tokens": 2}
    with running_sglang(page_size=16) as running:
        async with kvpin_over((running, None)) as world:
            await world.settle()
            world.proxy.fleet.pools["tiny"].placer.rates.computed(80, 30.0, 0)  # slow enough to be waited for
            running.core.hold()
            first = asyncio.create_task(world.client.post(f"{world.url}/v1/completions", json=body))
            await until(lambda: running.core.running == 1)
            second = asyncio.create_task(world.client.post(f"{world.url}/v1/completions", json=body))
            await until(lambda: len(world.engine().leases) == 2)
            for _ in range(5):  # what was on its way there has arrived
                await world.client.get(f"{world.url}/get_model_info")
            assert running.core.running == 1
            running.core.release()
            answers = [await first, await second]
            found = [
                (predicted(answer), record.reported_tokens)
                for answer, record in zip(answers, list(world.proxy.flow.requests)[-2:], strict=True)
            ]
    assert found == [(0, 0), (64, 64)]


async def test_a_server_without_events_is_learned_from_its_answers():
    body = {"model": "tiny", "prompt": list(range(100, 180)), "max_tokens": 2}
    with running_sglang(page_size=16, kv_events=False, enable_cache_report=False) as running:
        async with kvpin_over((running, None)) as world:
            found = [predicted(await world.post("completions", body)) for _ in range(2)]
            assert (found, world.last.reported_tokens) == ([0, 64], 64)
            assert world.engine().audit.trust is Trust.APPROXIMATE


async def test_generate_is_followed_and_kept_apart():
    """SGLang's own route: text and ids, whole and streamed, each tenant in its namespace."""
    with running_sglang(page_size=16) as server:
        async with kvpin_over((server, None), tenants=("one", "two")) as world:

            async def generate(tenant: str, **fields) -> int:
                """Reused tokens, which kvpin predicted."""
                await world.settle()
                body = {"sampling_params": {"max_new_tokens": 4}, "kv_hints": {"a": 1}, **fields}
                headers = {"authorization": f"Bearer {KEYS[tenant]}"}
                answer = await world.client.post(f"{world.url}/generate", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                await world.recorded(answer)
                assert "kv_hints" not in server.fake.seen[-1][1]
                assert predicted(answer) == world.last.reported_tokens
                return world.last.reported_tokens

            assert await generate("one", text=TEXTS[0]) == 0
            reused = await generate("one", text=TEXTS[0])
            assert reused > TOKENS_PER_BLOCK
            assert await generate("one", input_ids=encode(TEXTS[0]), stream=True) == reused
            assert await generate("two", text=TEXTS[0]) == 0
            assert await generate("two", text=TEXTS[1], extra_key="a") == 0
            headers = {"authorization": f"Bearer {KEYS['one']}"}
            told = await world.client.get(f"{world.url}/get_model_info", headers=headers)
            assert told.json()["is_generation"]
            for path in ("/flush_cache", "/server_info", "/get_server_info"):
                assert (await world.client.get(world.url + path, headers=headers)).status_code == 404
