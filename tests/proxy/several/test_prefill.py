"""A prompt that is computed once for all its choices, over real sockets."""

import json

import pytest

from engine_adapter import Capability
from proxy.several.prefill import LEAST_TOKENS
from tests.fakes import CHAT, DONE, FakeEngine, client_of, event, is_openai_error, proxy_over

SLOTS = {"splits_choices": True, "capabilities": frozenset({Capability.RESTORE})}
LONG = {"model": "m", "messages": [{"role": "user", "content": "zebra " * LEAST_TOKENS}], "n": 3}


@pytest.fixture
async def engine():
    async with FakeEngine("a") as engine:
        yield engine


@pytest.fixture
async def proxy():
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
        usage = {
            "prompt_tokens": 501,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
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
    usage = (
        json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["usage"]
        if stream
        else response.json()["usage"]
    )
    assert usage == {
        "prompt_tokens": 501,
        "completion_tokens": 3,
        "total_tokens": 504,
        "prompt_tokens_details": {"cached_tokens": 7},
    }
    assert len(list(proxy.requests)) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "short"}]},
        {"messages": "wrong"},
        {"chat_template": "{{ messages }}"},  # a prompt that is not known
    ],
)
async def test_not_for_a_prompt_that_is_short_or_unknown(engine, client, fields):
    await client.post(CHAT, json={**LONG, **fields})
    assert all("max_tokens" not in exchange.json for exchange in engine.seen)


async def test_not_on_an_engine_that_cannot_restore_it(engine, proxy, tokenizer_dir):
    engine.script = Script()
    proxy.add(engine, tokenizer=str(tokenizer_dir), splits_choices=True)
    async with client_of(proxy) as client:
        await client.post(CHAT, json=LONG)
    assert len(engine.seen) == 3


async def test_not_if_no_engine_is_ready(engine, proxy, client):
    proxy.fleet.engines["a"].state = "down"
    assert is_openai_error(await client.post(CHAT, json=LONG), 503)


async def test_its_failure_is_left_to_the_choices(engine, client):
    async def script(exchange):
        await exchange.send({"error": {"message": "full"}}, status=503)

    engine.script = script
    assert is_openai_error(await client.post(CHAT, json=LONG), 503)
    assert len(engine.seen) > 1


async def test_prompts_of_a_list_are_computed_with_their_choices(engine, client):
    await client.post("/v1/completions", json={"model": "m", "prompt": ["zebra " * LEAST_TOKENS] * 2, "n": 2})
    assert len(engine.seen) == 4
