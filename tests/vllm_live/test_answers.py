"""Reuse on a real vLLM: no answer changes, and a kvpin that joins late foresees it."""

from __future__ import annotations

import httpx
import pytest

from tests.live.server_world import MODEL, WAIT_S
from tests.vllm_live.vllm_world import BLOCK, vllm_world

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with vllm_world(tmp_path_factory.mktemp("vllm"), kvpin_flags=("--api-key=red",)) as world:
        yield world


def path_of(fields):
    return "completions" if "prompt" in fields else "chat/completions"


def ask(world, fields):
    """An answer's predicted tokens, reused tokens and text."""
    headers = {"authorization": "Bearer red"}
    answer = world.post(path_of(fields), {"max_tokens": 16, **fields}, headers=headers)
    content = answer.json()
    choice = content["choices"][0]
    text = choice["text"] if "prompt" in fields else choice["message"]["content"]
    cached = content["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(answer.headers["x-kvpin-predicted-tokens"]), cached, text


def direct(world, fields):
    body = {"model": MODEL, "temperature": 0, **fields}
    url = f"{world.servers[0].url}/v1/{path_of(fields)}"
    return httpx.post(url, json=body, timeout=WAIT_S, trust_env=False).raise_for_status().json()


def long_chat(subject):
    return {"messages": [{"role": "user", "content": f"Tell me about {subject}. " * 40}]}


def test_reuse_changes_no_answer(world):
    """Answers through kvpin, cold and cached, and from the engine itself without a salt."""
    for fields in (long_chat("tides"), {"prompt": "The log of a lighthouse: " * 40}):
        cold, cached = ask(world, fields), ask(world, fields)
        assert cached[1] > cold[1] == 0
        choice = direct(world, {"max_tokens": 16, **fields})["choices"][0]
        theirs = choice["text"] if "prompt" in fields else choice["message"]["content"]
        assert cold[2] == cached[2] == theirs


def test_a_proxy_that_joins_late_knows_what_the_engine_holds(world, tell):
    chats = [long_chat(subject) for subject in ("anchors", "ropes", "bells")]
    for chat in chats:
        ask(world, chat)
    world.restart_kvpin()
    seen = [ask(world, chat)[:2] for chat in chats]
    tell(f"after its restart, [predicted, reported]: {seen}")
    assert all(predicted == reported > 4 * BLOCK for predicted, reported in seen)
