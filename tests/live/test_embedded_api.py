"""Choices, logprobs, structures and tools of the embedded engine through kvpin: right, and foreseen."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from openai import OpenAI

from tests.live.answers import becomes, user

pytestmark = pytest.mark.live

MODEL = "kvpin-tiny"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def client(kvpin):
    with OpenAI(base_url=kvpin.base_url, api_key="none", timeout=120, max_retries=0) as client:
        yield client


def messages(name):
    return user(f"{name}: " + " ".join(f"harbour {n}" for n in range(60)))


def check_foreseen(kvpin, answer):
    """The record of an answer: what kvpin predicted is what the engine reported."""
    found = kvpin.admin("GET", "requests", params={"limit": 100}).json()["requests"]
    (record,) = [each for each in found if each["request_id"] == answer.headers["x-request-id"]]
    assert record["predicted_tokens"] == record["reported_tokens"], record
    return record


def chat(client, **fields):
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, **{"max_completion_tokens": 400, "temperature": 0, **fields}
    )
    return answer, answer.parse()


def complete(client, **fields):
    answer = client.completions.with_raw_response.create(model=MODEL, **fields)
    return answer, answer.parse()


def test_an_answer_keeps_to_its_schema(client, kvpin):
    for round_ in range(2):
        answer, made = chat(client, messages=messages("schema"), response_format=FORMAT)
        assert set(json.loads(made.choices[0].message.content)) == {"city", "days"}
        record = check_foreseen(kvpin, answer)
        assert (record["reported_tokens"] > 100) is (round_ == 1)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools_are_called_and_the_next_turn_hits(client, kvpin, choice):
    asked = messages(f"tools {choice}")
    answer, made = chat(client, messages=asked, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    check_foreseen(kvpin, answer)
    (call,) = made.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city", "days"}
    turn = [
        *asked,
        made.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    answer, _ = chat(client, messages=turn, tools=TOOLS, max_completion_tokens=4)
    assert check_foreseen(kvpin, answer)["reported_tokens"] > 100


def test_a_call_that_the_model_makes_is_streamed_as_one(client):
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages("auto"),
        tools=TOOLS,
        stream=True,
        extra_body={"structured_outputs": {"choice": [text]}},
    )
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    (part,) = [part for choice in choices for part in choice.delta.tool_calls or ()]
    assert (part.function.name, part.function.arguments) == ("weather", '{"city": "Rome"}')
    assert choices[-1].finish_reason == "tool_calls"
    assert not any(choice.delta.content for choice in choices)


def test_an_echo_with_logprobs_reuses_nothing_and_is_foreseen(client, kvpin):
    prompt = messages("echo")[0]["content"]
    for _ in range(2):
        answer, made = complete(client, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
        logprobs = made.choices[0].logprobs
        assert "".join(logprobs.tokens) == made.choices[0].text == prompt
        assert check_foreseen(kvpin, answer)["reported_tokens"] == 0
    answer, _ = complete(client, prompt=prompt, max_tokens=1)
    assert check_foreseen(kvpin, answer)["reported_tokens"] > 100


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_blocks(kvpin, stream):
    body = {"model": MODEL, "messages": user("Tell me all."), "max_tokens": 4000, "ignore_eos": True}

    def active_blocks():
        return sum(engine["kv"]["gpu"]["active"] for engine in kvpin.engines().values())

    async with httpx.AsyncClient(base_url=kvpin.base_url, timeout=60) as client:
        request = asyncio.create_task(client.post("/chat/completions", json={**body, "stream": stream}))
        await becomes(lambda: active_blocks() > 0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    async with asyncio.timeout(10):  # generous: the figure is measured in benchmarks
        await becomes(lambda: active_blocks() == 0)
