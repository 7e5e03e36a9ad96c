"""What the contract suite cannot see of LMDeploy's adapter: restarts, sleep, missing flags, its chats."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from engine_adapter import EngineUnavailable, EngineUnhealthy, JsonBody
from engine_adapter.lmdeploy import LMDEPLOY_INPUT, NO_CACHE, NO_METRICS
from engine_adapter.prompt.chat import ChatTokenizer
from tests.fake_engines.lmdeploy import CHAT, COMPLETIONS, running_lmdeploy
from tests.fake_engines.sglang import running_sglang
from tests.fake_engines.text import MODEL_DIR

JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "word " * 200}]


@pytest.fixture
def adapter_of(make):
    return lambda url, **fields: make("lmdeploy", url, **fields)


def body(**fields):
    return JsonBody(json.dumps({"model": "org/tiny", **fields}).encode())


async def test_a_restarted_server_is_another(adapter_of):
    with running_lmdeploy() as server:
        adapter = adapter_of(server.url)
        first = await adapter.connect()
        await adapter.load()
        server.fake.restart()
        with pytest.raises(EngineUnavailable, match="restarted"):
            await adapter.load()
        assert (await adapter.connect()).instance != first.instance
        await adapter.load()


async def test_one_that_sleeps_has_lost_its_kv_and_one_that_is_not_healthy_may_become_so(adapter_of):
    with running_lmdeploy() as server:
        adapter = adapter_of(server.url)
        await adapter.connect()
        server.fake.is_sleeping = True
        for call in (adapter.load, adapter.connect):
            with pytest.raises(EngineUnavailable, match="POST /wakeup"):
                await call()
        server.fake.health = ("unhealthy", "No successful health probe for 91.0s.", 503)
        with pytest.raises(EngineUnhealthy):
            await adapter.load()


async def test_the_load_of_a_server(adapter_of, transport):
    with running_lmdeploy(gpu_blocks=10) as server:
        adapter = adapter_of(server.url)
        await adapter.connect()
        server.fake.core.reset()
        server.fake.core.hold(after=1)
        sent = adapter.prepare("POST", CHAT, JSON, body(messages=MESSAGES, max_tokens=2, stream=True))
        async with await transport.send(sent) as response:
            await response.receive()
            load = await adapter.load()
        assert (load.running, load.waiting, load.counted) == (1, 0, True)
        assert 0 < load.gpu_usage < 1
        server.fake.core.release()


async def test_a_server_without_metrics(adapter_of):
    with running_lmdeploy(metrics=False) as server:
        adapter = adapter_of(server.url)
        first = await adapter.connect()
        assert adapter.findings() == (NO_METRICS,)
        assert (first.names_process, (await adapter.connect()).instance) == (False, first.instance)
        load = await adapter.load()
        assert (load.counted, load.outdated) == (False, False)
        server.fake.options = replace(server.fake.options, model="org/other")
        assert (await adapter.load()).outdated


@pytest.mark.parametrize(
    ("caching", "may_try", "trials", "found"),
    [(True, True, 2, ()), (False, True, 2, (NO_CACHE,)), (False, False, 0, ())],
)
async def test_it_tries_once_whether_the_cache_is_on(adapter_of, caching, may_try, trials, found):
    with running_lmdeploy(caching=caching) as server:
        adapter = adapter_of(server.url)
        adapter.may_try = may_try
        for _ in range(2):
            await adapter.connect()
            assert (adapter.findings(), len(server.fake.seen)) == (found, trials)
        if caching:  # a server that has reused KV is not tried
            await adapter_of(server.url).connect()
            assert len(server.fake.seen) == trials


async def test_an_older_server_does_not_tell_whether_the_cache_is_on(adapter_of):
    with running_lmdeploy(tells_cached=False, caching=False) as server:
        adapter = adapter_of(server.url)
        await adapter.connect()
        assert (adapter.findings(), len(server.fake.seen)) == ((), 1)


async def test_a_busy_server_joins_untried(adapter_of, monkeypatch):
    with running_lmdeploy(caching=False) as server:
        adapter = adapter_of(server.url)
        with monkeypatch.context() as hasty:
            hasty.setattr("engine_adapter.lmdeploy._PATIENCE_S", 0.0)
            await adapter.connect()
            assert adapter.findings() == ()
        await adapter.connect()
        assert adapter.findings() == (NO_CACHE,)


@pytest.mark.parametrize(
    ("model", "fields", "tokenizer"),
    [("org/tiny", {}, "org/tiny"), ("tiny", {}, None), ("tiny", {"tokenizer": "/t"}, "/t")],
)
async def test_its_name_is_its_tokenizer_if_it_is_a_path(adapter_of, model, fields, tokenizer):
    with running_lmdeploy(model=model, adapters=("ada", "bob")) as server:
        info = await adapter_of(server.url, **fields).connect()
    assert (info.model, info.loras, info.tokenizer) == (model, {"ada", "bob"}, tokenizer)


async def test_it_says_that_it_is_another_kind(adapter_of):
    with running_sglang() as server:
        adapter = adapter_of(server.url)
        await adapter.connect()
        (finding,) = adapter.findings()
    assert "it is no lmdeploy" in finding.problem


async def test_what_requests_are_sent(adapter_of):
    """A stream is asked for its usage; session ids, of which two equal ones are an error, are left out."""
    adapter = adapter_of("http://127.0.0.1:1")
    async with adapter.hold(CHAT, body(messages=MESSAGES, stream=True, session_id=7), None) as hold:
        sent = json.loads(hold.body.raw)
    assert "session_id" not in sent
    assert sent["stream_options"] == {"include_usage": True}
    given = body(prompt=["Hello", "you"])
    async with adapter.hold(COMPLETIONS, given, None) as hold:
        assert hold.body.raw == given.raw


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer.load(str(MODEL_DIR)).rendering(LMDEPLOY_INPUT)


def test_chats_as_its_template_gets_them(chat):
    """Functions stand alone, in the order of its model; a content is never null."""
    function = {"name": "f", "strict": True, "description": "d"}
    text = chat.render(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None},
        ],
        tools=[{"type": "function", "function": function}],
    )
    assert '{"description": "d", "name": "f", "parameters": null}' in text
    assert "a\nb" in text
    assert "None" not in text


@pytest.mark.parametrize("tool", [{}, {"type": "function"}, {"function": None}, {"function": "f"}])
def test_a_tool_without_a_function_is_the_servers_to_refuse(chat, tool):
    assert chat.render([{"role": "user", "content": "a"}], tools=[tool])
