"""kvpin over a fake trtllm-serve: what is predicted is what it reports, and only fields it takes go to it."""

from __future__ import annotations

import pytest

from engine_adapter.tensorrt_llm import poller
from proxy.core.audit import Trust
from tests.fake_engines.nim import FakeNim, running_nim
from tests.fake_engines.tensorrt_llm import CHAT, RunningTrtllm, running_trtllm
from tests.live.fake_world import Talks, predicted, until
from tests.live.tensorrt_llm_world import kvpin_over

TEXTS = [text * 4 for text in Talks.TEXTS]
HINTS = {"prompt_cache_key": "k", "session_id": "s", "safety_identifier": "i", "service_tier": "auto"}


@pytest.fixture(autouse=True)
def quick(monkeypatch, nothing_lingers):
    monkeypatch.setattr(poller, "BUSY_S", 0.01)
    monkeypatch.setattr(poller, "IDLE_S", 0.05)


@pytest.mark.parametrize(
    ("tokens_per_block", "tenants", "count"), [(32, (), 60), (16, ("one", "two"), 40), (64, (), 40)]
)
async def test_what_is_predicted_is_reported(tokens_per_block, tenants, count):
    """Over evictions, blocks that go to host memory and come back, a flush, and a restart."""
    options = {"gpu_blocks": 1800 // tokens_per_block, "host_blocks": 900 // tokens_per_block}
    with running_trtllm(tokens_per_block=tokens_per_block, **options) as server:
        async with kvpin_over(server, *tenants) as world:
            # Texts have no salt at all here: they are for those who have no tenant.
            whose = {"tenants": tenants or (None,), "has_texts": not tenants}
            talks = Talks(world, tokens_per_block, size=2, hints=HINTS, **whose)
            outcomes = await talks.some(count)
            told = server.fake.told
            assert min(told["removed"], told["offloaded"], told["onboarded"]) > 0
            assert (await world.operate("flush", all=True))["state"] == "done"
            assert len(server.fake.cache) == 0
            assert (await talks.some(1))[0][:2] == (0, 0)
            outcomes += await talks.some(count // 2)
            server.fake.restart()
            await until(lambda: world.engine().adapter._poller.reader.restarts == 1)
            outcomes += await talks.some(count // 2)
            counts = world.engine().audit.view()
            assert (world.engine().audit.trust, world.engine().view.counts.orphaned) == (Trust.PRECISE, 0)
    assert [(said, was) for said, was, _ in outcomes if said != was] == []
    assert counts.exact == counts.checked == len(outcomes) + 1
    assert all(firm for *_, firm in outcomes)
    assert sum(was for _, was, _ in outcomes) > 20 * count
    sent = [body for _, body in server.fake.seen]
    assert not any(HINTS.keys() & body.keys() for body in sent)
    # kvpin's token ids are known to be the server's own, and spare it the work, but for what is audited: the
    # first 16 prompts, and again if kvpin saw the server leave at its restart.
    spared = ["prompt_token_ids" in body for path, body in server.fake.seen if path == CHAT]
    assert spared.count(False) <= 40


async def test_pushed_events_are_followed_as_well():
    """Over evictions, blocks that go to host memory, and a flush."""
    options = {"gpu_blocks": 56, "host_blocks": 28, "pushes": True, "replays": True}
    with running_trtllm(**options) as server:
        publisher = server.fake.publisher
        addresses = {"events": publisher.endpoint, "replay": publisher.replay_endpoint}
        async with kvpin_over(server, **addresses) as world:
            talks = Talks(world, 32, size=2, hints=HINTS)
            outcomes = await talks.some(60)
            assert min(server.fake.told["removed"], server.fake.told["offloaded"]) > 0
            assert (await world.operate("flush", all=True))["state"] == "done"
            outcomes += await talks.some(30)
            assert world.engine().audit.trust is Trust.PRECISE
    assert [(said, was) for said, was, _ in outcomes if said != was] == []
    assert all(firm for *_, firm in outcomes)
    assert sum(was for _, was, _ in outcomes) > 20 * len(outcomes)
    assert server.fake.polls == 0


@pytest.mark.parametrize(
    "fields", [("name", "description", "parameters", "strict"), ("name", "description", "parameters")]
)
async def test_tools_are_written_as_it_writes_them(fields):
    """Its models add fields to a function, so that kvpin's tokens would differ from the first tool on."""
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
    }
    bodies = [
        {"model": "tiny", "messages": [{"role": "user", "content": text}], "tools": [tool], "max_tokens": 2}
        for text in TEXTS
    ]
    with running_trtllm(of_functions=fields, tokens_per_block=16) as server:
        async with kvpin_over(server) as world:
            await world.settle()
            assert world.proxy.fleet.pools["tiny"].prompts.exactness.source == "local"
            for body in bodies * 9:
                answer = await world.post("chat/completions", body)
                assert predicted(answer) == world.last.reported_tokens
        assert world.last.reported_tokens > 0
        assert "prompt_token_ids" in server.fake.seen[-1][1]  # the first ones were audited


async def test_partial_reuse_makes_predictions_lower_bounds():
    with running_trtllm(enable_partial_reuse=True, tells_partial=True) as server:
        async with kvpin_over(server) as world:
            body = {"model": "tiny", "prompt": list(range(100, 196)), "max_tokens": 2}
            for was in (0, 95):
                answer = await world.post("completions", body)
                assert world.last.reported_tokens == was
                assert not world.last.placement.firm
            assert predicted(answer) == 64
            assert world.engine().audit.view().checked == 0  # nothing is held against what may be more


async def test_tenants_share_nothing():
    messages = [{"role": "user", "content": TEXTS[0]}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 2}
    with running_trtllm() as server:
        async with kvpin_over(server, "one", "two") as world:
            found = []
            for tenant in ("one", "two", "one", "two"):
                answer = await world.post("chat/completions", body, tenant)
                found.append((predicted(answer), world.last.reported_tokens))
            refused = await world.post("completions", {"model": "tiny", "prompt": "x"}, "one")
        assert found[:2] == [(0, 0)] * 2
        assert found[2] == found[3] != (0, 0)
        assert found[2][0] == found[2][1]
        assert len({body["cache_salt"] for _, body in server.fake.seen}) == 2
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "cache_salt")
        assert "send the request to /v1/chat/completions" in error["message"]
        assert len(server.fake.seen) == 4  # it never ran


async def test_what_it_refuses_comes_back_in_openais_shape():
    with running_trtllm() as server:
        async with kvpin_over(server) as world:
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
            unknown = await world.post("chat/completions", asked | {"extra_key": "x"})
            too_long = await world.post("completions", {"model": "tiny", "prompt": [5] * 2048})
            told = await world.post("chat/completions", asked | HINTS)
    assert unknown.status_code == too_long.status_code == 400
    assert "extra_forbidden" in unknown.json()["error"]["message"]
    assert "max_seq_len" in too_long.json()["error"]["message"]
    assert told.status_code == 200
    assert told.headers["x-kvpin-note"].endswith(", ".join(sorted(HINTS)))


async def test_a_server_without_events_is_found_out_and_its_answers_teach():
    with running_trtllm(event_buffer_max_size=0) as server:
        async with kvpin_over(server) as world:
            prompts = [list(range(at, at + 100)) for at in range(100, 100 + poller.SILENT_PROMPTS)]

            async def complete(prompt):
                answer = await world.client.post(
                    f"{world.url}/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 2}
                )
                return predicted(answer), world.last.reported_tokens

            for prompt in prompts:
                assert await complete(prompt) == (0, 0)
            await until(lambda: world.engine().adapter._poller.doubt is not None)
            await until(lambda: world.engine().audit.trust is Trust.APPROXIMATE)
            assert await complete(prompts[0]) == (0, 96)
            assert await complete(prompts[0]) == (96, 96)
            stats = (await world.client.get(f"{world.url}/admin/v1/stats")).json()
            (engine,) = stats["pools"][0]["engines"]
            assert any("event_buffer_max_size: 16384" in finding for finding in engine["findings"])


async def test_inside_a_nim_it_is_followed_as_well():
    body = {"model": "tiny", "prompt": list(range(100, 200)), "max_tokens": 2}
    with running_trtllm() as server, running_nim(FakeNim(tuple(server.fake.app.routes))) as url:
        async with kvpin_over(RunningTrtllm(url, server.fake), kind="nim") as world:
            for was in (0, 96):
                answer = await world.post("completions", body)
                assert (predicted(answer), world.last.reported_tokens) == (was, was)
            assert world.engine().info.version == "NIM 2.0.0, TensorRT-LLM 1.4.0"
