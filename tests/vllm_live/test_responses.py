"""OpenAI's Responses API on a vLLM that serves it itself."""

from __future__ import annotations

import json

import pytest

from tests.vllm_live.vllm_world import BLOCK, VllmOptions, vllm_world

pytestmark = pytest.mark.live

STORY = "The ship sailed on, past the isles of the north, and the crew sang. " * 20
OPTIONS = VllmOptions(flags=("--enable-scale-out",), environment={"VLLM_ENABLE_RESPONSES_API_STORE": "1"})


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with vllm_world(tmp_path_factory.mktemp("vllm"), OPTIONS) as world:
        yield world


def ask(world, *, known=True, **fields):
    """A response, and the tokens it reused, as was predicted if its prompt is known."""
    answer = world.post("responses", {"max_tokens": None, "max_output_tokens": 8, **fields})
    if fields.get("stream"):
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        response = events[-1]["response"]
    else:
        response = answer.json()
    cached = response["usage"]["input_tokens_details"]["cached_tokens"]
    assert int(answer.headers["x-kvpin-predicted-tokens"]) == (cached if known else 0)
    return response, cached


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation(world, stream, tell):
    asked = {"role": "user", "content": f"{stream}. {STORY}"}
    first, _ = ask(world, input=[asked], stream=stream)
    told = first["usage"]["input_tokens"]
    more = {"role": "user", "content": "Go on!"}
    second, cached = ask(world, input=[asked, *first["output"], more], stream=stream)
    assert told - told % BLOCK - BLOCK <= cached < second["usage"]["input_tokens"]
    tell(f"{told} tokens, then {second['usage']['input_tokens']} of which {cached} were reused, as predicted")
    follows = {"input": [more], "previous_response_id": first["id"], "stream": stream}
    # A prompt that begins with a response which vLLM keeps is known to vLLM alone.
    named, cached = ask(world, known=False, **follows)
    assert named["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    assert cached >= told - told % BLOCK - BLOCK
