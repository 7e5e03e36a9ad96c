import msgspec
import pytest

from engine_adapter import JsonBody
from engine_adapter.prompt.forms import BILLING, Form, forms_of

HELLO = {"role": "user", "content": "hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"name": "f", "description": "d", "parameters": {}}


def called(arguments):
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tool(**parameters):
    return {"type": "function", "function": FUNCTION | {"parameters": parameters}}


def forms(*messages, **fields):
    body = JsonBody(msgspec.json.encode({"messages": list(messages), **fields}))
    found = forms_of(body)
    assert Form.PLAIN in found
    return found - {Form.PLAIN}


def test_forms():
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []}
    answer = {"role": "tool", "tool_call_id": "c", "content": "18"}
    said = {"role": "assistant", "content": "hi"}
    thought = said | {"reasoning_content": "hm"}
    assert forms(HELLO) == forms(HELLO, said, HELLO) == set()
    assert forms({"role": "user", "content": [{"type": "text", "text": "hello"}]}) == {Form.TEXT_PARTS}
    assert forms(HELLO, called('{"a": [1, null, true, {"b": "1.5"}]}'), answer) == {Form.TOOL_CALLS}
    assert forms(HELLO, chat_template_kwargs={}) == set()
    assert forms(HELLO, chat_template_kwargs={"enable_thinking": False, "n": -5}) == {Form.TEMPLATE_KWARGS}
    tools = [{"type": "function", "function": FUNCTION}]
    assert forms(HELLO, tools=tools) == {Form.TOOLS}
    assert forms(HELLO, calls, answer, tools=tools) == {Form.TOOLS, Form.TOOL_CALLS, Form.LEFT_OUT}
    assert forms(HELLO, said | {"tool_calls": []}, HELLO) == {Form.LEFT_OUT}
    assert forms(HELLO, said | {"refusal": None, "annotations": []}, HELLO) == {Form.LEFT_OUT}
    assert forms({"role": "system", "content": f"{BILLING}: 1\nBe brief."}, HELLO) == {Form.LEFT_OUT}
    assert forms(HELLO | {"content": BILLING}) == forms({"role": "system", "content": f" {BILLING}"}) == set()
    assert forms(HELLO, thought, HELLO) == {Form.REASONING}
    assert forms(HELLO, thought | {"tool_calls": [CALL]}, answer) == {Form.REASONING, Form.TOOL_CALLS}
    assert forms(HELLO, said) == {Form.CONTINUED}
    assert forms(HELLO, add_generation_prompt=False) == {Form.CONTINUED}
    assert forms(HELLO, continue_final_message=True) == {Form.CONTINUED}
    assert forms(HELLO, documents=[{"text": "a"}]) == {Form.DOCUMENTS}


@pytest.mark.parametrize(
    "message",
    [
        HELLO | {"name": "ada"},
        HELLO | {"role": "developer"},
        HELLO | {"role": ["user"]},
        HELLO | {"content": None},
        HELLO | {"role": "assistant", "reasoning": "hm"},
        HELLO | {"reasoning_content": "hm"},
        HELLO | {"role": "assistant", "reasoning_content": ["hm"]},
        HELLO | {"role": "tool", "content": [{"type": "text", "text": "a"}]},
        HELLO | {"content": []},
        HELLO | {"content": [{"type": "text", "text": ""}, {"type": "text", "text": "a"}]},
        called('{"a": 1.0}'),
        called('{"a": [1e-7]}'),
        called('{"a": 9223372036854775808}'),
        called('{"a": '),
        called("[1]"),
        called(""),
        called('{"a": [' + "[]," * 140_000 + "[]]}"),
        called({"a": 1}),
        HELLO | {"role": "assistant", "tool_calls": [CALL | {"index": 0}]},
        HELLO | {"tool_calls": [CALL]},
        HELLO | {"role": "tool", "tool_calls": [CALL]},
        HELLO | {"role": "tool", "tool_call_id": None},
        HELLO | {"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        "hello",
    ],
)
def test_messages_that_engines_read_in_their_own_ways(message):
    assert Form.OTHER in forms(message, HELLO)


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
        {"chat_template_kwargs": {"enable_thinking": None}},
        {"chat_template_kwargs": {"reasoning_effort": "auto"}},
        {"reasoning": {"effort": "low"}},
    ],
)
def test_fields_that_engines_read_in_their_own_ways(fields):
    assert Form.OTHER in forms(HELLO, **fields)
