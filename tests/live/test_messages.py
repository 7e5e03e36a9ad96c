"""Anthropic's Messages API on an embedded engine and a llama-server: prompts are known, pinned and reused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.live.answers import until
from tests.live.conftest import ENGINE, Kvpin, running_kvpin
from tests.live.llama_world import llama_world

pytestmark = pytest.mark.live

STORY = "The ship sailed on, past the isles of the north, and the crew sang. " * 12
SCHEMA = {"type": "object", "properties": {"port": {"type": "string"}}}
TOOL = {"name": "tide", "description": "Height of the tide", "input_schema": SCHEMA}


@dataclass
class World:
    """A kvpin, and what engine is behind it."""

    kind: str
    kvpin: Kvpin
    model: str

    @property
    def base_url(self) -> str:
        return self.kvpin.base_url

    def post(self, fields, path="messages", **headers) -> httpx.Response:
        body = {"model": self.model, "max_tokens": 6, "temperature": 0, **fields}
        answer = self.kvpin.post(path, body, headers=headers)
        self.settle()
        return answer

    def settle(self) -> None:
        """Waits until the embedded engine's events have told kvpin what it holds."""

        def is_told():
            (engine,) = self.kvpin.engines().values()
            return engine["blocks"]["gpu"] == engine["kv"]["gpu"]["cached"]

        if self.kind == "embedded":
            until(is_told)

    def ask(self, text, **fields) -> httpx.Response:
        messages = [user(text)] if isinstance(text, str) else text
        return self.post({"messages": messages, **fields}).raise_for_status()

    def counted(self, fields) -> int:
        """The tokens of a prompt, which no engine serves."""
        return self.post(fields, "messages/count_tokens").json()["input_tokens"]


@pytest.fixture(scope="module", params=["embedded", "llama_server"])
def world(request, tmp_path_factory) -> Iterator[World]:
    if request.param == "embedded":
        log = tmp_path_factory.mktemp("messages") / "log"
        with running_kvpin(log, "--managed", ENGINE) as kvpin:
            (model,) = httpx.get(f"{kvpin.base_url}/models", trust_env=False).json()["data"]
            yield World("embedded", kvpin, model["id"])
    else:
        with llama_world(tmp_path_factory.mktemp("messages")) as llama:
            yield World("llama_server", llama.kvpin, "tiny")


def user(text):
    return {"role": "user", "content": text}


def checked(answer) -> tuple[dict, int]:
    """Message and prompt tokens of an answer whose prediction came true."""
    message = answer.json()
    usage = message["usage"]
    assert int(answer.headers["x-kvpin-predicted-tokens"]) == usage["cache_read_input_tokens"]
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return message, sum(usage[name] for name in names)


def test_a_conversation(world):
    system = [{"type": "text", "text": STORY, "cache_control": {"type": "ephemeral"}}]
    first, tokens = checked(world.ask("Where does it sail?", system=system))
    assert first["stop_reason"] in {"end_turn", "max_tokens"}
    assert (first["type"], first["role"], first["model"]) == ("message", "assistant", world.model)
    assert first["id"].startswith("msg_")
    assert 0 < first["usage"]["output_tokens"] <= 6
    turns = [
        user("Where does it sail?"),
        {"role": "assistant", "content": first["content"] or "?"},
        user("And then?"),
    ]
    second, more = checked(world.ask(turns, system=system))
    assert tokens - 17 < second["usage"]["cache_read_input_tokens"] < more
    assert world.counted({"messages": turns, "system": system}) == more


def test_what_chats_left_is_reused(world):
    text = f"Chats first. {STORY}"
    body = {"model": world.model, "messages": [user(text)], "max_tokens": 4}
    told = world.kvpin.post("chat/completions", body).json()
    world.settle()
    message, tokens = checked(world.ask(text))
    assert tokens == told["usage"]["prompt_tokens"]
    assert tokens - 17 < message["usage"]["cache_read_input_tokens"]


def test_a_round_trip_of_a_tool(world):
    """The call is made up: no tiny model makes one."""
    turns = [user(f"How high is the water? {STORY}")]
    _, before = checked(world.ask(turns, tools=[TOOL]))
    call = {"type": "tool_use", "id": "toolu_1", "name": "tide", "input": {"port": "Brest"}}
    turns.append({"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]})
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "4 m"}]}
    turns.append(user([result, {"type": "text", "text": "Briefly!"}]))
    second, tokens = checked(world.ask(turns, tools=[TOOL]))
    assert before - 17 < second["usage"]["cache_read_input_tokens"] < tokens
    assert world.counted({"messages": turns, "tools": [TOOL]}) == tokens


def test_the_beginning_of_the_answer_is_continued(world):
    turns = [user(f"What is the sea? {STORY}"), {"role": "assistant", "content": "The sea is"}]
    _, tokens = checked(world.ask(turns))
    again, _ = checked(world.ask(turns))
    assert tokens - 17 < again["usage"]["cache_read_input_tokens"]
    assert world.counted({"messages": turns}) == tokens


def test_a_prompt_is_prewarmed(world):
    text = f"Prewarmed. {STORY}"
    message, tokens = checked(world.ask(text, max_tokens=0))
    assert (message["content"], message["usage"]["output_tokens"]) == ([], 0)
    again, _ = checked(world.ask(text))
    assert tokens - 17 < again["usage"]["cache_read_input_tokens"]
