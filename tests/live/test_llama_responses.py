"""The Responses API on real llama-servers behind a kvpin: its prompts are known, so that they are reused."""

from __future__ import annotations

import json

import pytest
from openai import OpenAI

from tests.engine_adapter.llama_server.response_requests import REFUSED, REQUESTS, TOOL, user
from tests.live.llama_world import MODEL, llama_world

pytestmark = pytest.mark.live

STORY = "The ship sailed on, past the isles of the north, and the crew sang. " * 12
LIMIT = {"max_output_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with llama_world(tmp_path_factory.mktemp("responses")) as world:
        yield world


@pytest.fixture(scope="module")
def client(world):
    with OpenAI(base_url=world.base_url, api_key="unused", max_retries=0) as client:
        yield client


def ask(world, fields, *, streamed):
    """Usage of a request that was answered, and what kvpin predicted of it."""
    answer = world.post("responses", {**fields, **LIMIT, "stream": streamed}).raise_for_status()
    predicted = int(answer.headers["x-kvpin-predicted-tokens"])
    world.until_idle()
    if not streamed:
        return answer.json()["usage"], predicted
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["type"] == "response.completed"
    return events[-1]["response"]["usage"], predicted


def cached(usage):
    return usage["input_tokens_details"]["cached_tokens"]


def n_tokens(world, fields):
    """Prompt tokens by kvpin's count, None for a prompt that it does not know."""
    asked = {"model": MODEL, "path": "/v1/responses", **fields}
    return world.kvpin.admin("POST", "route", json=asked).raise_for_status().json()["n_tokens"]


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("streamed", [False, True])
def test_prompts_are_counted_as_the_server_counts(world, name, streamed):
    fields = REQUESTS[name]
    first, predicted = ask(world, fields, streamed=streamed)
    assert n_tokens(world, fields) == first["input_tokens"]
    assert predicted == cached(first)
    again, predicted = ask(world, fields, streamed=streamed)
    assert predicted == cached(again) == first["input_tokens"] - 1 > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_what_prompts_share_is_reused(world, streamed):
    begun = {"instructions": f"{streamed} {STORY}"}
    alone, _ = ask(world, {**begun, "input": "Sing!"}, streamed=streamed)
    other, predicted = ask(world, {**begun, "input": "Row!"}, streamed=streamed)
    assert alone["input_tokens"] - 20 < predicted == cached(other) < other["input_tokens"]


def test_what_chats_left_is_reused_by_responses(world):
    text = f"Chats first. {STORY}"
    told = world.chat(text).json()["usage"]["prompt_tokens"]
    world.until_idle()
    usage, predicted = ask(world, {"input": text}, streamed=False)
    assert predicted == cached(usage) == told - 1 == usage["input_tokens"] - 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_followed_is_the_servers_to_refuse(world, name):
    fields, _ = REFUSED[name]
    assert n_tokens(world, fields) is None
    answer = world.post("responses", fields)
    assert answer.is_error
    assert answer.json()["error"]["message"]
    world.until_ready()


def test_a_prompt_beyond_the_context_is_refused(world):
    answer = world.post("responses", {"input": "ship " * 6000})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "input", "context_length_exceeded")


def test_a_conversation_by_the_sdk(world, client):
    asked = [{"role": "user", "content": f"By the SDK. {STORY}"}]
    tools = [{**TOOL, "strict": False}]
    first = client.responses.create(model=MODEL, input=asked, tools=tools, **LIMIT)
    assert first.status == "completed"
    assert first.output_text
    world.until_idle()
    asked += [item.model_dump(exclude_none=True) for item in first.output] + [user("Go on!")]
    events = list(client.responses.create(model=MODEL, input=asked, tools=tools, stream=True, **LIMIT))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    second = events[-1].response
    assert text == second.output_text
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - 10
    world.until_idle()
    whole = client.responses.create(model=MODEL, input=asked, tools=tools, **LIMIT)
    assert whole.output_text == text
    assert whole.usage.input_tokens_details.cached_tokens == second.usage.input_tokens - 1
    assert world.engine()["audit"]["exact"] == world.engine()["audit"]["checked"]
