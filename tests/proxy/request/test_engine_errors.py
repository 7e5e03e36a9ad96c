"""Which answers leave a request to another engine. Over real sockets: tests/proxy/test_flow.py."""

import json

import pytest

from engine_adapter import EngineRejected, EngineUnavailable, Headers, JsonBody, read_error
from proxy.core.life import Cause
from proxy.errors import EngineFailed
from proxy.request.calls import Call
from proxy.request.engine_errors import cause_of_error, engines_code, final_error, naming_call
from tests.fakes import ASK, CHAT, asked, is_openai_error
from tests.scripts import sends

DOWN, FULL = EngineUnavailable("down"), EngineRejected("full", status=429)


def call(path="/v1/chat/completions", body=None):
    return Call("r", "POST", path, Headers([]), body)


def cause(status, path="/v1/chat/completions", n=2, *, is_first=True, message="no", **more):
    error = EngineRejected(message, status=status, **more)
    return cause_of_error(error, call(path), n, is_first=is_first)


def test_a_404_is_about_the_request_unless_another_engine_may_have_the_route():
    assert cause(404) is Cause.ENGINE_REJECTED
    assert cause(404, "/v1/embeddings") is Cause.ENGINE_LACKS
    assert cause(404, "/v1/files/f-1") is Cause.ENGINE_LACKS
    assert cause(404, "/v1/embeddings", n=1) is Cause.ENGINE_REJECTED
    assert all(cause(429, path) is Cause.ENGINE_REFUSED for path in ("/v1/embeddings", "/v1/responses"))


@pytest.mark.parametrize(
    "told",
    [
        {"param": "model"},
        {"code": "model_not_found"},
        {"message": "The model `m` does not exist."},
        {"message": "Model 'm' not found"},
        {"message": "unknown model m"},
    ],
)
def test_a_404_about_the_model_is_the_engines(told):
    assert cause(404, **told) is Cause.ENGINE_DENIED
    assert cause(404, n=1, **told) is Cause.ENGINE_REJECTED


@pytest.mark.parametrize("status", [401, 403, 405, 501])
def test_what_one_engine_denies_another_one_is_asked(status):
    assert cause(status) is Cause.ENGINE_DENIED
    assert cause(status, n=1) is Cause.ENGINE_REJECTED
    assert cause(status, n=1, is_first=False) is Cause.ENGINE_DENIED  # so that the client gets the first one


@pytest.mark.parametrize("status", [429, 500, 503, 507, 529, 599])
def test_any_failure_of_the_server_is_a_refusal(status):
    assert cause(status, n=1) is Cause.ENGINE_REFUSED
    assert cause(status, headers={"x-should-retry": "false"}) is Cause.ENGINE_REJECTED


def test_the_last_failure_is_the_clients_error_and_stops_its_retries():
    alone, last = final_error([FULL]), final_error([DOWN, FULL])
    assert (alone.status, last.status) == (429, 429)
    assert "x-should-retry" not in alone.headers or last is alone
    assert last.headers["x-should-retry"] == "false"
    failed = final_error([FULL, DOWN])
    assert isinstance(failed, EngineFailed)
    assert str(failed) == "2 engines failed this request; the last said: down"
    assert str(final_error([DOWN])) == "1 engine failed this request; the last said: down"


@pytest.mark.parametrize(
    ("status", "message", "own", "code"),
    [
        (404, "The model `m` does not exist.", None, "model_not_found"),  # vLLM
        (404, "File Not Found", None, "not_found"),  # llama-server
        (404, "gone", "own", "own"),
        (400, "The model `m` does not exist.", None, None),
    ],
)
def test_a_404_has_a_code_whether_the_engine_gives_one_or_not(status, message, own, code):
    assert engines_code(EngineRejected(message, status=status, code=own)) == code


SAID = "Failed to parse tool call arguments as JSON: [json.exception.parse_error.101] parse error at line 1"
AT = "messages[1].tool_calls[1].function.arguments"


def history(*arguments):
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": each}}
        for i, each in enumerate(arguments)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
    return [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}, *results]


async def named(messages, said=SAID):
    body = JsonBody(json.dumps({"messages": messages}).encode())
    return await naming_call(read_error(json.dumps({"error": said}).encode()), body)


@pytest.mark.parametrize("broken", ['{"x": ', "", "[1]", "7", "[" * 5000])
async def test_the_call_is_named(broken):
    told = await named(history("{}", broken))
    assert (told.is_clients, told.param, told.type) == (True, AT, "invalid_request_error")
    assert told.message.startswith(f"{AT} is no JSON object")
    assert told.message.endswith(SAID)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (history("{}"), SAID),
        (history("{"), "out of memory"),
        (history("[" + "[]," * 140_000), SAID),
        ([7, {"tool_calls": 7}, {"tool_calls": [7, {"function": {"arguments": {}}}]}], SAID),
        (7, SAID),
    ],
)
async def test_other_errors_stay(messages, said):
    told = await named(messages, said)
    assert (told.message, told.param, told.is_clients) == (said, None, False)


@pytest.mark.parametrize("body", [None, JsonBody(rb'{"messages": [1e999999]}')])
async def test_what_cannot_be_read_stays(body):
    told = read_error(json.dumps({"error": SAID}).encode())
    assert await naming_call(told, body) is told


async def test_no_second_engine_is_asked():
    script = sends({"error": {"code": 500, "message": SAID, "type": "server_error"}}, 500)
    async with asked(script, script) as (proxy, client, *_):
        answer = await client.post(CHAT, json=ASK | {"messages": history("{}", "{")})
        assert is_openai_error(answer, 400, None, AT)
        assert proxy.last.attempts == ["a"]
        await client.post(CHAT, json=ASK | {"messages": history("{}", "{}")})
        assert len(proxy.last.attempts) == 2
