from array import array

import pytest

from engine_adapter.errors import EngineRejected
from engine_adapter.tensorrt_llm.requests import (
    CHAT,
    COMPLETIONS,
    FUNCTION,
    MESSAGES,
    RESPONSES,
    GivenTools,
    RequestFields,
    accepted_fields,
)
from engine_adapter.types import KvTarget
from tests.engine_adapter.builders import body

USUAL = RequestFields()
EXACT = KvTarget(array("i", [5, 6]), exact=True)


def openapi(path=CHAT, *, fields=("messages", "prompt_token_ids"), extra=False, reference=True):
    schema = {"properties": {name: {} for name in fields}, "additionalProperties": extra}
    used = {"$ref": "#/components/schemas/Request"} if reference else schema
    return {
        "paths": {path: {"post": {"requestBody": {"content": {"application/json": {"schema": used}}}}}},
        "components": {"schemas": {"Request": schema}},
    }


class TestAccepted:
    @pytest.mark.parametrize("reference", [True, False])
    def test_the_server_says_what_it_takes(self, reference):
        described = openapi(fields=("a", "b"), reference=reference)
        assert accepted_fields(described, CHAT) == {"a", "b"}
        assert accepted_fields(described, COMPLETIONS) is None

    @pytest.mark.parametrize(
        "described",
        [
            None,
            [],
            {},
            {"paths": {CHAT: {}}},
            openapi(extra=True),
            {"paths": openapi()["paths"]},
            {**openapi(), "components": {"schemas": {"Request": {"additionalProperties": False}}}},
        ],
    )
    def test_where_it_does_not_anything_may_be_taken(self, described):
        assert accepted_fields(described, CHAT) is None

    def test_what_it_says_counts_before_what_is_known(self):
        assert USUAL.accepts(CHAT, "cache_salt")
        older = RequestFields(openapi())
        assert not older.accepts(CHAT, "cache_salt")
        assert older.accepts(CHAT, "prompt_token_ids")
        assert older.droppable(CHAT, body(priority=1, user="u")) == ["priority", "user"]
        assert older.droppable(COMPLETIONS, body(priority=1, user="u")) == []


class TestDroppable:
    def test_hints_it_does_not_take(self):
        sent = body(
            model="m", session_id="s", prompt_cache_key="k", priority=0.5, user="u", temperature=0, seed=1
        )
        assert USUAL.droppable(CHAT, sent) == ["prompt_cache_key", "session_id"]
        assert USUAL.droppable(COMPLETIONS, sent) == ["prompt_cache_key", "session_id"]

    @pytest.mark.parametrize(
        "name", ["vllm_xargs", "extra_key", "input_ids", "extra_ids", "return_token_ids"]
    )
    def test_what_can_change_an_answer_stays_to_be_refused(self, name):
        assert USUAL.droppable(CHAT, body(**{name: 1})) == []

    @pytest.mark.parametrize("path", [RESPONSES, MESSAGES, "/v1/embeddings"])
    def test_nothing_of_routes_that_are_not_known(self, path):
        assert USUAL.droppable(path, body(prompt_cache_key="k", store=True)) == []

    def test_a_salt_that_salts_nothing(self):
        assert USUAL.droppable(COMPLETIONS, body(cache_salt=None)) == ["cache_salt"]
        assert USUAL.droppable("/v1/embeddings", body(cache_salt="s")) == ["cache_salt"]
        assert USUAL.droppable(CHAT, body(cache_salt="s")) == []


class TestSalt:
    def test_where_it_is_taken_or_stands_for_nothing(self):
        USUAL.check_salt(CHAT, body(cache_salt="s"))
        USUAL.check_salt(COMPLETIONS, body(cache_salt=None))
        USUAL.check_salt(COMPLETIONS, body())
        USUAL.check_salt("/v1/embeddings", body(cache_salt="s"))
        with pytest.raises(EngineRejected):
            RequestFields(openapi()).check_salt(CHAT, body(cache_salt="s"))


class TestTokenIds:
    def test_ids_that_are_the_servers_own_stand_for_the_text(self):
        assert USUAL.as_token_ids(CHAT, body(messages=[]), EXACT) == {"prompt_token_ids": [5, 6]}
        assert USUAL.as_token_ids(COMPLETIONS, body(prompt="hi"), EXACT) == {"prompt": [5, 6]}

    @pytest.mark.parametrize(
        "prompt",
        [
            None,
            KvTarget(array("i", [5, 6])),
            KvTarget(array("i"), exact=True),
            KvTarget(array("i", [5, 6]), array("Q", [0, 1]), exact=True),
        ],
    )
    def test_others_do_not(self, prompt):
        assert USUAL.as_token_ids(CHAT, body(messages=[]), prompt) == {}
        assert USUAL.as_token_ids(COMPLETIONS, body(prompt="hi"), prompt) == {}

    @pytest.mark.parametrize(
        ("path", "fields"),
        [
            (CHAT, {"prompt_token_ids": [1]}),
            (CHAT, {"truncate_prompt_tokens": 3}),
            (CHAT, {"documents": [{}]}),
            (COMPLETIONS, {"prompt": "hi", "echo": True}),
            (COMPLETIONS, {"prompt": [1, 2]}),
            (RESPONSES, {"input": "hi"}),
        ],
    )
    def test_nor_where_the_server_needs_more(self, path, fields):
        assert USUAL.as_token_ids(path, body(**fields), EXACT) == {}

    def test_nor_where_it_takes_none(self):
        assert RequestFields(openapi(fields=("messages",))).as_token_ids(CHAT, body(), EXACT) == {}


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
