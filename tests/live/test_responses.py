"""OpenAI's Responses API by the stock SDK, on real engines: state, hits, streams, tools, errors."""

from __future__ import annotations

from typing import Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.engine_adapter.llama_server.test_answer_reader import CALLING, TEMPLATE, USER
from tests.live.llama_world import MODEL, llama_world

pytestmark = pytest.mark.live

STORY = "The ship sailed on, past the isles of the north, and the crew sang. " * 12
LIMIT = {"max_output_tokens": 6, "temperature": 0}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather for a city: today's",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Kraków"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with llama_world(tmp_path_factory.mktemp("responses")) as world:
        yield world


@pytest.fixture(params=["embedded", "llama-server"])
def client(request):
    """The SDK, with a kvpin in front of an engine of that kind."""
    is_llama = request.param == "llama-server"
    served = request.getfixturevalue("world" if is_llama else "kvpin")
    with OpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client:
        client.model = client.models.list().data[0].id
        client.settle = served.until_idle if is_llama else lambda: None
        client.is_llama = is_llama
        yield client


def create(client, **fields):
    """A response, and its cached tokens, which kvpin predicted rightly."""
    raw = client.responses.with_raw_response.create(model=client.model, **{**LIMIT, **fields})
    response = raw.parse()
    cached = response.usage.input_tokens_details.cached_tokens
    assert int(raw.headers["x-kvpin-predicted-tokens"]) == cached
    client.settle()
    return response, cached


def test_second_turns_hit_by_name_and_by_items(client):
    first, _ = create(client, input=f"By name. {STORY}")
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert first.output_text
    named, cached = create(client, input="Go on!", previous_response_id=first.id)
    assert cached > first.usage.input_tokens - 40
    assert named.previous_response_id == first.id
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": f"By name. {STORY}"}]},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"role": "user", "content": "Go on!"},
    ]
    again, cached = create(client, input=items, store=False)
    assert again.usage.input_tokens == named.usage.input_tokens
    assert cached > named.usage.input_tokens - 20
    assert again.output_text == named.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(again.id)


def test_tokens_are_counted(client):
    asked = {"input": [{"role": "user", "content": "How long?"}], "instructions": "Count."}
    counted = client.responses.input_tokens.count(model=client.model, **asked)
    response, _ = create(client, **asked)
    assert counted.input_tokens == response.usage.input_tokens


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]


def test_tools_and_parsed_answers(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    asked = {"tools": [TOOL, {"type": "web_search"}], "tool_choice": "required", "max_output_tokens": 300}
    asked |= {"input": [*USER, CALLING], "extra_body": {"seed": 1}}
    with (
        llama_world(tmp_path, "--chat-template-file", str(template)) as world,
        OpenAI(base_url=world.base_url, api_key="unused", max_retries=0) as client,
    ):
        client.model, client.settle = MODEL, world.until_idle
        first, _ = create(client, **asked)
        calls = [item for item in first.output if item.type == "function_call"]
        assert calls
        assert {call.name for call in calls} == {"get_weather"}
        assert [tool.type for tool in first.tools] == ["function"]
        with client.responses.stream(model=MODEL, **{**LIMIT, **asked}) as stream:
            written: dict[int, str] = {}
            for event in stream:
                if event.type == "response.function_call_arguments.delta":
                    written[event.output_index] = written.get(event.output_index, "") + event.delta
            final = stream.get_final_response()
        world.until_idle()
        assert written == {
            at: item.arguments for at, item in enumerate(final.output) if item.type == "function_call"
        }
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "18 °C"} for call in calls
        ]
        _, cached = create(client, input=results, previous_response_id=first.id, tools=[TOOL])
        assert cached > first.usage.input_tokens - 40
        parsed = client.responses.parse(
            model=MODEL, input="Where?", text_format=Weather, temperature=0, max_output_tokens=300
        )
        assert isinstance(parsed.output_parsed, Weather)
