"""The relays of the benchmark of coding agents, before an engine that answers with one word."""

import json
from contextlib import ExitStack

import httpx
import pytest

from tests.clients.fake import running_fake

SHELL = {
    "name": "run",
    "parameters": {"properties": {"command": {"type": "string"}}, "required": ["command"]},
}
ASKED = {
    "model": "m",
    "messages": [{"role": "user", "content": "do: answer k"}],
    "tools": [{"type": "function", "function": SHELL}],
}


@pytest.fixture
def script():
    from coding_agents import Script, started

    with ExitStack() as stack:
        yield started(stack, Script(stack.enter_context(running_fake())))


def ask(relay, **fields):
    return httpx.post(f"{relay.url}/v1/chat/completions", json=ASKED | fields, trust_env=False)


def test_the_script_calls_the_shell_as_often_as_wanted_and_then_speaks(script):
    script.calls_left = 1
    called, said = (ask(script).json()["choices"][0] for _ in range(2))
    (call,) = called["message"]["tool_calls"]
    assert (called["finish_reason"], call["function"]["name"]) == ("tool_calls", "run")
    assert "cat tides.py" in json.loads(call["function"]["arguments"])["command"]
    assert (said["finish_reason"], "tool_calls" in said["message"]) == ("stop", False)
    assert [(turn.cached, turn.prompt) for turn in script.turns] == [(32, 40)] * 2


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_a_stream_has_the_call_and_usage_where_it_was_asked_for(script, options):
    script.calls_left = 1
    lines = ask(script, stream=True, **options).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[0]["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "run"
    assert [chunk.get("usage") is not None for chunk in chunks] == [False, False] + [True] * bool(options)
    assert script.turns[0].prompt == 40


def test_other_requests_are_passed_on(script):
    script.calls_left = 1
    assert ask(script, tools=None).json()["choices"][0]["message"]["content"] == "The tide is high."


def test_notes_have_status_headers_and_the_first_token(script):
    from coding_agents import Notes, started

    with ExitStack() as stack:
        notes = started(stack, Notes(script.url))
        ask(notes, stream=True)
        httpx.post(f"{notes.url}/v1/none", json={}, trust_env=False)
    first, second = notes.requests
    assert (first.path, first.status, first.first_s is not None) == ("/v1/chat/completions", 200, True)
    assert (second.path, second.status, second.first_s) == ("/v1/none", 404, None)


def test_a_text_that_no_prompt_holds_is_lost():
    from coding_agents import Request, Turn, _texts

    block = {"type": "tool_result", "content": [{"type": "text", "text": 'He said "high".'}]}
    asked = {
        "system": "Be brief.",
        "messages": [{"role": "user", "content": [block]}, {"content": " Go\non "}],
    }
    texts = [*_texts(asked)]
    assert texts == ["Be brief.", 'He said "high".', " Go\non "]
    request = Request("/v1/messages", 200, "", "", texts, begun=1.0, ended=3.0)
    whole = Turn(0, 9, is_agents=True, at=2.0, text='Be brief.\n"He said \\"high\\"." Go\non')
    assert request.lost([whole]) == []
    assert request.lost([Turn(0, 9, is_agents=True, at=2.0, text="Be brief. Go\non")]) == ['He said "high".']
    assert request.lost([Turn(0, 9, is_agents=True, at=4.0, text="another's")]) == []
