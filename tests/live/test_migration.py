"""Engines killed in the middle of answers: the streams go on on another engine, token for token."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from tests.live.answers import until
from tests.live.conftest import running_kvpin

pytestmark = pytest.mark.live

N_STREAMS = 6
STORY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "stream_options": {"include_usage": True}}


def requests():
    """Chats and completions, sampled greedily, some with fields that span the seam."""
    more = [{}, {"logprobs": True}, {"frequency_penalty": 0.5}, {}, {"logprobs": 1}, {"min_tokens": 50}]
    for number in range(N_STREAMS):
        body = {"model": "kvpin-tiny", **STORY, **more[number]}
        if number < N_STREAMS / 2:
            yield "/chat/completions", body | {"messages": [{"role": "user", "content": f"Story {number}."}]}
        else:
            yield "/completions", body | {"prompt": f"Story {number}. Once upon a time"}


async def stream(client, path, body, begun=None):
    """The chunks of an answer; `begun` is set once some have arrived from engine one."""
    chunks = []
    async with client.stream("POST", path, json=body | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line[6:]))
            assert not line.startswith(":")
            if begun is not None and len(chunks) > 3 and answer.headers["x-kvpin-engine"] == "one":
                begun.set()
    assert line in {"", "data: [DONE]"}
    return chunks


def told(chunks):
    """What a client reads: text, log probabilities, end and usage; ids and cached tokens aside."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    chat = [entry["token"] for each in logprobs for entry in each.get("content", ())]
    completion = [
        pair
        for each in logprobs
        for pair in zip(each.get("tokens", ()), each.get("text_offset", ()), strict=True)
    ]
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    roles = sum("role" in choice.get("delta", {}) for choice in choices)
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    ids = len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks})
    counts = usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
    return text, chat, completion, counts, roles, ends, ids


async def test_streams_of_a_killed_engine_go_on(tmp_path, start_engine):
    engines = {name: start_engine("--kv-blocks", "256") for name in ("one", "two")}
    flags = [word for name in engines for word in ("--engine", f"embedded={engines[name].url},id={name}")]
    with running_kvpin(tmp_path / "log", *flags) as kvpin:
        async with httpx.AsyncClient(base_url=kvpin.base_url, timeout=120) as client:
            undisturbed = [told(await stream(client, *request)) for request in requests()]
            begun = asyncio.Event()
            running = [asyncio.create_task(stream(client, *request, begun)) for request in requests()]
            await begun.wait()
            await asyncio.to_thread(engines["one"].kill)
            assert [told(chunks) for chunks in await asyncio.gather(*running)] == undisturbed
        check_records(kvpin, await asyncio.to_thread(until, lambda: all_records(kvpin)))


async def test_a_stream_of_a_killed_llama_server_runs_again(tmp_path, start_llama):
    """One stream at a time: with others in the same step, a server may decide near ties otherwise."""
    servers = {name: start_llama(slots=1) for name in ("one", "two")}
    flags = [word for name in servers for word in ("--engine", f"llama_server={servers[name].url},id={name}")]
    body = {"messages": [{"role": "user", "content": "Story."}], "cache_prompt": False, "stream": True}
    body |= STORY | {"max_tokens": 1500}
    with running_kvpin(tmp_path / "log", *flags) as kvpin:
        async with httpx.AsyncClient(base_url=kvpin.base_url, timeout=120) as client:
            undisturbed = await stream(client, "/chat/completions", body)
            chunks = []
            async with client.stream("POST", "/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if not chunks:
                        servers[answer.headers["x-kvpin-engine"]].kill()
                    if line.startswith("data: {"):
                        chunks.append(json.loads(line[6:]))
        async with asyncio.timeout(30):  # a record comes after the last piece
            while len(records := kvpin.admin("GET", "requests").json()["requests"]) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        record = records[0]
        assert (record["interrupted"], record["error"], len(record["attempts"])) == (1, None, 2)
        assert told(chunks)[:-1] == told(undisturbed)[:-1]
        assert len({chunk["id"] for chunk in chunks}) == 1


def all_records(kvpin):
    """The records of each request's two runs, once the last is there: it comes after the last piece."""
    records = kvpin.admin("GET", "requests?limit=100").json()["requests"]
    return records if len(records) == 2 * N_STREAMS else None


def check_records(kvpin, records):
    """Some streams went on, all of them from engine one to engine two."""
    migrated = [record for record in records if record["interrupted"]]
    assert {(*record["attempts"], record["error"]) for record in migrated} == {("one", "two", None)}
    line = f'kvpin_interrupted_streams_total{{model="kvpin-tiny",result="migrated"}} {len(migrated)}.0'
    assert line in httpx.get(f"{kvpin.url}/metrics", trust_env=False).text
