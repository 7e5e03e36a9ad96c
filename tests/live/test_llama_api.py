"""What clients see of llama-servers behind kvpin: their own answers, foreseen reuse, and nobody else's KV."""

from __future__ import annotations

import json

import httpx
import pytest
from openai import OpenAI

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
SCHEMA = {
    "type": "object",
    "properties": {"high": {"type": "boolean"}},
    "required": ["high"],
    "additionalProperties": False,
}
# What differs from one answer to the next of the same server.
VOLATILE = ("id", "created", "timings")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with llama_world(tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest.fixture(scope="module")
def client(world):
    with OpenAI(base_url=world.base_url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def user(text):
    return [{"role": "user", "content": text}]


def story(name, sentences=60):
    return f"{name} tells a story. " + " ".join(f"The ship came to harbour {n}." for n in range(sentences))


def cached(answer):
    """Prompt tokens that were reused, which kvpin must have foreseen."""
    reported = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert int(answer.headers["x-kvpin-predicted-tokens"]) == reported
    return reported


def prompt_tokens(answer):
    return answer.json()["usage"]["prompt_tokens"]


# --- the OpenAI SDK -----------------------------------------------------------------------------------


def test_a_chat_and_its_stream_say_the_same(client):
    asked = {"model": MODEL, "messages": user("Count the ships."), "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_usage_in_a_stream_only_when_asked(client):
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=user("Hi."), max_tokens=3, stream=True)
    )
    assert all(chunk.usage is None for chunk in chunks)


def test_completions_by_text_and_by_token_ids(client):
    by_text = client.completions.create(model=MODEL, prompt="The harbour is", max_tokens=6, temperature=0)
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=[300, 301, 302, 303], max_tokens=6, temperature=0
    )
    assert by_text.choices[0].finish_reason == "length"
    assert raw.parse().usage.prompt_tokens == 4
    assert raw.headers["x-kvpin-engine"] == "llama-0"


def test_tools_reach_the_template(client):
    asked = {"model": MODEL, "messages": user("How high is it?"), "max_tokens": 4, "temperature": 0}
    without = client.chat.completions.create(**asked)
    with_tools = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="auto")
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens + 20


def test_logprobs(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=user("Where?"), max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    assert all(len(token.top_logprobs) == 2 for token in tokens)


def test_a_schema_is_kept(client):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=user("Is the tide high?"),
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "tide", "schema": SCHEMA}},
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["high"], bool)


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


# --- KV -----------------------------------------------------------------------------------------------


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


def test_tenants_never_share_kv(tmp_path):
    keys = ("--api-key", "key-a", "--api-key", "key-b")
    with llama_world(tmp_path, slots=1, kvpin_flags=keys) as world:
        a, b = ({"authorization": f"Bearer key-{name}"} for name in "ab")
        body = {"messages": user(story("Ann")), "max_tokens": 4, "temperature": 0}

        def ask(headers):
            return world.post("chat/completions", body, headers=headers).raise_for_status()

        first = ask(a)
        assert cached(first) == 0
        assert cached(ask(a)) == prompt_tokens(first) - 1
        # The same prompt on the same slot, which holds it, and a file may hold it as well.
        assert cached(ask(b)) == 0
        assert cached(ask(b)) == prompt_tokens(first) - 1
        # Each has its own again.
        assert cached(ask(a)) in (0, prompt_tokens(first) - 1)
        texts = {text_of(ask(headers)) for headers in (a, b)}
        assert texts == {text_of(first)}
        assert world.post("chat/completions", body).status_code == 401


def text_of(answer):
    return answer.json()["choices"][0]["message"]["content"]


def test_what_one_server_saved_another_restores(tmp_path):
    with llama_world(tmp_path, servers=2) as world:
        text = story("Bea")
        first = world.chat(text)
        home = first.headers["x-kvpin-engine"]
        world.admin("offload", {"model": MODEL, "messages": user(text)})
        world.kvpin.admin("POST", f"engines/{home}/drain").raise_for_status()
        second = world.chat(text)
        assert second.headers["x-kvpin-engine"] != home
        assert cached(second) == prompt_tokens(first) - 1
        assert text_of(second) == text_of(first)


def test_a_prefix_outlives_kvpin_and_the_server(tmp_path):
    with llama_world(tmp_path) as world:
        text = story("Cid")
        first = world.chat(text)
        world.restart_kvpin()  # which saves what lies in slots
        world.until_ready()
        second = world.chat(text)
        assert cached(second) == prompt_tokens(first) - 1
        world.restart()
        world.until_known()
        third = world.chat(text)
        assert cached(third) == prompt_tokens(first) - 1
        assert text_of(first) == text_of(second) == text_of(third)
