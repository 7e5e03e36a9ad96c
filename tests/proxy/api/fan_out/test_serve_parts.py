"""Requests for several, over real sockets and a scripted engine."""

import asyncio
import gc
import json
from importlib import import_module

import pytest

from engine_adapter import JsonBody
from tests.fakes import ASK, CHAT, DONE, connect_to, event, is_openai_error, post

COMPLETIONS = "/v1/completions"
AT_ONCE = 16
USAGE = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
HEAD = {"object": "text_completion", "created": 1, "model": "m"}


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    """Fewer connections than in earnest, which a busy machine opens in time."""
    monkeypatch.setattr(import_module("proxy.api.fan_out.serve_parts"), "AT_ONCE", AT_ONCE)


def events_of(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def asked(exchange):
    """What tells the parts of a request apart."""
    return exchange.json.get("prompt", exchange.json.get("seed"))


async def echo(exchange):
    """Answers with what was asked; a stream by pieces."""
    text, name = str(asked(exchange)), f"id-{asked(exchange)}"
    if not exchange.json.get("stream"):
        choices = [{"index": 0, "text": text, "finish_reason": "stop"}]
        await exchange.send({"id": name, **HEAD, "choices": choices, "usage": USAGE})
        return
    pieces = [event({"id": name, **HEAD, "choices": [{"index": 0, "text": letter}]}) for letter in text]
    if exchange.json.get("stream_options"):
        pieces.append(event({"id": name, **HEAD, "choices": [], "usage": USAGE}))
    await exchange.stream(*pieces, DONE)


class Counted:
    """Answers like `echo`, after a pause; counts how many requests it answers at once."""

    def __init__(self):
        self.now = self.most = 0

    async def __call__(self, exchange):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        await echo(exchange)


class TestWhole:
    @pytest.mark.parametrize("headers", [{}, {"x-request-id": "mine"}])
    async def test_each_part_has_a_record_with_the_number_after_its_id(self, engine, proxy, client, headers):
        engine.script = echo
        response = await client.post(CHAT, json={**ASK, "n": 3}, headers=headers)
        named = response.headers["x-request-id"]
        assert headers.get("x-request-id", named) == named
        assert response.headers["x-kvpin-engine"] == "a"
        ids = sorted(record.request_id for record in proxy.requests)
        assert ids == [f"{ids[0].removesuffix('-0')}-{at}" for at in range(3)]
        assert ids[0] == f"{named}-0" or headers
        assert proxy.requests.get(named).client_request_id == named
        assert all(record.output_tokens == 2 for record in proxy.requests)

    async def test_the_best_choices(self, engine, client):
        scores = iter([-3.0, -1.0, -2.0])

        async def script(exchange):
            assert exchange.json["logprobs"] == 1
            score = next(scores)
            logprobs = {"token_logprobs": [score]}
            await exchange.send({"choices": [{"index": 0, "text": str(score), "logprobs": logprobs}]})

        engine.script = script
        body = {"model": "m", "prompt": "one", "n": 2, "best_of": 3}
        made = (await client.post(COMPLETIONS, json=body)).json()
        assert made["choices"] == [
            {"index": 0, "text": "-1.0", "logprobs": None},
            {"index": 1, "text": "-2.0", "logprobs": None},
        ]

    async def test_many_prompts_are_served_some_at_a_time(self, engine, client):
        engine.script = counted = Counted()
        prompts = [f"p{number}" for number in range(300)]
        made = (await client.post(COMPLETIONS, json={"model": "m", "prompt": prompts})).json()
        assert [choice["text"] for choice in made["choices"]] == prompts
        assert made["usage"]["prompt_tokens"] == 10 * len(prompts)
        assert 1 < counted.most <= AT_ONCE

    async def test_long_bodies_wait_for_memory(self, engine, client, monkeypatch):
        monkeypatch.setattr(import_module("proxy.api.fan_out.serve_parts"), "BYTES_AT_ONCE", 5000)
        engine.script = counted = Counted()
        for size, number, most in ((2000, 7, 2), (9000, 2, 2)):
            body = {"model": "m", "prompt": ["a" * size] * number}
            assert len((await client.post(COMPLETIONS, json=body)).json()["choices"]) == number
            assert counted.most == most


class TestStream:
    async def test_events_are_merged(self, engine, client):
        engine.script = echo
        body = {"model": "m", "prompt": ["one", "three"], "stream": True}
        body["stream_options"] = {"include_usage": True}
        response = await client.post(COMPLETIONS, json=body)
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["x-kvpin-engine"] == "a"
        assert response.text.count("[DONE]") == 1
        assert response.text.endswith("data: [DONE]\n\n")
        *events, last = events_of(response.text)
        assert {sent["id"] for sent in events} == {last["id"]}
        texts = ["", ""]
        for sent in events:
            texts[sent["choices"][0]["index"]] += sent["choices"][0]["text"]
        assert texts == ["one", "three"]
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 20, "completion_tokens": 4, "total_tokens": 24}

    async def test_events_arrive_as_they_are_made(self, engine, client):
        go_on = asyncio.Event()

        async def script(exchange):
            await exchange.start()
            await exchange.chunk(event({"id": "x", "choices": [{"index": 0, "text": asked(exchange)}]}))
            await go_on.wait()
            await exchange.chunk(DONE)
            await exchange.end()

        engine.script = script
        body = {"model": "m", "prompt": ["one", "two"], "stream": True}
        async with client.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.aiter_lines()
            early = [await anext(lines) for _ in range(4)]
            assert {events_of(line)[0]["choices"][0]["index"] for line in early if line} == {0, 1}
            go_on.set()
            assert [line async for line in lines if line] == ["data: [DONE]"]

    async def test_a_slow_client_slows_all_parts_down(self, engine, proxy, client):
        sent = 0

        async def script(exchange):
            nonlocal sent
            await exchange.start()
            while not exchange.left.is_set() and sent < 1000:
                await exchange.chunk(event({"id": "x", "choices": [{"index": 0, "text": "x" * 65536}]}))
                sent += 1
            await exchange.chunk(DONE)
            await exchange.end()

        engine.script = script
        body = json.dumps({"model": "m", "prompt": ["one", "two"], "stream": True}).encode()
        reader, writer = await connect_to(proxy)
        writer.write(post(COMPLETIONS, body))
        seen = -1
        while sent != seen:  # until both parts are held up
            seen = sent
            await asyncio.sleep(0.1)
        assert sent < 900
        whole = await asyncio.wait_for(reader.read(-1), 60)
        writer.close()
        assert whole.count(b'"text":') == sent
        assert b"[DONE]" in whole


class TestFailures:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_error_before_anything_was_sent_is_the_answer(self, engine, proxy, client, stream):
        begun = asyncio.Event()

        async def script(exchange):
            if asked(exchange) == "bad":
                await begun.wait()
                await exchange.send({"error": {"message": "no such prompt", "param": "prompt"}}, status=400)
            else:
                begun.set()
                await exchange.left.wait()  # it is cancelled

        engine.script = script
        body = {"model": "m", "prompt": ["good", "bad"], "stream": stream}
        response = await client.post(COMPLETIONS, json=body)
        assert is_openai_error(response, 400, param="prompt")
        await asyncio.wait_for(engine.seen[0].left.wait(), 5)
        errors = {record.status: record.error for record in proxy.requests}
        assert errors == {400: "no such prompt", 499: "another part of the request failed"}

    async def test_what_failed_is_let_go_at_once(self, engine, proxy, client):
        def bodies():
            return sum(type(thing) is JsonBody and hasattr(thing, "raw") for thing in gc.get_objects())

        async def script(exchange):
            await exchange.send({"error": {"message": "full"}}, status=503)

        engine.script = script
        gc.collect()
        gc.disable()
        try:
            before = bodies()
            await client.post(COMPLETIONS, json={"model": "m", "prompt": ["one", "two"]})
            await proxy.settled()
            assert bodies() == before
        finally:
            gc.enable()

    @pytest.mark.parametrize("how", ["dies", "error event", "refused", "ends early", "no event", "no stream"])
    async def test_in_mid_stream_the_stream_breaks_off(self, engine, proxy, client, how):
        error, begun = {"error": {"message": "oh no"}}, asyncio.Event()

        async def fail(exchange):
            await begun.wait()
            if how in ("refused", "no stream"):
                told = error if how == "refused" else {"choices": [{"text": "b"}]}
                return await exchange.send(told, status=400 if how == "refused" else 200)
            await exchange.start()
            await exchange.chunk(event({"id": "b", "choices": [{"index": 0, "text": "b"}]}))
            if how == "dies":
                return exchange.die()
            if how != "ends early":
                await exchange.chunk(event(error) if how == "error event" else b"data: x\n\n")
                await exchange.chunk(event({"id": "b", "choices": [{"index": 0, "text": "c"}]}))
            return await exchange.end()

        async def go_on(exchange):
            await exchange.start()
            await exchange.chunk(event({"id": "a", "choices": [{"index": 0, "text": "a"}]}))
            begun.set()
            await exchange.left.wait()

        engine.script = lambda exchange: (fail if asked(exchange) == "bad" else go_on)(exchange)
        body = json.dumps({"model": "m", "prompt": ["good", "bad"], "stream": True}).encode()
        reader, writer = await connect_to(proxy)
        writer.write(post(COMPLETIONS, body))
        whole = await asyncio.wait_for(reader.read(-1), 10)
        writer.close()
        sent = events_of(whole.decode())
        assert sent[0]["choices"][0] == {"index": 0, "text": "a"}
        assert sent[-1]["error"]["message"]
        texts = {each["choices"][0]["text"] for each in sent[:-1]}
        assert texts <= ({"a"} if how in ("refused", "no stream") else {"a", "b"})
        assert b"[DONE]" not in whole
        assert not whole.endswith(b"0\r\n\r\n")
        await proxy.settled()

    @pytest.mark.parametrize(
        ("how", "stream", "status", "code"),
        [
            ("begins with an error", True, 500, "engine_rejected"),
            ("breaks off", False, 502, "engine_failed"),
            ("no choices", False, 502, "engine_failed"),
        ],
    )
    async def test_an_answer_that_is_none(self, engine, client, how, stream, status, code):
        async def script(exchange):
            if how == "begins with an error":
                await exchange.stream(event({"error": {"message": "oh no"}}))
            elif how == "breaks off":
                await exchange.start(200, [("content-type", "text/plain")])
                await exchange.chunk(b"{")
                exchange.die()
            else:
                await exchange.send({"object": "list"})

        engine.script = script
        answer = await client.post(CHAT, json={**ASK, "n": 2, "stream": stream})
        assert is_openai_error(answer, status, code)


@pytest.mark.parametrize("stream", [False, True])
async def test_when_the_client_leaves_all_parts_are_cancelled(engine, proxy, client, stream):
    engine.script = lambda exchange: exchange.left.wait()
    _, writer = await connect_to(proxy)
    prompts = [str(number) for number in range(AT_ONCE + 5)]
    writer.write(post(COMPLETIONS, json.dumps({"model": "m", "prompt": prompts, "stream": stream}).encode()))
    await engine.request(AT_ONCE - 1)
    writer.close()
    for exchange in engine.seen:
        await asyncio.wait_for(exchange.left.wait(), 5)
    await proxy.settled()
    assert len(engine.seen) == AT_ONCE
    assert {(record.status, record.error) for record in proxy.requests} == {(499, "the client left")}
