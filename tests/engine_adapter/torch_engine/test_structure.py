"""The structure that a request asks for, and what is refused."""

from __future__ import annotations

import json

import pytest

from engine_adapter.torch_engine.grammar import MAX_BYTES, MAX_GRAMMAR_BYTES, structure_of, tool_use_of
from engine_adapter.torch_engine.protocol import ApiError, CompletionRequest
from engine_adapter.torch_engine.tool_calls import HERMES, MISTRAL, ListedCalls, MarkedCalls

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
DEFS = {"$defs": {"y": {"type": "string"}}, **SCHEMA}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": DEFS}},
    {"type": "function", "function": {"name": "g"}},
]
STRICT = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}, TOOLS[1]]
NAMED = {"type": "function", "function": {"name": "f"}}


def use(tools=TOOLS, choice=None, parallel=None, format_=HERMES):
    return tool_use_of(tools, choice, parallel=parallel, format_=format_)


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            "json",
            SCHEMA,
            "response_format",
        ),
        ({"guided_json": SCHEMA}, "json", SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json", SCHEMA, "guided_json"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"], "guided_choice"),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA, "structured_outputs.json"),
        (
            {"structured_outputs": {"json_object": True}},
            "json",
            {"type": "object"},
            "structured_outputs.json_object",
        ),
    ],
)
def test_structures_of_json(fields, kind, text, param):
    found = structure_of(CompletionRequest(**fields))
    assert (found.kind, json.loads(found.text), found.param) == (kind, text, param)


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_structures_of_text(kind):
    for fields in ({f"guided_{kind}": "a"}, {"structured_outputs": {kind: "a"}}):
        found = structure_of(CompletionRequest(**fields))
        assert (found.kind, found.text) == (kind, "a")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": ["a", 5]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        ({"guided_regex": "a" * (MAX_BYTES + 1)}, "guided_regex"),
        ({"guided_grammar": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_grammar"),
    ],
)
def test_what_cannot_be_asked_for_is_named(fields, param):
    with pytest.raises(ApiError) as caught:
        structure_of(CompletionRequest(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize("choice", [None, "auto"])
def test_the_model_decides(choice):
    found = use(choice=choice)
    assert found.structure is None
    assert isinstance(found.reader(), MarkedCalls)
    assert use(choice=choice, format_=None).reader is None


def test_strict_tools_are_kept_to_their_parameters_where_calls_have_both_marks():
    tags = json.loads(use(STRICT).structure.text)
    definitions = tags["schema"]["$defs"]
    of_f, of_g = tags["schema"]["anyOf"]
    assert (tags["begin"], tags["end"]) == ("<tool_call>", "</tool_call>")
    assert of_f["properties"] == {"name": {"const": "f"}, "arguments": {"$ref": "#/$defs/0"}}
    assert of_g["properties"]["arguments"] == {"$ref": "#/$defs/1"}
    assert definitions == {"0": SCHEMA, "1": {"type": "object"}}
    assert use(STRICT, format_=MISTRAL).structure is None


def test_a_call_of_any_function_is_required():
    found = use(choice="required")
    schema = json.loads(found.structure.text)
    assert [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]] == ["f", "g"]
    assert schema["$defs"] == {"0": DEFS, "1": {"type": "object"}}
    assert "maxItems" not in schema
    assert isinstance(found.reader(), ListedCalls)
    assert json.loads(use(choice="required", parallel=False).structure.text)["maxItems"] == 1


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_tool_that_is_nested_too_deeply(choice):
    """The body can be read to 1,000 levels. Python's limit of calls is reached before."""
    deep: dict = {}
    for _ in range(5000):
        deep = {"properties": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    with pytest.raises(ApiError, match="tools is nested too deeply") as refused:
        tool_use_of(tools, choice, parallel=None, format_=None)
    assert (refused.value.status, refused.value.param) == (400, "tools")


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        (None, "required"),
        (None, NAMED),
        (TOOLS, {"type": "function", "function": {"name": "h"}}),
        (TOOLS, "sometimes"),
        (TOOLS, {"type": "allowed_tools"}),
    ],
)
def test_a_choice_that_cannot_be_kept(tools, choice):
    with pytest.raises(ApiError) as caught:
        use(tools, choice)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("tool", [{}, {"type": "function"}, {"function": {}}, {"function": {"name": 1}}])
def test_a_tool_without_a_named_function(tool):
    with pytest.raises(ApiError, match="must be an object with a name") as caught:
        use(tools=[*TOOLS, tool], choice="auto")
    assert caught.value.param == f"tools[{len(TOOLS)}].function"
