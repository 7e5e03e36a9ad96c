"""OpenAI's Responses API on a real vLLM, which serves it as chats."""

from __future__ import annotations

import pytest

from tests.vllm_live.vllm_world import BLOCK, vllm_world

pytestmark = pytest.mark.live

STORY = "The ship sailed on, past the isles of the north, and the crew sang. " * 20


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with vllm_world(tmp_path_factory.mktemp("vllm")) as world:
        yield world


def ask(world, **fields):
    """A response, and the tokens it reused, as was predicted."""
    answer = world.post("responses", {"max_tokens": None, "max_output_tokens": 8, **fields})
    response = answer.json()
    cached = response["usage"]["input_tokens_details"]["cached_tokens"]
    assert int(answer.headers["x-kvpin-predicted-tokens"]) == cached
    return response, cached


def test_a_conversation(world, tell):
    asked = {"role": "user", "content": STORY}
    first, _ = ask(world, input=[asked])
    told = first["usage"]["input_tokens"]
    more = {"role": "user", "content": "Go on!"}
    second, cached = ask(world, input=[asked, *first["output"], more])
    assert told - told % BLOCK - BLOCK <= cached < second["usage"]["input_tokens"]
    tell(f"{told} tokens, then {second['usage']['input_tokens']} of which {cached} were reused, as predicted")
    named, cached = ask(world, input=[more], previous_response_id=first["id"])
    assert named["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    assert cached >= told - told % BLOCK - BLOCK
