"""What goes on to an engine, and what its answers are taken for."""

from __future__ import annotations

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineSpecError, EngineUnavailable
from engine_adapter.http.control import (
    ControlClient,
    base_url,
    max_model_len,
    model_card,
    model_name,
    prepare_request,
)
from engine_adapter.http.headers import Headers
from engine_adapter.types import EngineSpec
from engine_adapter.upload import Upload
from tests.engines import served


def spec(url="http://127.0.0.1:8000", **fields):
    return EngineSpec(kind="openai_compatible", url=url, id="e", **fields)


def prepared(headers, **fields):
    """A request with that body of a client's."""
    body = JsonBody(b'{"a" : 1}')
    return prepare_request(spec(**fields), "POST", "/v1/chat/completions", headers, body)


@pytest.mark.parametrize(
    "url",
    ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"],
)
def test_addresses_with_and_without_v1(url):
    assert base_url(spec(url)) == "http://h:1"
    request = prepare_request(spec(url), "GET", "/v1/models", {}, JsonBody(b"{}"))
    assert request.url == "http://h:1/v1/models"


def test_an_address_below_a_path():
    assert base_url(spec("https://h/engines/a/v1")) == "https://h/engines/a"


@pytest.mark.parametrize(
    "url", ["", "h:1", "ftp://h", "http://", "http://h?x=1", "http://h/#x", "http://h:port"]
)
def test_bad_addresses_are_named(url):
    with pytest.raises(EngineSpecError, match="engine 'e'"):
        base_url(spec(url))


def test_the_body_goes_on_byte_for_byte():
    assert prepared({}).body == b'{"a" : 1}'


async def test_an_unread_body_is_passed_through():
    async def parts():
        yield b"x"

    body = parts()
    request = prepare_request(spec(), "POST", "/v1/audio", {"content-length": "9"}, Upload(body))
    assert request.body is body
    assert b"content-length" not in dict(request.headers)
    request = prepare_request(spec(), "POST", "/v1/audio", {"content-length": "9"}, Upload(body, 1))
    assert dict(request.headers)[b"content-length"] == b"1"
    await body.aclose()


def test_headers_that_end_at_a_proxy():
    request = prepared(
        {
            "Host": "proxy",
            "Content-Length": "5",
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "1",
            "Keep-Alive": "timeout=5",
            "Transfer-Encoding": "chunked",
            "TE": "trailers",
            "Upgrade": "h2c",
            "Proxy-Authorization": "Basic x",
            "Accept-Encoding": "gzip, br",
            "Authorization": "Bearer clients-own",
            "X-Kvpin-Session": "s",
            "x-request-id": "r1",
            "traceparent": "00-1",
            "Content-Type": "application/json",
        }
    )
    assert request.headers == [
        (b"authorization", b"Bearer clients-own"),
        (b"x-request-id", b"r1"),
        (b"traceparent", b"00-1"),
        (b"content-type", b"application/json"),
        (b"accept-encoding", b"identity"),
    ]


def test_the_engines_own_key_takes_the_place_of_the_clients():
    client = {"Authorization": "Bearer clients-own", "X-Api-Key": "clients-own"}
    request = prepared(client, api_key="engines-own")
    assert request.headers == [
        (b"accept-encoding", b"identity"),
        (b"authorization", b"Bearer engines-own"),
    ]


def test_headers_that_come_twice_go_twice():
    request = prepared(
        Headers([(b"via", b"1.1 a"), (b"via", b"1.1 b"), (b"connection", b"x-hop"), (b"x-hop", b"1")])
    )
    assert request.headers[:2] == [(b"via", b"1.1 a"), (b"via", b"1.1 b")]
    assert b"x-hop" not in dict(request.headers)


def test_an_address_must_not_hold_a_password():
    with pytest.raises(EngineSpecError, match="use api_key or headers") as caught:
        base_url(spec(url="http://user:secret@h:1"))
    assert "secret" not in str(caught.value)


def test_the_engines_own_headers_take_the_place_of_the_clients():
    headers = {"X-Team": "kvpins", "authorization": "Basic kvpins"}
    clients = {"x-team": "clients", "Authorization": "Bearer clients"}
    request = prepare_request(spec(headers=headers), "GET", "/v1/models", clients, None)
    assert request.headers == [
        (b"accept-encoding", b"identity"),
        (b"x-team", b"kvpins"),
        (b"authorization", b"Basic kvpins"),
    ]
    assert "kvpins" not in repr(request) + repr(spec(headers=headers))


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"Content-Length": "hush"}, "kvpin sets 'Content-Length' itself: leave it out"),
        ({"a b": "hush"}, "'a b' is not a header name"),
        ({"a": "hush\r\nb: c"}, "'a' has a value that is not printable ASCII"),
        ({"a": ""}, "'a' has a value that is not printable ASCII"),
    ],
)
def test_wrong_headers_are_named_without_their_values(headers, message):
    with pytest.raises(EngineSpecError, match=message) as caught:
        ControlClient(spec(headers=headers))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("key", ["hush\n", "hüsh", " hush", "hu\0sh"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_repeated(key):
    with pytest.raises(EngineSpecError, match="api_key is not printable ASCII") as caught:
        ControlClient(spec(api_key=key))
    assert key.strip() not in str(caught.value)


@pytest.mark.parametrize("answer", [{}, [], {"data": []}, {"data": [{}]}, {"data": [{"id": 5}]}])
def test_models_without_a_name(answer):
    with pytest.raises(EngineUnavailable):
        model_name(answer)
    assert max_model_len(answer) is None


def test_models():
    answer = {"data": [{"id": "m", "max_model_len": 9}, {"id": "other"}]}
    assert model_name(answer) == "m"
    assert max_model_len(answer) == 9


def test_the_own_fields_of_a_model():
    first = {"id": "m", "object": "model", "created": 5, "owned_by": "vllm", "root": "/x", "max_model_len": 9}
    answer = {"data": [first, {"id": "other", "parent": None, "permission": [{}], "meta": {"n_ctx": 3}}]}
    assert model_card(answer) == {"max_model_len": 9}
    assert model_card(answer, "other") == {"meta": {"n_ctx": 3}}
    assert model_card(answer, "none") == model_card({"data": []}) == model_card([]) == {}


ERRORS = {
    "openai": (400, {"error": {"message": "why", "param": "p", "code": 400}}),
    "flat": (422, {"object": "error", "message": "why"}),
    "string": (401, {"error": "why"}),
    "detail": (404, {"detail": "why"}),
}


async def error(request: Request) -> Response:
    status, content = ERRORS[request.path_params["name"]]
    return JSONResponse(content, status)


async def echo(request: Request) -> Response:
    return JSONResponse(
        {
            "body": (await request.body()).decode(),
            "key": request.headers.get("authorization"),
            "rank": request.headers.get("x-rank"),
            "team": request.headers.get("x-team"),
        }
    )


async def silent(_: Request) -> Response:
    await asyncio.sleep(5)
    return Response()


async def slow(_: Request) -> Response:
    async def parts():
        for _ in range(5):
            yield b"x"
            await asyncio.sleep(0.1)

    return StreamingResponse(parts())


async def endless(_: Request) -> Response:
    async def parts():
        while True:
            yield bytes(1 << 20)
            await asyncio.sleep(0.001)

    return StreamingResponse(parts())


async def target(request: Request) -> Response:
    return JSONResponse(
        {"path": request.scope["raw_path"].decode(), "query": request.scope["query_string"].decode()}
    )


@pytest.fixture(scope="module")
def url():
    routes = [
        Route("/error/{name}", error),
        Route("/echo", echo, methods=["POST"]),
        Route("/busy", lambda _: JSONResponse({"error": {"message": "why"}}, 503)),
        Route("/text", lambda _: Response("boom \xff", 500)),
        Route("/nothing", lambda _: Response(status_code=500)),
        Route("/html", lambda _: Response("<html>")),
        Route("/silent", silent),
        Route("/slow", slow),
        Route("/endless", endless),
        Route("/path/{rest:path}", target),
    ]
    with served(Starlette(routes=routes)) as address:
        yield address


@pytest.fixture
async def control(url):
    client = ControlClient(spec(url, api_key="k", headers={"X-Team": "t"}))
    yield client
    await client.aclose()


async def test_calls_bring_json_and_the_key(control):
    answer = await control.call("POST", "/echo", json={"a": 1}, headers={"x-rank": "1"})
    assert answer == {"body": '{"a":1}', "key": "Bearer k", "rank": "1", "team": "t"}
    assert (await control.call("POST", "/echo", content=b"raw"))["body"] == "raw"


@pytest.mark.parametrize("name", ERRORS)
async def test_errors_of_every_shape_keep_their_message(control, name):
    with pytest.raises(EngineRejected, match="why") as caught:
        await control.get(f"/error/{name}")
    assert caught.value.status == ERRORS[name][0]
    assert caught.value.param == ("p" if name == "openai" else None)


async def test_errors_without_a_shape(control):
    with pytest.raises(EngineRejected, match="boom"):
        await control.get("/text")
    with pytest.raises(EngineRejected, match="no reason"):
        await control.get("/nothing")


async def test_an_engine_that_says_it_is_unavailable(control):
    with pytest.raises(EngineUnavailable, match="why"):
        await control.get("/busy")


async def test_an_answer_that_is_not_json(control):
    with pytest.raises(EngineUnavailable, match="not JSON"):
        await control.get("/html")


async def test_an_engine_that_is_silent_for_too_long(control):
    with pytest.raises(EngineUnavailable, match=r"GET /silent: no answer within 0\.05 s"):
        await control.fetch("GET", "/silent", answer_s=0.05)


async def test_only_silence_is_limited(control):
    assert await control.fetch("GET", "/slow", answer_s=0.3) == b"xxxxx"


async def test_an_endless_answer_is_given_up(control):
    with pytest.raises(EngineUnavailable, match="GET /endless: the answer is longer than 64 MiB"):
        await control.get("/endless")


async def test_a_path_is_percent_encoded_once(control):
    assert await control.get("/path/a b%2Fc?x=1&y=[z]") == {
        "path": "/path/a%20b%2Fc",
        "query": "x=1&y=%5Bz%5D",
    }


async def test_nobody_there():
    client = ControlClient(spec("http://127.0.0.1:1"))
    with pytest.raises(EngineUnavailable):
        await client.get("/x")
    await client.aclose()


class TestCallsThatRequestsWaitFor:
    @pytest.fixture
    async def control(self):
        async def tokenize(request: Request) -> Response:
            assert request.headers["authorization"] == "Bearer k"
            match await request.json():
                case {"prompt": str(prompt)}:
                    return JSONResponse({"tokens": [len(prompt)]})
                case {"status": status}:
                    return JSONResponse({"error": {"message": "no", "param": "p"}}, status)
                case _:
                    return Response("what?")

        with served(Starlette(routes=[Route("/tokenize", tokenize, methods=["POST"])])) as url:
            control = ControlClient(spec(url, api_key="k"))
            yield control
            await control.aclose()

    async def test_json_and_bytes(self, control):
        assert await control.call("POST", "/tokenize", json={"prompt": "abc"}) == {"tokens": [3]}
        assert await control.call("POST", "/tokenize", content=b'{"prompt": "a"}') == {"tokens": [1]}

    @pytest.mark.parametrize(("status", "error"), [(400, EngineRejected), (503, EngineUnavailable)])
    async def test_errors_are_told_apart(self, control, status, error):
        with pytest.raises(error, match="no"):
            await control.call("POST", "/tokenize", json={"status": status})

    async def test_an_answer_that_is_not_json_or_none_at_all(self, control):
        with pytest.raises(EngineUnavailable, match="POST /tokenize: the answer is not JSON"):
            await control.call("POST", "/tokenize", json={})
        nobody = ControlClient(spec("http://127.0.0.1:1"))
        with pytest.raises(EngineUnavailable):
            await nobody.call("POST", "/tokenize", json={})
        await nobody.aclose()
        with pytest.raises(EngineUnavailable, match="removed"):
            await nobody.call("POST", "/tokenize", json={})
