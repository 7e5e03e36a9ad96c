"""Two engines, one of which gives answers that are no answers: how many of 60 requests are answered well."""

import asyncio
import json
from dataclasses import replace

import pytest

from proxy.core import audit
from tests.fakes import (
    ASK,
    CHAT,
    DONE,
    INFO,
    STREAM,
    FakeAdapter,
    FakeEngine,
    asked,
    client_of,
    event,
    proxy_over,
)
from tests.scripts import sends, streams

N_REQUESTS, AT_A_TIME = 60, 4
# An answer of the good engine. The odd one answers at once, and so looks fast: it gets many requests before
# an answer with text shows that it is odd.
GOOD_S = 0.004
WORD, END = ({"index": 0, "delta": delta} for delta in ({"content": "hi"}, {}))
ROLE = event({"id": "1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
LAST = event({"id": "1", "choices": [END | {"finish_reason": "stop"}]})
HTML = ("content-type", "text/html")


def choice(text):
    return {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}


def whole(*choices):
    return {"id": "1", "object": "chat.completion", "choices": [*choices], "usage": {"completion_tokens": 1}}


async def good(exchange):
    await asyncio.sleep(GOOD_S)
    if exchange.json.get("stream"):
        await exchange.stream(ROLE, event({"id": "1", "choices": [WORD]}), LAST, DONE)
    else:
        await exchange.send(whole(choice("hi")))


def error(status, message, **more):
    return sends({"error": {"message": message, "code": status, **more}}, status)


# By their names: what the odd engine does, what is asked, and how many of 60 answers must be good.
ODD = {
    "no text": (sends(whole(choice(""))), ASK, 40),
    "no text, streamed": (streams(ROLE, LAST, DONE), STREAM, 40),
    "no choices": (sends(whole()), ASK, 60),
    "no choices, streamed": (streams(event({"id": "1", "choices": []}), DONE), STREAM, 60),
    "an HTML page": (sends(b"<html>Sign in</html>", headers=[HTML]), ASK, 60),
    "an HTML page, streamed": (sends(b"<html>Sign in</html>", headers=[HTML]), STREAM, 60),
    "302": (sends(b"", 302, [HTML, ("location", "http://10.0.0.1/login")]), ASK, 60),
    "204": (sends(b"", 204, [HTML]), ASK, 60),
    "null": (sends(b"null"), ASK, 60),
    "another shape": (sends({"generated_text": "hi"}), ASK, 60),
    "401": (error(401, "invalid key"), ASK, 60),
    "403": (error(403, "not yours"), ASK, 60),
    "404": (error(404, "The model `m` does not exist.", type="NotFoundError", param="model"), ASK, 60),
    "405": (error(405, "Method Not Allowed"), ASK, 60),
    "501": (error(501, "not implemented"), ASK, 60),
    "529": (error(529, "overloaded"), ASK, 60),
    "an error in a 200": (sends({"error": {"message": "no", "code": 503}}), ASK, 60),
    "an error in a stream": (streams(event({"error": {"message": "no"}}), DONE), STREAM, 60),
    "500": (error(500, "broken"), ASK, 60),
    "an empty body": (sends(b""), ASK, 60),
}


def is_good(response):
    if response.status_code != 200:
        return False
    if response.headers["content-type"].startswith("text/event-stream"):
        return b'"hi"' in response.content and response.content.endswith(DONE)
    try:
        return response.json()["choices"][0]["message"]["content"] == "hi"
    except (json.JSONDecodeError, TypeError, KeyError, IndexError):
        return False


async def counted(client, body):
    """Good answers among N_REQUESTS, of which AT_A_TIME run at a time."""
    left, n_good = iter(range(N_REQUESTS)), 0

    async def ask():
        nonlocal n_good
        for number in left:
            messages = [{"role": "user", "content": f"question {number}"}]
            response = await client.post(CHAT, json={**body, "messages": messages})
            n_good += is_good(response)

    await asyncio.gather(*(ask() for _ in range(AT_A_TIME)))
    return n_good


@pytest.mark.parametrize("name", ODD)
async def test_an_odd_engine_draws_few_requests(name, monkeypatch):
    """An odd engine that was found out is asked no more in this test, however long it takes."""
    monkeypatch.setattr(audit, "OPEN_S", 3600.0)
    monkeypatch.setattr(audit, "MAX_OPEN_S", 3600.0)
    script, body, least = ODD[name]
    async with asked(script, good, reuse=True) as (_proxy, client, odd, _):
        n_good = await counted(client, body)
        assert n_good >= least, f"{n_good} of {N_REQUESTS} are good"
        assert 0 < len(odd.seen) <= N_REQUESTS / 2


async def test_empty_answers_are_a_finding_until_the_engine_gives_text():
    script, body, _ = ODD["no text"]
    async with asked(script, good, reuse=True) as (proxy, client, first, _):
        await counted(client, body)
        odd, other = proxy.fleet.engines.values()
        (finding,) = odd.findings()
        assert str(finding).startswith(
            "its answers are empty, while other engines of its model answer with text"
        )
        assert odd.breaker is not None
        assert not other.findings()
        first.script = good
        async with asyncio.timeout(20):
            while odd.findings():
                await client.post(CHAT, json=body)


@pytest.mark.parametrize("name", ["401", "403", "404", "405", "501", "529", "500", "an error in a 200"])
async def test_what_both_engines_refuse_is_nobodys_failure(name):
    """The client gets the first one's word, and each is asked once."""
    script, body, _ = ODD[name]
    async with asked(script, script) as (proxy, client, *_):
        for _ in range(4):
            response = await client.post(CHAT, json=body)
            assert response.status_code == (503 if name == "an error in a 200" else int(name))
            assert response.headers["x-should-retry"] == "false"
            assert len(list(proxy.requests)[-1].attempts) == 2
        assert all(each.breaker is None for each in proxy.fleet.engines.values())


# A failure told in an answer with status 200: what it names, the status for the client, how many are asked.
TOLD = [
    ({"message": "no", "code": 503}, 503, 2),
    ({"message": "no", "code": "500"}, 500, 2),
    ({"message": "no"}, 500, 2),
    ({"message": "no", "type": "overloaded_error"}, 529, 2),
    ({"message": "no", "code": 400}, 400, 1),
    ({"message": "no", "type": "invalid_request_error"}, 400, 1),
    ({"message": "Failed to parse input at pos 7: <tool", "code": 500}, 500, 1),
]


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize(("told", "status", "engines"), TOLD)
async def test_a_failure_in_a_200_has_the_status_that_it_names(told, status, engines, body):
    script = sends({"error": told}) if body is ASK else streams(event({"error": told}), DONE)
    async with asked(script, script) as (proxy, client, *_):
        response = await client.post(CHAT, json=body)
        assert (response.status_code, response.json()["error"]["message"]) == (status, told["message"])
        (record,) = proxy.requests
        assert (len(record.attempts), record.status) == (engines, status)
        assert record.cause == ("engine_refused" if engines == 2 else "engine_rejected")
        assert record.first_byte_s is None  # its time teaches no rate


AS_CHATS = replace(INFO, served_as_chats=frozenset({"/v1/messages", "/v1/responses"}))
AFTER_TEXT = {
    "OpenAI": (CHAT, STREAM, b'data: {"error"'),
    "Anthropic": ("/v1/messages", {**STREAM, "max_tokens": 9}, b"event: error\ndata: "),
    "Responses": ("/v1/responses", {"model": "m", "input": "hi", "stream": True}, b"event: error\ndata: "),
}


@pytest.mark.parametrize("api", AFTER_TEXT)
@pytest.mark.parametrize(("code", "cause"), [(500, "engine_refused"), (400, "engine_rejected")])
async def test_a_failure_after_text_is_the_engines_and_told(api, code, cause):
    route, body, form = AFTER_TEXT[api]
    failure = event({"error": {"message": "broke", "code": code}})
    async with (
        FakeEngine("a", streams(ROLE, event({"id": "1", "choices": [WORD]}), failure, DONE)) as a,
        proxy_over(FakeAdapter("a", a.url, AS_CHATS)) as proxy,
        client_of(proxy) as client,
    ):
        response = await client.post(route, json=body)
        begin, _, told = response.content.partition(form)
        assert b"hi" in begin
        assert b"broke" in told
        (record,) = proxy.requests
        assert (record.cause, record.status, record.error) == (cause, 200, "broke")
        assert (proxy.fleet.engines["a"].breaker is not None) is (code == 500)
