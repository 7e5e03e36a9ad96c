"""OpenAI's Responses API by the stock SDK, on real engines: state, hits, streams, tools, errors."""

from __future__ import annotations

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

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


class Place(BaseModel):
    city: str


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    with llama_world(tmp_path_factory.mktemp("responses"), ctx=4096) as world:
        yield world


@pytest.fixture(params=["embedded", "llama-server"])
def kvpin(request):
    """A proxy, by the engine behind it."""
    if request.param == "embedded":
        return request.getfixturevalue("kvpin_of_two")
    return request.getfixturevalue("llama").kvpin


@pytest.fixture(scope="module")
def kvpin_of_two(request):
    return request.getfixturevalue("two_embedded")


@pytest.fixture(scope="module")
def two_embedded(tmp_path_factory):
    from tests.live.conftest import ENGINE, running_kvpin  # noqa: PLC0415

    with running_kvpin(tmp_path_factory.mktemp("embedded") / "log", "--managed", ENGINE) as proxy:
        yield proxy


@pytest.fixture
def client(kvpin):
    with OpenAI(base_url=kvpin.base_url, api_key="unused", max_retries=0) as client:
        client.model = client.models.list().data[0].id
        yield client


def told(raw):
    """Usage of a raw response; kvpin's prediction of the tokens that it reuses was right."""
    response = raw.parse()
    cached = response.usage.input_tokens_details.cached_tokens
    assert int(raw.headers["x-kvpin-predicted-tokens"]) == cached
    return response, cached


def test_second_turns_hit_by_name_and_by_items(client):
    create = client.responses.with_raw_response.create
    first, _ = told(create(model=client.model, input=f"By name. {STORY}", **LIMIT))
    assert first.status == "incomplete"
    assert first.incomplete_details.reason == "max_output_tokens"
    assert first.output_text
    named, cached = told(create(model=client.model, input="Go on!", previous_response_id=first.id, **LIMIT))
    assert cached > first.usage.input_tokens - 40
    assert named.previous_response_id == first.id
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": f"By name. {STORY}"}]},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"role": "user", "content": "Go on!"},
    ]
    again, cached = told(create(model=client.model, input=items, store=False, **LIMIT))
    assert again.usage.input_tokens == named.usage.input_tokens
    assert cached > named.usage.input_tokens - 20
    assert again.output_text == named.output_text
