"""The order of the gate, over real sockets: nothing is read, decoded or counted before it is admitted."""

import re
import time
from dataclasses import replace

import pytest

from engine_adapter import off_loop
from engine_adapter.off_loop import THREADS
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.types import MESSAGES_ROUTES
from proxy.api import openai
from proxy.core.quotas import TenantLimits
from proxy.fleet.fleet import Fleet
from proxy.observe.metrics import Metrics
from proxy.request.tenants import ApiKey, Tenants
from tests.fakes import ASK, CHAT, INFO, FakeAdapter, client_of, is_openai_error, proxy_over

COUNT = "/v1/messages/count_tokens"
KEY = {"authorization": "Bearer key"}


def tenants_with(**limits):
    return Tenants([ApiKey.of("key", "gate")], {"gate": TenantLimits(**limits)})


@pytest.fixture
def adapter(engine, tokenizer_dir):
    info = replace(INFO, tokenizer=str(tokenizer_dir), served_as_chats=MESSAGES_ROUTES, max_model_len=1000)
    return FakeAdapter("a", engine.url, info)


@pytest.mark.parametrize("path", [CHAT, COUNT, "/v1/responses/input_tokens", "/v1/embeddings"])
async def test_what_a_quota_refuses_is_not_parsed(engine, path, monkeypatch):
    parsed = []
    monkeypatch.setattr(openai, "parse", lambda raw, _most: parsed.append(raw))
    tenants = tenants_with(requests_per_minute=1)
    async with proxy_over(engine, tenants=tenants) as proxy, client_of(proxy, headers=KEY) as client:
        tenants.quota("gate").enter(time.monotonic())
        answer = await client.post(path, content=b"x" * 900_000)
    assert answer.status_code == 429
    assert parsed == []


async def test_a_body_of_a_bad_shape_is_refused_before_it_is_decoded(engine, monkeypatch):
    decoded = []
    monkeypatch.setattr("proxy.request.bodies.JsonBody", decoded.append)
    raw = b"{" + b",".join(b'"%x":0' % i for i in range(131_073))  # no JSON, but nobody finds out
    async with proxy_over(engine, max_body_bytes=64 << 20) as proxy, client_of(proxy) as client:
        answer = await client.post(CHAT, content=raw)
        assert is_openai_error(answer, 400, "body_too_complex")
        assert 'kvpin_refused_total{reason="shape"} 1' in proxy.metrics.render().decode()
    assert decoded == engine.seen == []


async def test_a_long_body_is_parsed_in_a_thread_that_is_charged_to_its_tenant(engine):
    tenants, before = tenants_with(), THREADS.spent
    async with proxy_over(engine, tenants=tenants) as proxy, client_of(proxy, headers=KEY) as client:
        await client.post(CHAT, json={**ASK, "user": "x" * 900_000})
    key = ("gate", "parse")
    measured_s = THREADS._in_threads[key]
    assert measured_s > 0
    assert THREADS.spent[key] > before.get(key, 0.0)


@pytest.mark.parametrize("path", [CHAT, COUNT])
async def test_a_prompt_that_cannot_fit_is_not_encoded_and_is_charged(adapter, engine, path, monkeypatch):
    """Of 400,000 characters, one piece at most."""
    encoded, encode = [], ChatTokenizer.encode

    def counting(self, text, **options):
        encoded.append(len(text))
        return encode(self, text, **options)

    tenants = tenants_with(tokens_per_minute=100)
    async with (
        proxy_over(adapter, tenants=tenants, reuse=True) as proxy,
        client_of(proxy, headers=KEY) as client,
    ):
        monkeypatch.setattr(ChatTokenizer, "encode", counting)
        ask = {**ASK, "messages": [{"role": "user", "content": "z9" * 100_000}], "max_tokens": 1}
        answer = await client.post(path, json=ask)
        assert answer.status_code == 400
        assert re.search("context is 1000 tokens; the prompt has at least|tokens > 1000 maximum", answer.text)
        assert sum(encoded) <= 65_536
        assert (await client.post(path, json=ask)).status_code == 429
    assert engine.seen == []


async def test_what_is_counted_is_charged(adapter):
    tenants = tenants_with(tokens_per_minute=5)
    ask = {**ASK, "messages": [{"role": "user", "content": "some words to count"}], "max_tokens": 1}
    async with (
        proxy_over(adapter, tenants=tenants, reuse=True) as proxy,
        client_of(proxy, headers=KEY) as client,
    ):
        assert (await client.post(COUNT, json=ask)).status_code == 200
        assert (await client.post(COUNT, json=ask)).status_code == 429


def test_the_cpu_time_of_tenants_is_a_metric(monkeypatch):
    threads = off_loop.FairThreads(1, 1)
    monkeypatch.setattr("proxy.observe.metrics.THREADS", threads)
    for tenant, what in (("a", "parse"), ("a", "render"), ("b", "parse"), (None, "parse")):
        threads.on_loop[tenant, what] += 0.5
    name = "kvpin_tenant_cpu_seconds_total"
    assert f"{name}{{" not in Metrics(Fleet()).render().decode()
    shown = Metrics(Fleet(), tenants=1)
    shown._tenants.add("a")
    lines = re.findall(rf"^{name}{{.*$", shown.render().decode(), re.MULTILINE)
    assert lines == [
        f'{name}{{tenant="a",what="parse"}} 0.5',
        f'{name}{{tenant="a",what="render"}} 0.5',
        f'{name}{{tenant="all others",what="parse"}} 0.5',
    ]
