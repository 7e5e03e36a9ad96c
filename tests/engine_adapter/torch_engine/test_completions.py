"""Answers on a real socket: streams, headers, stops, usage, clients that leave or read slowly."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
from typing import ClassVar

import httpx
import pytest
import torch
from safetensors.torch import save

from engine_adapter.torch_engine.answers import Detokenizer
from engine_adapter.torch_engine.requests import GenerationRequest, RequestRefused, SamplingParams
from engine_adapter.torch_engine.service import Generation
from engine_adapter.types import token_array
from tests.engine_adapter.torch_engine.engine_world import until

PROMPT = list(range(10, 60))


def body(**fields):
    return {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields


async def complete(client, **fields):
    response = await client.post("/v1/completions", json=body(**fields))
    assert response.status_code == 200, response.text
    return response


async def stream(client, path="/v1/completions", **fields):
    """Chunks of a stream, and its response headers."""
    request = {"stream": True} | (body(**fields) if path == "/v1/completions" else fields)
    async with client.stream("POST", path, json=request) as response:
        assert response.status_code == 200
        chunks = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert chunks[-1] == "[DONE]"
    return [json.loads(chunk) for chunk in chunks[:-1]], response.headers


def cancelled(service) -> int:
    return service.engine.counters.finished.get("cancelled", 0)


async def one_more_cancelled(service, before: int) -> None:
    await until(lambda: cancelled(service) > before)


async def test_streamed_and_whole_answers_agree(client):
    whole = (await complete(client, return_token_ids=True)).json()
    chunks, _ = await stream(client, return_token_ids=True, stream_options={"include_usage": True})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] == PROMPT
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_cached_tokens_in_header_and_usage(client):
    salt = "cached-tokens"
    cold = await complete(client, cache_salt=salt)
    warm = await complete(client, cache_salt=salt)
    chunks, headers = await stream(client, cache_salt=salt, stream_options={"include_usage": True})
    assert cold.headers["x-kv-cached-tokens"] == "0"
    assert cold.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert warm.headers["x-kv-cached-tokens"] == headers["x-kv-cached-tokens"] == "48"
    assert warm.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
    assert warm.json()["choices"][0]["text"] == cold.json()["choices"][0]["text"]


async def test_stop_strings_end_the_text_before_them(client, served_engine):
    before = cancelled(served_engine.service)
    text = (await complete(client, max_tokens=40)).json()["choices"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    expected = text[: text.index(stop)]
    whole = (await complete(client, max_tokens=40, stop=stop)).json()
    assert whole["choices"][0]["text"] == expected
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] < 40
    chunks, _ = await stream(client, max_tokens=40, stop=["\x00never", stop])
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == expected
    assert choices[-1]["finish_reason"] == "stop"
    await one_more_cancelled(served_engine.service, before)


async def test_no_stop_string_ends_an_answer_before_min_tokens(client):
    text = (await complete(client, max_tokens=40)).json()["choices"][0]["text"]
    fields = {"max_tokens": 40, "stop": text[0], "min_tokens": 6, "return_token_ids": True}
    (choice,) = (await complete(client, **fields)).json()["choices"]
    assert (choice["text"], len(choice["token_ids"])) != ("", 1)
    assert text.startswith(choice["text"])
    assert len(choice["token_ids"]) > 6
    rest = (await complete(client, answer_token_ids=choice["token_ids"][:4], **fields)).json()["choices"][0]
    assert rest["token_ids"] == choice["token_ids"][4:]
    assert choice["text"].endswith(rest["text"])


async def test_a_long_answer_is_not_read_again_on_the_event_loop(client, monkeypatch):
    threads, push = set(), Detokenizer.push

    def noting(*given):
        threads.add(threading.current_thread().name.partition("_")[0])
        return push(*given)

    monkeypatch.setattr(Detokenizer, "push", noting)
    for size in (3, 200):
        threads.clear()
        answered = [10 + at % 50 for at in range(size)]
        made = (await complete(client, answer_token_ids=answered, max_tokens=size + 1)).json()
        assert made["usage"]["completion_tokens"] == size + 1
        assert ("off-loop" in threads) is (size == 200)


def sent(connection, served_engine, **fields):
    """Sends a request for many tokens."""
    content = json.dumps(body(max_tokens=3000, **fields)).encode()
    connection.connect((httpx.URL(served_engine.url).host, httpx.URL(served_engine.url).port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)


async def active(client):
    return (await client.get("/kv/stats")).json()["gpu"]["active"]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_frees_its_blocks(client, served_engine, streams):
    while await active(client):  # noqa: ASYNC110 - what the tests before have cancelled
        await asyncio.sleep(0.01)
    before = cancelled(served_engine.service)
    with socket.socket() as leaver:
        sent(leaver, served_engine, stream=streams)
        if streams:
            await asyncio.to_thread(leaver.recv, 1)
    await one_more_cancelled(served_engine.service, before)
    assert await active(client) == 0


async def test_a_client_that_does_not_read_stops_nobody(client, served_engine):
    before = cancelled(served_engine.service)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sent(slow, served_engine, stream=True, logprobs=20)
        answers = await asyncio.gather(*(complete(client) for _ in range(3)))
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    await one_more_cancelled(served_engine.service, before)


async def test_one_refused_choice_ends_all_of_them(served_engine):
    engine, before = served_engine.service.engine, cancelled(served_engine.service)
    endless = SamplingParams(max_tokens=3000, ignore_eos=True)
    fine = GenerationRequest("fine", token_array(PROMPT), endless)
    too_long = GenerationRequest("long", token_array([5] * (engine.max_model_len + 1)), endless)
    with pytest.raises(RequestRefused):
        async with Generation(engine, [fine, too_long]):
            pytest.fail("it was taken")
    await one_more_cancelled(served_engine.service, before)


class TestGoingOn:
    """An answer that another engine began, from the token ids that it told."""

    CHAT: ClassVar = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": True}
    FIELDS: ClassVar = [
        {"max_tokens": 24},
        {"max_tokens": 24, "frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"max_tokens": 24, "min_tokens": 20, "ignore_eos": False},
    ]

    async def told(self, client, path, **fields):
        """The events of a stream with the token ids told up to each: [(ids, event)]."""
        fields = {
            "stream": True,
            "stream_token_ids": True,
            "stream_options": {"include_usage": True},
        } | fields
        told, ids = [], []
        async with client.stream("POST", path, json=fields) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith(": "):
                    ids = ids + [int(token) for token in line[2:].split()]
                elif line.startswith("data: {"):
                    told.append((ids, json.loads(line[6:])))
        return told

    def text(self, events):
        choices = [event["choices"][0] for event in events if event["choices"]]
        return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)

    def offsets(self, events):
        """(token, text_offset) of all events: how many tokens are in one depends on timing."""
        logged = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
        return [pair for each in logged for pair in zip(each["tokens"], each["text_offset"], strict=True)]

    @pytest.mark.parametrize("fields", FIELDS, ids=["plain", "penalties", "min_tokens"])
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    async def test_from_any_event_it_is_the_same_answer(self, client, path, fields):
        asked = (body() if path == "/v1/completions" else self.CHAT) | fields
        whole = await self.told(client, path, **asked)
        for at in range(1, len(whole) - 2, 9):
            ids = whole[at - 1][0]
            if not ids:
                continue
            rest = [event for _, event in await self.told(client, path, **asked, answer_token_ids=ids)]
            assert self.text(rest) == self.text(event for _, event in whole[at:])
            assert rest[-1]["usage"]["total_tokens"] == whole[-1][1]["usage"]["total_tokens"]
            assert rest[-1]["usage"]["completion_tokens"] == whole[-1][1]["usage"]["completion_tokens"]
            assert not any("role" in c.get("delta", {}) for event in rest for c in event["choices"])

    async def test_characters_stop_strings_and_offsets_span_the_seam(self, client):
        path, asked = "/v1/completions", body(max_tokens=40)
        text = self.text(event for _, event in await self.told(client, path, **asked))
        stop = text[len(text) // 2 : len(text) // 2 + 6]
        asked = asked | {"stop": [stop], "logprobs": 0}
        whole = await self.told(client, path, **asked)
        for at in range(1, len(whole) - 1, 3):
            ids = whole[at - 1][0]
            rest = [event for _, event in await self.told(client, path, **asked, answer_token_ids=ids)]
            assert self.text(rest) == self.text(event for _, event in whole[at:])
            assert self.offsets(rest) == self.offsets(event for _, event in whole[at:])

    async def test_what_was_told_counts_towards_the_least_tokens(self, client):
        ids = (await complete(client, max_tokens=24, return_token_ids=True)).json()["choices"][0]["token_ids"]
        at = next(at for at in range(3, 24) if ids[at] not in ids[:at])
        fields = {"stop_token_ids": [ids[at]], "min_tokens": at, "answer_token_ids": ids[:at]}
        rest = (await complete(client, max_tokens=24, return_token_ids=True, **fields)).json()["choices"][0]
        assert (rest["token_ids"], rest["finish_reason"]) == ([ids[at]], "stop")
        assert rest["text"] == "", "the stop token is not shown"


class TestEmbeddings:
    """A prompt of embeddings alone."""

    IDS: ClassVar = [(7 * n) % 500 + 5 for n in range(40)]

    @pytest.fixture
    def rows(self, served_engine):
        """The model's own embeddings of `IDS`."""
        embed = served_engine.service.model.module.get_input_embeddings()
        return embed(torch.tensor(self.IDS))

    @staticmethod
    def encoded(rows):
        return base64.b64encode(save({"t": rows.contiguous()})).decode()

    async def ask(self, client, rows, **fields):
        return (await complete(client, prompt=None, prompt_embeds=self.encoded(rows), **fields)).json()

    async def test_the_answer_is_that_to_the_tokens(self, client, rows):
        of_ids = (await complete(client, prompt=self.IDS, return_token_ids=True)).json()
        made = await self.ask(client, rows, return_token_ids=True)
        assert made["choices"][0]["token_ids"] == of_ids["choices"][0]["token_ids"]
        assert made["usage"]["prompt_tokens"] == len(self.IDS)
        in_a_list = (await complete(client, prompt="", prompt_embeds=[self.encoded(rows)])).json()
        assert in_a_list["choices"][0]["text"] == made["choices"][0]["text"]

    async def test_only_the_same_tensor_under_the_same_salt_is_reused(self, client, rows):
        other = rows.clone()
        other[-1, -1] += 1
        asked = [
            (rows, "one", 0),
            (rows, "one", 32),
            (other, "one", 0),
            (rows.double(), "one", 0),
            (rows[:33], "one", 0),
            (rows, "two", 0),
            (rows, "one", 32),
        ]
        for given, salt, cached in asked:
            usage = (await self.ask(client, given, cache_salt=f"embeds-{salt}"))["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
