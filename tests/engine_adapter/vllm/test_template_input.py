"""Chats as vLLM 0.32 gives them to templates, seen there; tests/vllm_live compares whole prompts."""

import pytest

from engine_adapter.prompt.forms import BILLING
from engine_adapter.prompt.template_input import ContentFormat
from engine_adapter.vllm.prompts import VLLM_INPUT

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
SAID = {"role": "assistant", "content": "hi"}


def part(text):
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("message", "given"),
    [
        (SAID | {"tool_calls": []}, SAID),
        (SAID | {"tool_calls": None, "refusal": None, "weight": 1, "tool_call_id": "c"}, SAID),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        (SAID | {"reasoning_content": "hm"}, SAID | {"reasoning": "hm", "reasoning_content": "hm"}),
        (
            SAID | {"reasoning_content": "hm", "reasoning": ""},
            SAID | {"reasoning": "", "reasoning_content": ""},
        ),
        (
            {"role": "user", "content": "hi", "reasoning": "hm", "name": "ada"},
            {"role": "user", "content": "hi", "name": "ada"},
        ),
        (
            {"content": "4", "role": "tool", "tool_call_id": "c", "tool_calls": []},
            {"role": "tool", "content": "4", "tool_call_id": "c"},
        ),
        (
            {"role": "system", "content": f"{BILLING}: 1\nBe brief."},
            {"role": "system", "content": "Be brief."},
        ),
        ({"role": "system", "content": f"{BILLING}: 1"}, {"role": "system", "content": ""}),
        ({"role": "user", "content": BILLING}, {"role": "user", "content": BILLING}),
    ],
)
def test_a_message_keeps_what_vllm_knows(message, given):
    assert list(VLLM_INPUT.message(message, ContentFormat.STRING).items()) == list(given.items())


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (SAID, [part("hi")]),
        ({"role": "assistant", "content": None}, []),
        ({"role": "user", "content": [part("a"), part("b")]}, [part("a"), part("b")]),
        ({"role": "system", "content": [part(BILLING), part("a")]}, [part("a")]),
        ({"role": "tool", "content": [part("a"), part("b")]}, "a\nb"),
    ],
)
def test_a_template_that_takes_parts_gets_parts(message, content):
    assert VLLM_INPUT.message(message, ContentFormat.PARTS)["content"] == content


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (CALL, {"id": "c", "function": {"arguments": {"a": 1}, "name": "f"}, "type": "function"}),
        ({"function": {"name": "f", "arguments": [1]}}, {"function": {"arguments": {}, "name": "f"}}),
        (
            {"index": 0, **CALL, "function": {"name": "f"}},
            {"id": "c", "function": {"arguments": {}, "name": "f"}, "index": 0, "type": "function"},
        ),
    ],
)
def test_a_call_has_vllms_order(call, given):
    (seen,) = VLLM_INPUT.message(SAID | {"tool_calls": [call]}, ContentFormat.STRING)["tool_calls"]
    assert str(seen) == str(given)
