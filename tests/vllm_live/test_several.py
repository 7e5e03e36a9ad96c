"""Several choices, and several prompts, in one request to a real vLLM: foreseen, and hits the second time.

Of several choices that are not a stream, vLLM reports the reuse of the one that ended last. It may have
reused what the first one had just computed.
"""

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
    """The indexes of an answer's choices, its usage, and the records of its prompts."""
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
    assert sum(r["n_tokens"] for r in records) == usage["prompt_tokens"]
    assert sum(r["reported_tokens"] for r in records) == usage["prompt_tokens_details"]["cached_tokens"]
    return sorted({choice["index"] for choice in choices}), usage, records


def assert_foreseen(world, records):
    """All that can be reused was, and was predicted."""
    for record in records:
        assert record["reported_tokens"] == (record["n_tokens"] - 1) // BLOCK * BLOCK > 0
        assert record["predicted_tokens"] == record["reported_tokens"]
    assert world.engine()["trust"] == "precise"


@pytest.mark.parametrize("stream", [False, True])
def test_choices(world, stream, tell):
    fields = {"messages": [{"role": "user", "content": f"{stream}. {STORY}"}], "n": 3, "stream": stream}
    indexes, first, [cold] = ask(world, "chat/completions", **fields)
    assert (indexes, first["completion_tokens"], cold["predicted_tokens"]) == ([0, 1, 2], 24, 0)
    assert cold["reported_tokens"] == 0 or not stream
    _, _, again = ask(world, "chat/completions", **fields)
    assert_foreseen(world, again)
    tell(f"stream {stream}: {again[0]['reported_tokens']} of {again[0]['n_tokens']} reused, as predicted")


@pytest.mark.parametrize("stream", [False, True])
def test_prompts(world, stream, tell):
    fields = {"prompt": [f"{stream} {name}. {STORY}" for name in ("One", "Two", "Three")], "stream": stream}
    indexes, first, cold = ask(world, "completions", **fields)
    assert (indexes, first["completion_tokens"]) == ([0, 1, 2], 24)
    assert [(r["predicted_tokens"], r["reported_tokens"]) for r in cold] == [(0, 0)] * 3
    _, _, again = ask(world, "completions", **fields)
    assert_foreseen(world, again)
    indexes, of_two, again = ask(world, "completions", **fields, n=2)
    assert (indexes, of_two["completion_tokens"]) == ([*range(6)], 48)
    assert_foreseen(world, again)
    tell(f"stream {stream}: {[r['reported_tokens'] for r in again]} reused, as predicted")
