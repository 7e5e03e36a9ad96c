"""Anthropic's Messages API on a real vLLM, which serves it as chats."""

from __future__ import annotations

import json

import pytest

from tests.vllm_live.vllm_world import BLOCK, vllm_world

pytestmark = pytest.mark.live

STORY = "The ship sailed on, past the isles of the north, and the crew sang. " * 20
TOOL = {"name": "tide", "input_schema": {"type": "object", "properties": {"port": {"type": "string"}}}}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with vllm_world(tmp_path_factory.mktemp("vllm")) as world:
        world.until_exact()
        yield world


def ask(world, messages, **fields):
    """Content and prompt tokens of an answer, and those it reused, as was predicted."""
    answer = world.post("messages", {"messages": messages, **fields})
    if fields.get("stream"):
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == {"type": "message_stop"}
        usage, content = events[-2]["usage"], events
        begun = events[0]["message"]["usage"]
        assert {**begun, "output_tokens": 0} == {**usage, "output_tokens": 0}
    else:
        usage, content = answer.json()["usage"], answer.json()["content"]
    cached = usage["cache_read_input_tokens"]
    assert int(answer.headers["x-kvpin-predicted-tokens"]) == cached
    tokens = sum(usage[name] for name in usage if name != "output_tokens")
    return content, tokens, cached


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation(world, stream, tell):
    system = [{"type": "text", "text": f"{stream} {STORY}", "cache_control": {"type": "ephemeral"}}]
    asked = {"system": system, "tools": [TOOL], "tool_choice": {"type": "none"}, "stream": stream}
    turns = [user("Where does it sail?")]
    _, first, _ = ask(world, turns, **asked)
    call = {"type": "tool_use", "id": "t1", "name": "tide", "input": {"port": "Brest"}}
    turns += [
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        user([{"type": "tool_result", "tool_use_id": "t1", "content": "4 m"}]),
    ]
    _, second, cached = ask(world, turns, **asked)
    assert first - first % BLOCK - BLOCK <= cached < second
    counted = world.post("messages/count_tokens", {"messages": turns, **asked, "stream": False})
    assert counted.json() == {"input_tokens": second}
    tell(f"stream {stream}: {first} tokens, then {second} of which {cached} were reused, as predicted")


def test_a_stop_sequence_is_named(world):
    content, _, _ = ask(world, [user(f"Stop. {STORY}")], max_tokens=16)
    word = content[0]["text"][4:7]
    answer = world.post(
        "messages", {"messages": [user(f"Stop. {STORY}")], "max_tokens": 16, "stop_sequences": [word]}
    ).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", word)
