"""Requests as coding agents send them in the field, on a real llama-server with a strict chat template: none
of them fails, and nothing that they say is lost."""

import gzip
import json

import httpx
import pytest
import zstandard

from tests.live.llama_world import MODEL, WAIT_S, llama_world
from tests.live.test_lost_messages import REFUSES
from tests.proxy.core.test_message_repair import called, result, said, text

pytestmark = pytest.mark.live

CHAT, MESSAGES, RESPONSES = "chat/completions", "messages", "responses"
USE = said("assistant", [{"type": "tool_use", "id": "1", "name": "f", "input": {}}])
SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "tides of Brest"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [text("high"), text("low")]}
HIDDEN = {"type": "redacted_thinking", "data": "eA=="}
FUNCTION = {"type": "function", "name": "log", "description": "d", "parameters": {"type": "object"}}
SERVICES = {"type": "web_search_20250305", "name": "web_search"}
NAMESPACE = {"type": "namespace", "name": "git", "description": "d", "tools": [FUNCTION]}
OBJECT = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}

CHATS = {
    "a late system message": [said("system"), said("user"), said("system", "late")],
    "two system messages": [said("system"), said("system", "late"), said("user")],
    "a developer's message": [said("system"), said("developer", "late"), said("user")],
    "the assistant first": [said("assistant", "late"), said("user")],
    "two turns of the user": [said("user"), said("user", "late")],
    "a result alone": [said("user"), result("9", "late"), said("user")],
    "null beside calls": [said("user"), called("1"), result("1", "late")],
    "arguments as an object": [said("user"), said("assistant", "", tool_calls=[OBJECT]), result("1", "late")],
    "half an emoji": [said("user", "late \ud83d")],
    "zstd": [said("user", "late")],
    "a byte order mark": [said("user", "late")],
}
TALKS = {
    "a history of a service": [said("user"), said("assistant", [SEARCH, text("late")]), said("user")],
    "hidden thoughts": [said("user"), said("assistant", [HIDDEN, text("late")]), said("user")],
    "a result of several texts": [said("user"), USE, said("user", [RESULT, text("late")])],
}
CASES = {
    **{name: (CHAT, {"messages": messages}) for name, messages in CHATS.items()},
    **{name: (MESSAGES, {"messages": messages}) for name, messages in TALKS.items()},
    "a service's tool": (MESSAGES, {"messages": [said("user", "late")], "tools": [SERVICES]}),
    "a service's tool of responses": (RESPONSES, {"input": "late", "tools": [{"type": "web_search"}]}),
    "tools in a namespace": (RESPONSES, {"input": "late", "tools": [NAMESPACE]}),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    path = tmp_path_factory.mktemp("odd")
    template = path / "template.jinja"
    template.write_text(REFUSES)
    with llama_world(path, "--chat-template-file", str(template)) as world:
        late = {"messages": CHATS["a late system message"]}
        world.until(lambda: "x-kvpin-normalised" in world.post(CHAT, late).headers, "a repair")
        yield world


@pytest.mark.parametrize("case", CASES)
def test_is_served_and_nothing_is_lost(world, case):
    route, fields = CASES[case]
    many = "The tide table of Brest counts, and nothing else. "
    counts = [ask(world, case, route, fields, word) for word in ("late", many)]
    # What stands at the marked place is in the prompt: with more of it, the prompt is longer.
    assert counts[1] > counts[0] + 5


def ask(world, case, route, fields, word):
    """The tokens of the prompt, with this text at the marked place."""
    body = (
        json.dumps({"model": MODEL, "max_tokens": 2, "temperature": 0, **fields})
        .replace("late", word)
        .encode()
    )
    if route == RESPONSES:
        body = body.replace(b'"max_tokens"', b'"max_output_tokens"')
    headers = {"content-type": "application/json"}
    if case == "zstd":
        body, headers["content-encoding"] = zstandard.compress(body), "zstd"
    elif case == "a byte order mark":
        body, headers["content-encoding"] = gzip.compress(b"\xef\xbb\xbf" + body), "gzip"
    url = f"{world.base_url}/{route}"
    answer = httpx.post(url, content=body, headers=headers, timeout=WAIT_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if route == CHAT:
        return usage["prompt_tokens"]
    return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
