"""What clients see of llama-servers behind kvpin: their own answers, foreseen reuse, and nobody else's KV."""

from __future__ import annotations

import httpx
import pytest

from tests.live.answers import cached, user
from tests.live.llama_world import MODEL, llama_world

pytestmark = pytest.mark.live

TOOL = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "Height of the tide",
        "parameters": {"type": "object", "properties": {"port": {"type": "string"}}},
    },
}
# What differs from one answer to the next of the same server.
VOLATILE = ("id", "created", "timings")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with llama_world(tmp_path_factory.mktemp("world")) as world:
        yield world


def story(name, sentences=60):
    return f"{name} tells a story. " + " ".join(f"The ship came to harbour {n}." for n in range(sentences))


def prompt_tokens(answer):
    return answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"messages": user("How are you?")}),
        ("chat/completions", {"messages": user("And now?"), "logprobs": True, "top_logprobs": 2}),
        ("chat/completions", {"messages": user("How high?"), "tools": [TOOL]}),
        ("chat/completions", {"messages": user("High?"), "response_format": {"type": "json_object"}}),
        ("completions", {"prompt": "The sea is"}),
        ("completions", {"prompt": "The sky is", "logprobs": 2}),
    ],
)
def test_an_answer_is_as_the_server_itself_gives_it(world, llama, path, fields):
    body = {"model": MODEL, "max_tokens": 8, "temperature": 0, "cache_prompt": False, **fields}
    answer = world.post(path, body).raise_for_status()
    own = httpx.post(f"{llama.url}/v1/{path}", json=body, timeout=60, trust_env=False)
    assert answer.headers["content-type"].startswith("application/json")
    mine, its = answer.json(), own.json()
    assert mine.keys() == its.keys()
    assert mine.get("timings", {}).keys() == its.get("timings", {}).keys()
    assert without(VOLATILE, mine) == without(VOLATILE, its)


def without(names, answer):
    return {name: value for name, value in answer.items() if name not in names}


def test_more_conversations_than_slots_lose_nothing(tmp_path):
    with llama_world(tmp_path, slots=4) as world:
        chats = [user(story(f"Captain {name}")) for name in "ABCDEF"]
        held = [0] * len(chats)
        for turn in range(4):
            for number, messages in enumerate(chats):
                answer = world.chat(messages)
                # All but a few tokens that are computed in less time than it takes to save them.
                assert cached(answer) >= held[number] - 100
                held[number] = prompt_tokens(answer)
                said = answer.json()["choices"][0]["message"]
                messages += [said, *user(f"And then, after day {turn}?")]
        kv = world.kv()
        assert kv["counts"]["restores"] >= 6
        assert world.engine()["findings"] == []
        audit = world.engine()["audit"]
        assert audit["exact"] == audit["checked"] == 24
