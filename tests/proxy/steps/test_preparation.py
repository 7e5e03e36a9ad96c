"""How requests are read: model names on their way to engines, long bodies one after the other, and what an
engine gets that goes on with a stream."""

import asyncio
import json
import re
from array import array

import pytest

from engine_adapter import Headers, JsonBody, Resumption
from proxy.prompt.builder import Prompt
from proxy.request.calls import Call
from proxy.request.migration import SentStream
from proxy.request.tenants import ApiKey, Tenants
from proxy.steps import preparation
from proxy.steps.preparation import Preparation, Ready
from tests.fakes import ASK, CHAT, client_of, is_openai_error, proxy_over


class TestNames:
    """The names that engines get, and those that records and metrics show."""

    @pytest.fixture
    async def client(self, engine, other):
        """`m` checks names, `any` does not; its bytes must stay as they are."""
        aliases = {"gpt": "m", "tuned": "ada", "local": "any"}
        async with proxy_over(aliases=aliases) as proxy, client_of(proxy) as client:
            client.proxy = proxy
            proxy.add(engine, loras=frozenset({"ada"}))
            proxy.add(other, model="any", any_model=True)
            yield client
            await proxy.settled()

    async def test_a_request_without_a_name_gets_the_default_one(self, engine, client):
        assert is_openai_error(
            await client.post(CHAT, json={"messages": []}), 404, "model_not_found", "model"
        )
        client.proxy.fleet.default_model = "tuned"
        await client.post(CHAT, json={"messages": []})
        assert engine.seen[0].json == {"messages": [], "model": "ada"}
        await client.get("/v1/files")
        assert (engine.seen[1].method, engine.seen[1].body) == ("GET", b"")

    async def test_metrics_show_what_served_and_records_what_was_asked(self, client):
        for number in range(50):
            await client.post(CHAT, json=ASK | {"model": f"made-up-{number}"})
        for name in ("gpt", "tuned", "x" * 100_000):
            await client.post(CHAT, json=ASK | {"model": name})
        page = client.proxy.metrics.render().decode()
        labels = set(re.findall(r'^kvpin_requests_total\{.*model="([^"]*)"', page, re.MULTILINE))
        assert labels == {"any", "m", "ada"}
        records = list(client.proxy.requests)
        assert [(each.model, each.served_as, each.lora) for each in records[-3:-1]] == [
            ("gpt", "m", None), ("tuned", "m", "ada"),
        ]  # fmt: skip
        assert len(records[-1].model) == 200


async def test_a_tenants_long_bodies_are_read_one_after_the_other_and_hold_up_nobody_else(monkeypatch):
    monkeypatch.setattr(preparation, "_LONG_BYTES", 100)
    begun, may_end = [], asyncio.Event()

    class Slow:
        def by_model_alone(self, call):
            return None

        async def find(self, call):
            begun.append(call.request_id)
            await may_end.wait()
            raise LookupError

    def call(name, tenant, length):
        body = JsonBody(b'{"text": "%b"}' % (b"x" * length))
        return Call(name, "POST", CHAT, Headers([]), body, tenant=tenant)

    steps = Preparation(Slow(), None, None, {}, reuse=True)
    calls = [
        call("first", "ada", 200),
        call("second", "ada", 200),
        call("short", "ada", 1),
        call("bob", "bob", 200),
    ]
    tasks = [asyncio.create_task(steps.prepare(each)) for each in calls]
    await asyncio.sleep(0.01)
    assert begun == ["first", "short", "bob"]
    may_end.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert begun[-1] == "second"
    assert all(isinstance(each, LookupError) for each in ended)
    assert not steps._turns  # no lock is kept


async def test_a_uuid_keeps_its_image_when_the_only_tenant_becomes_another(engine):
    """Without a salt, engines answer the next tenant from the first one's image."""

    def asked(content):
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}, "uuid": "cat"}
        return {"model": "m", "messages": [{"role": "user", "content": [part]}]}

    tenants = Tenants([ApiKey.of("k", "ada")])
    async with proxy_over(engine, tenants=tenants) as proxy:
        async with client_of(proxy, headers={"authorization": "Bearer k"}) as client:
            assert (await client.post(CHAT, json=asked("eA=="))).status_code == 200
            tenants.replace([ApiKey.of("k", "bob")], {})
            refused = await client.post(CHAT, json=asked("eQ=="))
            assert (await client.post(CHAT, json=asked("eA=="))).status_code == 200
        assert is_openai_error(refused, 400, param="messages[0].content[0].uuid")
        assert [each.json for each in engine.seen] == [asked("eA==")] * 2
        await proxy.settled()


def test_a_prompt_that_is_more_than_text_stays_as_it_was_for_the_engine_that_goes_on():
    call = Call("r", "POST", "/v1/completions", Headers([]), JsonBody(b'{"prompt": [1, 2]}'))
    prompt = Prompt(array("i", [1, 2]), array("Q", [7, 7]))
    told = Resumption(array("i", [3]), {"answer_token_ids": [3]})
    ready = Ready(call, None, None, None, prompt)
    after = ready.going_on(SentStream("torch", None, False, (), told, None))
    assert (after.prompt, after.kind) == (prompt, "torch")
    assert json.loads(after.call.body.raw) == {"prompt": [1, 2], "answer_token_ids": [3]}
