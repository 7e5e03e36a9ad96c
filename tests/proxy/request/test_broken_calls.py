"""Arguments of earlier calls that no template can read."""

import json

import pytest

from engine_adapter import JsonBody, read_error
from proxy.request.engine_errors import naming_call
from tests.fakes import ASK, CHAT, FakeEngine, client_of, is_openai_error, proxy_over

SAID = "Failed to parse tool call arguments as JSON: [json.exception.parse_error.101] parse error at line 1"
AT = "messages[1].tool_calls[1].function.arguments"


def history(*arguments):
    """A conversation with an assistant's calls that have these arguments."""
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
        ([7, {"tool_calls": 7}, {"tool_calls": [7, {"function": {"arguments": {}}}]}], SAID),
        (7, SAID),
    ],
)
async def test_other_errors_stay(messages, said):
    told = await named(messages, said)
    assert (told.message, told.param, told.is_clients) == (said, None, False)


async def test_what_cannot_be_read_stays():
    told = read_error(json.dumps({"error": SAID}).encode())
    assert await naming_call(told, None) is told
    assert await naming_call(told, JsonBody(rb'{"messages": [1e999999]}')) is told


async def test_no_second_engine_is_asked():
    async def script(exchange):
        await exchange.send({"error": {"code": 500, "message": SAID, "type": "server_error"}}, status=500)

    async with FakeEngine("a") as a, FakeEngine("b") as b:
        a.script = b.script = script
        async with proxy_over(a, b) as proxy, client_of(proxy) as client:
            answer = await client.post(CHAT, json=ASK | {"messages": history("{}", "{")})
            assert is_openai_error(answer, 400, None, AT)
            assert len(a.seen) + len(b.seen) == 1
            await client.post(CHAT, json=ASK | {"messages": history("{}", "{}")})
            assert len(a.seen) + len(b.seen) == 3
