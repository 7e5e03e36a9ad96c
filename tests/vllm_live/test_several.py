"""Several choices, and several prompts, in one request to a real vLLM: foreseen, and hits the second time."""

from __future__ import annotations

import json

import pytest

from tests.vllm_live.vllm_world import BLOCK, vllm_world

pytestmark = pytest.mark.live

STORY = "The ship sailed on, past the isles of the north, and the crew sang. " * 20


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with vllm_world(tmp_path_factory.mktemp("vllm")) as world:
        yield world


def ask(world, path, **fields):
    """The indexes of an answer's choices, and its usage. What each record predicted was reported."""
    if fields.get("stream"):
        fields["stream_options"] = {"include_usage": True}
    answer = world.post(path, {"temperature": 1, "seed": 7, "ignore_eos": True, **fields})  # greedy: n is 1
    if fields.get("stream"):
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        usage, choices = events[-1]["usage"], [choice for event in events for choice in event["choices"]]
    else:
        usage, choices = answer.json()["usage"], answer.json()["choices"]
    own = answer.headers["x-request-id"]
    asked = len(fields.get("prompt", [None]))
    names = [own] if asked == 1 else [f"{own}-{number}" for number in range(asked)]
    records = [world.record(name) for name in names]
    assert [r["predicted_tokens"] for r in records] == [r["reported_tokens"] for r in records]
    assert sum(r["n_tokens"] for r in records) == usage["prompt_tokens"]
    assert sum(r["reported_tokens"] for r in records) == usage["prompt_tokens_details"]["cached_tokens"]
    return sorted({choice["index"] for choice in choices}), usage, records


@pytest.mark.parametrize("stream", [False, True])
def test_choices(world, stream, tell):
    fields = {"messages": [{"role": "user", "content": f"{stream}. {STORY}"}], "n": 3, "stream": stream}
    indexes, first, _ = ask(world, "chat/completions", **fields)
    assert (indexes, first["completion_tokens"]) == ([0, 1, 2], 24)
    _, again, [record] = ask(world, "chat/completions", **fields)
    assert record["reported_tokens"] == (again["prompt_tokens"] - 1) // BLOCK * BLOCK > 0
    tell(f"stream {stream}: {record['reported_tokens']} of {record['n_tokens']} tokens reused, as predicted")


@pytest.mark.parametrize("stream", [False, True])
def test_prompts(world, stream, tell):
    prompts = [f"{stream} {name}. {STORY}" for name in ("One", "Two", "Three")]
    fields = {"prompt": prompts, "n": 2, "stream": stream}
    indexes, first, _ = ask(world, "completions", **fields)
    assert (indexes, first["completion_tokens"]) == ([*range(6)], 48)
    _, _, records = ask(world, "completions", **fields)
    for record in records:
        assert record["reported_tokens"] == (record["n_tokens"] - 1) // BLOCK * BLOCK > 0
    reused = [record["reported_tokens"] for record in records]
    tell(f"stream {stream}: {reused} of {[r['n_tokens'] for r in records]} tokens reused, as predicted")
