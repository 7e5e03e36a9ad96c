"""Requests for responses as chats."""

import json
import time

import pytest

from engine_adapter import JsonBody
from proxy.errors import BadRequest
from proxy.request.translate import ResponseStore, ResponseTranslation, responses_request
from proxy.request.translate.responses_request import may_name_more
from tests.proxy.request.translate.response_world import FUNCTION, SPACE, TOOL, answered, chat_of, translation

SCHEMA = {"name": "x", "schema": {}, "strict": True}
TIDE = {"type": "function", "name": "tide"}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [TIDE]}


class TestRequests:
    def test_fields_that_are_an_engines_stay(self):
        kept = {"temperature": 0.5, "cache_salt": "s", "chat_template_kwargs": {"a": 1}, "user": "u"}
        kept |= {"prompt_cache_key": "k", "parallel_tool_calls": False}
        dropped = {"metadata": {"a": "b"}, "truncation": "auto", "n": 2, "client_metadata": {}}
        assert chat_of(**kept, **dropped) == {**chat_of(), **kept}

    @pytest.mark.parametrize(
        ("fields", "of_chat"),
        [
            ({"max_output_tokens": 7}, {"max_tokens": 7}),
            ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
            ({"reasoning": {"effort": None}}, {}),
            ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
            ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
            (
                {"text": {"format": {"type": "json_schema", **SCHEMA}}},
                {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            ),
            ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
            ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
            ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": 0}),
            ({"tools": [TOOL], "tool_choice": "auto"}, {"tools": [FUNCTION]}),
            ({"tools": [{"type": "web_search"}, TOOL, {"type": "mcp"}]}, {"tools": [FUNCTION]}),
            ({"tools": [{"type": "web_search"}]}, {}),
            ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, {}),
            ({"tools": [TOOL], "tool_choice": "required"}, {"tools": [FUNCTION], "tool_choice": "required"}),
            (
                {"tools": [TOOL], "tool_choice": TIDE},
                {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "tide"}}},
            ),
            (
                {"tools": [TOOL, TOOL | {"name": "other"}], "tool_choice": ALLOWED},
                {"tools": [FUNCTION], "tool_choice": "required"},
            ),
            (
                {"tools": [TOOL | {"strict": True}]},
                {"tools": [{**FUNCTION, "function": {**FUNCTION["function"], "strict": True}}]},
            ),
        ],
    )
    def test_each_field_has_its_place(self, fields, of_chat):
        assert chat_of(**fields) == {**chat_of(), **of_chat}

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"input": ...}, "input"),
            ({"input": 1}, "input"),
            ({"input": []}, "input"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_output_tokens": "9"}, "max_output_tokens"),
            ({"input": ["a"]}, "input[0]"),
            ({"instructions": 1}, "instructions"),
            ({"background": True}, "background"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"prompt": {"id": "p"}}, "prompt"),
            ({"moderation": {"model": "x"}}, "moderation"),
            ({"tools": {}}, "tools"),
            ({"tools": [{"type": "function"}]}, "tools[0]"),
            ({"tools": [1]}, "tools[0]"),
            ({"tools": [SPACE | {"tools": [7]}]}, "tools[0].tools[0]"),
            ({"tools": [SPACE | {"tools": [{"type": "function"}]}]}, "tools[0].tools[0]"),
            ({"tools": [TOOL, TOOL]}, "tools[1]"),
            ({"tools": [SPACE, TOOL | {"name": "sea__tide"}]}, "tools[1]"),
            ({"tools": [SPACE, SPACE | {"name": "sea__"}]}, "tools[1].tools[0]"),
            ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
            ({"tools": [SPACE], "tool_choice": {"type": "function", "name": "search"}}, "tool_choice"),
            ({"tools": [SPACE], "tool_choice": {"type": "function", "name": "log"}}, "tool_choice"),
            ({"text": "a"}, "text"),
            ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"metadata": []}, "metadata"),
            ({"include": "a"}, "include"),
            ({"prompt_cache_options": {"prewarm": "yes"}}, "prompt_cache_options.prewarm"),
        ],
    )
    def test_what_is_wrong_is_named(self, fields, param):
        with pytest.raises(BadRequest) as caught:
            translation(**fields)
        assert caught.value.param == param

    def test_a_text_is_no_answer_to_whether_a_response_is_stored(self):
        body = JsonBody(b'{"input": "hi", "store": "false"}')
        with pytest.raises(BadRequest, match=r"^store must be true or false$"):
            ResponseTranslation(body, None, store=ResponseStore())


def test_many_allowed_tools_take_no_quadratic_time():
    tools = [{"type": "function", "name": f"t{number}"} for number in range(10_000)]
    allowed = [{"type": "function", "name": f"x{number}"} for number in range(10_000)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [*allowed, *tools[:1], {"name": []}]}
    began = time.process_time()
    assert [each["function"]["name"] for each in chat_of(tools=tools, tool_choice=choice)["tools"]] == ["t0"]
    assert time.process_time() - began < 3


def test_a_type_that_is_no_text_is_no_fault():
    item = {"type": [], "role": "user", "content": "hi"}
    assert chat_of(input=[item])["messages"] == [{"role": "user", "content": "hi"}]


def test_what_is_named_many_times_has_a_limit(monkeypatch):
    monkeypatch.setattr(responses_request, "MAX_NAMED_BYTES", 10_000)
    store = ResponseStore()
    first = answered(translation(store=store, input="a" * 1000), content="x")
    item = store.of(None).get(first["id"]).turn.asked
    references = [{"type": "item_reference", "id": next(iter(item))}]
    translation(store=store, input=references * 5)
    with pytest.raises(BadRequest) as caught:
        translation(store=store, input=references * 10)
    assert caught.value.param == "input[8].id"
    name = first["id"]
    for _ in range(4):
        made = translation(store=store, input="a" * 1000, previous_response_id=name)
        name = answered(made, content="x")["id"]
    with pytest.raises(BadRequest) as caught:
        translation(store=store, previous_response_id=name)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "may"),
    [
        ({"input": "hi"}, False),
        ({"previous_response_id": None}, False),
        ({"previous_response_id": "r"}, True),
        ({"input": [{"id": "m"}]}, True),
        ({"input": "\u00e4"}, True),
    ],
)
def test_what_may_be_longer_than_its_body(fields, may):
    assert may_name_more(JsonBody(json.dumps(fields).encode())) is may
