"""A prompt that is computed once for all its choices, over real sockets."""

import asyncio
import json
from time import monotonic

import pytest

from engine_adapter import Capability
from proxy.api.fan_out.serve_parts import LEAST_TOKENS
from proxy.core.quotas import TenantLimits
from proxy.fleet import pool
from proxy.request.tenants import ApiKey
from proxy.settings import LimitSettings
from tests.fakes import CHAT, DONE, client_of, event, is_openai_error, proxy_over

APART = {"runs_several": False, "recomputes_prompts": True}
SLOTS = {**APART, "capabilities": frozenset({Capability.RESTORE})}
LONG = {"model": "m", "messages": [{"role": "user", "content": "zebra " * LEAST_TOKENS}], "n": 3}

SHORT = [{"role": "user", "content": "short"}]


@pytest.fixture
async def proxy(monkeypatch):
    monkeypatch.setattr(pool, "PENDING_LINGER_S", 0.01)
    async with proxy_over(reuse=True) as proxy:
        yield proxy
        await proxy.settled()


@pytest.fixture
async def client(engine, proxy, tokenizer_dir):
    engine.script = Script()
    proxy.add(engine, tokenizer=str(tokenizer_dir), **SLOTS)
    async with client_of(proxy) as client:
        yield client


class Script:
    """Answers like an engine that reuses a prompt once it has computed it."""

    def __init__(self):
        self.computed = False

    async def __call__(self, exchange):
        cached, self.computed = 500 if self.computed else 7, True
        usage = {"prompt_tokens": 501, "completion_tokens": 1}
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if exchange.json.get("stream"):
            await exchange.stream(
                event({"choices": [{"index": 0, "delta": {"content": "x"}}]}),
                event({"choices": [], "usage": usage}),
                DONE,
            )
        else:
            await exchange.send({"choices": [{"index": 0, "message": {"content": "x"}}], "usage": usage})


@pytest.mark.parametrize("stream", [False, True])
async def test_one_token_is_asked_for_before_the_choices(engine, proxy, client, stream):
    fields = {"stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
    response = await client.post(CHAT, json={**LONG, **fields})
    first, *others = [exchange.json for exchange in engine.seen]
    assert (first["max_tokens"], first["max_completion_tokens"], first.get("stream")) == (1, 1, None)
    assert [other.get("max_tokens") for other in others] == [None] * 3
    told = json.loads(response.text.split("\n\n")[-3].removeprefix("data: ")) if stream else response.json()
    counts = {"prompt_tokens": 501, "completion_tokens": 3, "total_tokens": 504}
    assert told["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 7}}
    names = sorted(record.request_id.rpartition("-")[2] for record in proxy.requests)
    assert names == ["0", "1", "2", "prompt"]


@pytest.mark.parametrize("fields", [{"messages": SHORT}, {"messages": "wrong"}, {"chat_template": "{{ x }}"}])
async def test_not_for_a_prompt_that_is_short_or_unknown(engine, client, fields):
    await client.post(CHAT, json={**LONG, **fields})
    assert all("max_tokens" not in exchange.json for exchange in engine.seen)


async def test_not_on_an_engine_that_cannot_restore_it(engine, proxy, tokenizer_dir):
    engine.script = Script()
    proxy.add(engine, tokenizer=str(tokenizer_dir), **APART)
    async with client_of(proxy) as client:
        await client.post(CHAT, json=LONG)
    assert len(engine.seen) == 3


async def test_its_failure_is_left_to_the_choices(engine, client):
    async def script(exchange):
        await exchange.send({"error": {"message": "full"}}, status=503)

    engine.script = script
    assert is_openai_error(await client.post(CHAT, json=LONG), 503)
    assert len(engine.seen) > 1


class TestItIsAdmittedFirst:
    """The prompt of several choices costs what any request costs, and waits like any."""

    @pytest.fixture
    def limits(self, client, proxy):
        """Gives the client's tenant limits, and returns its quota."""
        client.headers["authorization"] = "Bearer key"

        def limits(**limits):
            proxy.tenants.replace([ApiKey.of("key", "t")], {"t": TenantLimits(**limits)})
            return proxy.tenants.quota("t")

        return limits

    @pytest.fixture
    def ask(self, client):
        return lambda **fields: client.post(CHAT, json={**LONG, **fields})

    async def test_who_is_over_a_limit_computes_nothing(self, engine, ask, limits):
        limits(requests_per_minute=1)
        assert (await ask()).status_code == 200
        seen = len(engine.seen)
        assert is_openai_error(await ask(), 429, "rate_limit_exceeded")
        assert len(engine.seen) == seen

    async def test_it_waits_in_the_queue_like_any_request(self, engine, proxy, ask, limits):
        limits()
        proxy.fleet.bound_queues(LimitSettings(queue_requests=0))
        released, script = asyncio.Event(), engine.script

        async def wait(exchange):
            await released.wait()
            await script(exchange)

        engine.script = wait
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(ask(messages=SHORT, n=1))
            await engine.request(1)
            backlog = proxy.fleet.engines["a"].ledger.backlog
            backlog.reported(500)
            backlog.began(monotonic())
            refused = await ask()
            released.set()
        assert is_openai_error(refused, 503, "overloaded")
        assert len(engine.seen) == 2
        assert 'kvpin_refused_total{reason="busy"} 1' in proxy.metrics.render().decode()

    async def test_its_tokens_are_spent_once_where_its_choices_share_it(self, proxy, ask, limits):
        quota = limits(tokens_per_minute=10**6)
        assert (await ask()).status_code == 200
        n_tokens = proxy.last.n_tokens
        use = quota.take()
        assert LEAST_TOKENS < n_tokens < use.tokens < n_tokens + 10
        assert (use.requests, use.running) == (1, 0)
        assert (await ask(messages=SHORT)).status_code == 200  # a prompt that was not shared
        assert quota.take().tokens > 3 * proxy.last.n_tokens

    async def test_choices_run_as_far_as_their_tenant_has_room(self, engine, proxy, ask, limits):
        quota = limits(concurrent_requests=2)
        now = most = counted = 0

        async def script(exchange):
            nonlocal now, most, counted
            now += 1
            most, counted = max(now, most), max(counted, quota.take().running)
            await asyncio.sleep(0.01)
            now -= 1
            await engine_answers(exchange)

        engine_answers, engine.script = engine.script, script
        assert (await ask(n=6)).status_code == 200
        assert (most, counted, quota.take().running) == (2, 2, 0)
        assert len(engine.seen) == 7


async def test_prompts_of_a_list_are_computed_with_their_choices(engine, client):
    await client.post("/v1/completions", json={"model": "m", "prompt": ["zebra " * LEAST_TOKENS] * 2, "n": 2})
    assert len(engine.seen) == 4
