"""Tools as a trtllm-serve writes them into its chat template."""

import pytest

from engine_adapter.tensorrt_llm.tools import FUNCTION, GivenTools

PARAMETERS = {"type": "object", "properties": {"b": {}, "a": {}}}


def described(*names):
    return {"components": {"schemas": {"FunctionDefinition": {"properties": {name: {} for name in names}}}}}


def test_all_fields_of_its_models_are_written_in_their_order():
    function = {"parameters": PARAMETERS, "name": "f"}
    (given,) = GivenTools()([{"function": function}])
    assert list(given) == ["type", "function"]
    assert list(given["function"].items()) == [
        ("name", "f"),
        ("description", None),
        ("parameters", PARAMETERS),
        ("strict", None),
    ]
    assert function == {"parameters": PARAMETERS, "name": "f"}  # the client's stay as they are


def test_what_the_client_gives_stays():
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {}, "strict": True},
    }
    assert GivenTools()([tool]) == [tool]


def test_the_server_says_which_fields_a_function_has():
    older = GivenTools(described("name", "description", "parameters"))
    (given,) = older([{"type": "function", "function": {"name": "f"}}])
    assert given["function"] == {"name": "f", "description": None, "parameters": None}


@pytest.mark.parametrize("openapi", [None, {}, described(), {"components": {"schemas": []}}])
def test_where_it_does_not_they_are_those_of_current_versions(openapi):
    assert GivenTools(openapi).fields == FUNCTION


@pytest.mark.parametrize("tool", [{}, {"type": "web_search"}, {"function": "f"}])
def test_a_tool_without_a_function_is_left_to_the_server(tool):
    assert GivenTools()([tool]) == [tool]
