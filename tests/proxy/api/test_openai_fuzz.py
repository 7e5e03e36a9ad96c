"""Whatever a client sends is answered in OpenAI's shape, and the next request is served as ever."""

import asyncio
import contextlib
import os
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_adapter import Capability
from engine_adapter.prompt.template_trials import MessageShape
from engine_adapter.types import TRANSLATED_ROUTES
from tests.fakes import (
    ANSWER,
    ASK,
    CHAT,
    INFO,
    STREAM,
    FakeAdapter,
    FakeEngine,
    answer,
    client_of,
    connect_to,
    give_prompts,
    prompts_of,
    proxy_over,
)
from tests.fuzz import PATHS, STREAMS, agent_requests, bodies
from tests.held_loop import watched

FUZZ = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def world(tokenizer_dir):
    """An engine, a proxy and a client in a loop of their own, shared by all examples."""
    with asyncio.Runner() as runner:

        async def script(exchange):
            engine.seen.clear()
            is_stream = b'"stream":true' in exchange.body.replace(b" ", b"")
            await (answer(exchange) if is_stream else exchange.send(ANSWER))

        engine = FakeEngine(script=script)
        runner.run(engine.__aenter__())
        running = proxy_over(reuse=True)
        proxy = runner.run(running.__aenter__())
        info = replace(
            INFO,
            vocab_size=600,
            max_model_len=2000,
            tokenizer=str(tokenizer_dir),
            capabilities=frozenset({Capability.EXTRA_IDS}),
            renders_alike=True,
            served_as_chats=TRANSLATED_ROUTES,
        )
        proxy.add(FakeAdapter("a", engine.url, info=info))
        give_prompts(proxy.fleet.pools["m"], prompts_of(info))
        client = client_of(proxy)
        yield runner, proxy, client
        runner.run(client.aclose())
        runner.run(proxy.settled())
        runner.run(running.__aexit__(None, None, None))
        runner.run(engine.stop())


def test_any_body_is_answered_and_harms_nobody(world):
    runner, proxy, client = world

    @FUZZ
    @given(PATHS, bodies() | st.binary(max_size=50))
    def check(path, body):
        runner.run(ask(path, body))

    async def ask(path, body):
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
        if response.status_code >= 400:
            assert response.status_code in (400, 404), (response.status_code, response.text, body)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert isinstance(error["message"], str)
            assert error["type"] == "invalid_request_error"
        assert proxy.fleet.engines["a"].state == "ready"
        assert proxy.fleet.engines["a"].ledger.in_flight == 0

    check()
    for body in (ASK, STREAM):
        assert runner.run(client.post(CHAT, json=body)).status_code == 200


def test_any_bytes_on_a_connection_are_answered_or_refused(world):
    (runner, proxy, client), seen = world, Counter()

    @FUZZ
    @given(STREAMS)
    def check(sent):
        told = runner.run(statuses(proxy, sent))
        seen.update(told)
        assert all(status < 500 or status in (501, 503) for status in told), (told, sent)

    check()
    assert {200, 400} <= seen.keys(), seen
    assert runner.run(client.post(CHAT, json=ASK)).status_code == 200


MOST_AGENTS = int(os.environ.get("KVPIN_AGENT_REQUESTS", "100"))  # `scripts/test-fuzz --agents` sends 50,000


def test_any_request_of_an_agent_is_answered_and_holds_up_nobody(world, monkeypatch):
    runner, proxy, client = world
    (builder,) = proxy.fleet.pools["m"].renderings
    counts, longest, lost = Counter(), [0.0], [frozenset(), frozenset(MessageShape)]

    @settings(FUZZ, max_examples=MOST_AGENTS)
    @given(agent_requests(), st.sampled_from(lost))
    def check(asked, lost):
        proxy.fleet.pools["m"].lost_shapes = lost
        builder.forms.lost_shapes = lost
        runner.run(ask(*asked))

    async def ask(path, body):
        async with watched() as hold:
            response = await client.post(path, content=body, headers={"content-type": "application/json"})
        counts[response.status_code] += 1
        longest.append(hold.ms)
        assert response.status_code < 500, (response.status_code, response.text, body)
        assert proxy.fleet.engines["a"].ledger.in_flight == 0

    check()
    longest.sort()
    print(f"{dict(counts)}; holds of the loop: {longest[-1]:.0f} ms, the tenth {longest[-10]:.0f} ms")  # noqa: T201 - with -s
    builder.forms.lost_shapes = proxy.fleet.pools["m"].lost_shapes = frozenset()


async def statuses(proxy, sent):
    """The statuses of the answers to what one client sends."""
    reader, writer = await connect_to(proxy)
    writer.write(sent)
    answers = asyncio.create_task(reader.read())
    await asyncio.wait([answers], timeout=0.05)
    with contextlib.suppress(ConnectionError):
        writer.write_eof()  # the last request may have become part of a body that is not complete
        await asyncio.wait_for(answers, 30)
    writer.close()
    answers = b"" if answers.exception() else answers.result()
    return [int(status) for status in re.findall(rb"^HTTP/1\.1 (\d{3}) ", answers, re.MULTILINE)]
