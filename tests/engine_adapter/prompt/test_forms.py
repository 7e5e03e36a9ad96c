import msgspec
import pytest

from engine_adapter import JsonBody
from engine_adapter.prompt.forms import is_common_form
from proxy.prompt.media import not_plain

HELLO = {"role": "user", "content": "hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"name": "f", "description": "d", "parameters": {}}


def called(arguments):
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tool(**parameters):
    return {"type": "function", "function": FUNCTION | {"parameters": parameters}}


def special(*messages, **fields):
    body = JsonBody(msgspec.json.encode({"messages": list(messages), **fields}))
    return not is_common_form(body, not_plain(body.view("messages")))


def test_what_engines_agree_on():
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []}
    answer = {"role": "tool", "tool_call_id": "c", "content": "18"}
    assert not special(HELLO)
    assert not special({"role": "user", "content": [{"type": "text", "text": "hello"}]})
    assert not special(HELLO, called('{"a": [1, null, true, {"b": "1.5"}]}'), answer)
    assert not special(HELLO, chat_template_kwargs={"enable_thinking": False, "n": -5})
    assert not special(HELLO, calls, answer, tools=[{"type": "function", "function": FUNCTION}])


@pytest.mark.parametrize(
    "message",
    [
        HELLO | {"name": "ada"},
        HELLO | {"role": "developer"},
        HELLO | {"role": ["user"]},
        HELLO | {"content": None},
        HELLO | {"role": "assistant", "reasoning_content": "hm"},
        HELLO | {"role": "tool", "content": [{"type": "text", "text": "a"}]},
        HELLO | {"content": []},
        HELLO | {"content": [{"type": "text", "text": ""}, {"type": "text", "text": "a"}]},
        called('{"a": 1.0}'),
        called('{"a": [1e-7]}'),
        called('{"a": 9223372036854775808}'),
        called('{"a": '),
        called("[1]"),
        called(""),
        called({"a": 1}),
        HELLO | {"role": "assistant", "tool_calls": [CALL | {"index": 0}]},
        "hello",
    ],
)
def test_messages_that_engines_read_in_their_own_ways(message):
    assert special(message, HELLO)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": FUNCTION | {"strict": True}}]},
        {"tools": [{"type": "function", "function": dict(reversed(FUNCTION.items()))}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [{"function": "f", "type": "function"}]},
        {"tools": {"a": 1}},
        {"tools": [tool(minimum=0.5)]},
        {"tools": [tool(maximum=2**63)]},
        {"chat_template_kwargs": {"temperature": 1.0}},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"reasoning": {"effort": "low"}},
    ],
)
def test_fields_that_engines_read_in_their_own_ways(fields):
    assert special(HELLO, **fields)
