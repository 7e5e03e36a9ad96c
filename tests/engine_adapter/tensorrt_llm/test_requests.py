import json
from array import array

import pytest

from engine_adapter import EngineGarbled, JsonBody, Role, make_adapter
from engine_adapter.errors import EngineRejected
from engine_adapter.tensorrt_llm.adapter import NO_NUMBERS
from engine_adapter.tensorrt_llm.requests import (
    CHAT,
    COMPLETIONS,
    FUNCTION,
    MESSAGES,
    RESPONSES,
    ContextPhase,
    GivenTools,
    RequestFields,
    accepted_fields,
)
from engine_adapter.types import KvTarget
from tests.engine_adapter.builders import body
from tests.engines import engine_spec
from tests.fake_engines.tensorrt_llm import running_trtllm

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


HINTS = {"session_id": "s", "prompt_cache_key": "k"}


@pytest.mark.parametrize(
    ("path", "fields", "dropped"),
    [
        (CHAT, {"priority": 0.5, "user": "u", "temperature": 0} | HINTS, ["prompt_cache_key", "session_id"]),
        (COMPLETIONS, {"priority": 0.5, "seed": 1} | HINTS, ["prompt_cache_key", "session_id"]),
        # What can change an answer stays, to be refused; and all of routes that are not known.
        (CHAT, {"vllm_xargs": 1, "extra_key": 1, "input_ids": 1, "return_token_ids": 1}, []),
        *((path, {"prompt_cache_key": "k", "store": True}, []) for path in (RESPONSES, MESSAGES)),
        # A salt that salts nothing.
        (COMPLETIONS, {"cache_salt": None}, ["cache_salt"]),
        ("/v1/embeddings", {"cache_salt": "s"}, ["cache_salt"]),
        (CHAT, {"cache_salt": "s"}, []),
    ],
)
def test_hints_that_a_server_does_not_take_are_dropped(path, fields, dropped):
    assert USUAL.droppable(path, body(**fields)) == dropped
    USUAL.check_salt(path, body(**fields))


def test_a_salt_that_a_server_does_not_take_is_refused():
    USUAL.check_salt(COMPLETIONS, body())
    with pytest.raises(EngineRejected):
        RequestFields(openapi()).check_salt(CHAT, body(cache_salt="s"))


@pytest.mark.parametrize(
    ("path", "fields", "prompt", "given"),
    [
        (CHAT, {"messages": []}, EXACT, {"prompt_token_ids": [5, 6]}),
        (COMPLETIONS, {"prompt": "hi"}, EXACT, {"prompt": [5, 6]}),
        # Ids that are not the server's own.
        (CHAT, {"messages": []}, None, {}),
        (CHAT, {"messages": []}, KvTarget(array("i", [5, 6])), {}),
        (COMPLETIONS, {"prompt": "hi"}, KvTarget(array("i"), exact=True), {}),
        (COMPLETIONS, {"prompt": "hi"}, KvTarget(array("i", [5]), array("Q", [1]), exact=True), {}),
        # The server needs more than ids.
        (CHAT, {"prompt_token_ids": [1]}, EXACT, {}),
        (CHAT, {"truncate_prompt_tokens": 3}, EXACT, {}),
        (CHAT, {"documents": [{}]}, EXACT, {}),
        (COMPLETIONS, {"prompt": "hi", "echo": True}, EXACT, {}),
        (COMPLETIONS, {"prompt": [1, 2]}, EXACT, {}),
        (RESPONSES, {"input": "hi"}, EXACT, {}),
    ],
)
def test_token_ids_stand_for_the_text_where_they_are_the_servers_own(path, fields, prompt, given):
    assert USUAL.as_token_ids(path, body(**fields), prompt) == given


def test_a_server_that_takes_no_token_ids_gets_none():
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


PHASE = ContextPhase()
TOKENS = list(range(100, 200))
IDS = array("i", TOKENS)
HELLO = [{"role": "user", "content": "Hi"}]
NO_OPTIONS = {"stream_options": None}
PROMPTS = {COMPLETIONS: {"prompt": TOKENS}, CHAT: {"messages": HELLO, "prompt_token_ids": TOKENS}}


def asked(**fields) -> JsonBody:
    usual = {"model": "tiny", "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
    return body(**usual | fields)


SENT = PHASE.first_leg(asked(prompt=TOKENS))
"""What a context server was sent."""


class TestBothLegs:
    def test_each_request_has_a_number_that_no_server_gives_itself(self):
        sent = [PHASE.first_leg(asked(prompt="a")).get("disaggregated_params") for _ in range(200)]
        numbers = {params["disagg_request_id"] for params in sent}
        assert len(numbers) == 200
        assert all(1 << 42 <= number < 1 << 63 for number in numbers)


class TestAnswers:
    @pytest.mark.parametrize("params", [None, {}, {"ctx_request_id": None}])
    def test_of_a_server_that_keeps_nothing(self, params):
        answer = {"choices": [{"finish_reason": "length", "disaggregated_params": params}]}
        assert PHASE.handover(json.dumps(answer).encode(), SENT) is None

    @pytest.mark.parametrize(
        ("sent", "ids"), [({"prompt": "Hi"}, "prompt"), ({"messages": HELLO}, "prompt_token_ids")]
    )
    def test_the_second_server_gets_the_firsts_tokens_and_usage(self, sent, ids):
        kept = {"ctx_request_id": 7, "ctx_usage": None}
        answer = {"choices": [{"finish_reason": "length", "disaggregated_params": kept}]}
        answer |= {"prompt_token_ids": TOKENS, "usage": {"prompt_tokens": 100}}
        client = asked(**sent)
        handover = PHASE.handover(json.dumps(answer).encode(), SENT)
        second = json.loads(PHASE.second_leg(client, handover).raw)
        assert second.pop("disaggregated_params")["ctx_usage"] == {"prompt_tokens": 100}
        assert second == json.loads(client.raw) | {ids: TOKENS}

    @pytest.mark.parametrize("number", [{}, {"disagg_request_id": None}, {"disagg_request_id": 7}])
    def test_what_the_server_says_is_passed_on_with_the_number_that_kvpin_drew(self, number):
        """Whatever number the server says: that may be another request's."""
        own = {"ctx_request_id": 2**62, "draft_tokens": [1], "resolved_thinking": True, "request_type": "x"}
        own |= number
        answer = {"choices": [{"finish_reason": "length", "disaggregated_params": own}]}
        fields = PHASE.handover(json.dumps(answer).encode(), SENT).fields
        assert fields.keys() == {"disaggregated_params"}, "the second server renders the prompt itself"
        told = json.loads(bytes(fields["disaggregated_params"]))
        drawn = SENT.get("disaggregated_params")["disagg_request_id"]
        assert told == own | {"request_type": "generation_only", "disagg_request_id": drawn}

    @pytest.mark.parametrize(
        "answer", [b"", b"[]", b'{"choices": 1}', b'{"choices": [{"finish_reason": 1}]}']
    )
    def test_that_cannot_be_read(self, answer):
        with pytest.raises(EngineGarbled, match="its answer to a prefill cannot be read"):
            PHASE.handover(answer, SENT)


class TestTakes:
    def test_chats_and_completions(self):
        routes = (CHAT, COMPLETIONS, RESPONSES, "/v1/embeddings")
        assert [PHASE.takes(route, asked()) for route in routes] == [True, True, False, False]

    def test_nothing_that_its_client_divides(self):
        assert not PHASE.takes(CHAT, asked(disaggregated_params={"request_type": "context_only"}))
        assert PHASE.takes(CHAT, asked(disaggregated_params=None))


class TestFetch:
    @pytest.mark.parametrize("fields", [{}, {"n": 1}, {"logprobs": None}, {"stop": ["x"]}, NO_OPTIONS])
    def test_a_stream_of_one_answer_fetches_itself(self, fields):
        assert PHASE.fetch(COMPLETIONS, asked(prompt=TOKENS, **fields), IDS) is None

    @pytest.mark.parametrize(
        "fields",
        [
            {"stream": False},
            {"stream": None},
            {"n": 2},
            {"best_of": 3},
            {"echo": True},
            {"logprobs": 0},
            {"top_logprobs": 2},
            {"use_beam_search": True},
            {"max_tokens": 1},
            {"max_completion_tokens": 1},
            {"stream_options": {"include_usage": True, "include_obfuscation": False}},
            {"stream_options": "usage"},
        ],
    )
    def test_other_requests_do_so_with_one_of_their_own(self, fields):
        several = asked(messages=HELLO, stop="x", tools=[], cache_salt="s", prompt_token_ids=TOKENS, **fields)
        path, fetch = PHASE.fetch(CHAT, several, IDS)
        assert path == CHAT
        assert json.loads(fetch.raw) == {
            "model": "tiny",
            "messages": HELLO,
            "tools": [],
            "cache_salt": "s",
            "prompt_token_ids": TOKENS,
            "stream": False,
            "max_tokens": 2,
            "ignore_eos": True,
        }

    def test_a_completion_names_the_prompts_tokens(self):
        path, fetch = PHASE.fetch(COMPLETIONS, asked(prompt="text", echo=True), IDS)
        assert (path, json.loads(fetch.raw)["prompt"]) == (COMPLETIONS, TOKENS)


@pytest.mark.parametrize(
    ("role", "options", "moves", "found"),
    [
        ("prefill", {}, True, False),
        ("decode", {"describes_itself": False}, True, False),
        ("prefill", {"numbers_phases": False}, False, True),
        ("both", {"numbers_phases": False}, False, False),
    ],
)
async def test_a_server_that_gives_phases_no_number_is_in_no_pair(role, options, moves, found):
    with running_trtllm(**options) as server:
        adapter = make_adapter(engine_spec("tensorrt_llm", server.url, role=Role(role)))
        await adapter.connect()
        assert (adapter.transfer is not None) == moves
        assert (NO_NUMBERS in adapter.findings()) == found
        await adapter.aclose()
