"""What kvpin makes of the answers to its own calls."""

from __future__ import annotations

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine_adapter.errors import EngineRejected, EngineUnavailable, log_text
from engine_adapter.http.control import ControlClient, read_samples
from engine_adapter.types import EngineSpec
from tests.engines import served


def spec(url="http://127.0.0.1:8000", **fields):
    return EngineSpec(kind="openai_compatible", url=url, id="e", **fields)


async def repeats(request: Request) -> Response:
    text = (await request.body()).decode()
    return JSONResponse({"error": {"message": text}}, int(request.query_params["status"]))


async def echo(request: Request) -> Response:
    return JSONResponse(
        {
            "body": (await request.body()).decode(),
            "key": request.headers.get("authorization"),
            "rank": request.headers.get("x-rank"),
            "team": request.headers.get("x-team"),
        }
    )


async def silent(request: Request) -> Response:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return Response()


async def slow(_: Request) -> Response:
    async def parts():
        for _ in range(12):
            yield b"x"
            await asyncio.sleep(0.05)

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
        Route("/closed", lambda _: JSONResponse({"error": {"message": "why", "param": "p"}}, 401)),
        Route("/echo", echo, methods=["POST"]),
        Route("/busy", lambda _: JSONResponse({"error": {"message": "why"}}, 503)),
        Route("/repeats", repeats, methods=["POST"]),
        Route("/text", lambda _: Response("boom \xff", 500)),
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


@pytest.mark.parametrize("status", [400, 503])
async def test_an_error_that_repeats_what_was_sent_is_cut_and_not_logged(control, status):
    with pytest.raises((EngineRejected, EngineUnavailable)) as caught:
        await control.call("POST", f"/repeats?status={status}", content=b"prompt " * 10_000)
    assert len(str(caught.value)) < 3_000
    assert log_text(caught.value) == f"the engine answered {status}"
    with pytest.raises(EngineUnavailable) as caught:
        await control.get("/busy")
    assert log_text(caught.value) == "the engine answered 503: why"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (None, "it wants a key: give it as api_key=KEY (it says: why)"),
        ("k", "it refuses the key of kvpin: give another one as api_key=KEY (it says: why)"),
    ],
)
async def test_an_engine_that_wants_another_key_is_told_as_that(url, key, text):
    other = ControlClient(spec(url, api_key=key))
    with pytest.raises(EngineRejected) as caught:
        await other.get("/closed")
    assert (str(caught.value), caught.value.status, caught.value.param) == (text, 401, "p")
    await other.aclose()


async def test_the_status_of_an_answer_shows_whether_a_route_exists(control):
    assert await control.status("GET", "/path/x") == 200
    assert await control.status("POST", "/echo", json={}) == 200
    assert await control.status("GET", "/echo") == 405
    assert await control.status("GET", "/none") == 404
    with pytest.raises(EngineUnavailable, match="why"):
        await control.status("GET", "/busy")


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("/text", EngineRejected, "boom"),
        ("/html", EngineUnavailable, "not JSON"),
        ("/endless", EngineUnavailable, "GET /endless: the answer is longer than 64 MiB"),
    ],
)
async def test_answers_without_a_shape(control, path, error, message):
    with pytest.raises(error, match=message):
        await control.get(path)


async def test_an_answer_of_another_form_is_not_repeated(control):
    kind = dict[str, int | None]
    with pytest.raises(EngineUnavailable, match="POST /echo: the answer is not as expected: Expected") as no:
        await control.read(kind, "POST", "/echo", json="hush")
    assert "hush" not in str(no.value)
    assert (await control.read(dict[str, str | None], "POST", "/echo", json={}))["body"] == "{}"


async def test_an_engine_that_is_silent_for_too_long(control):
    with pytest.raises(EngineUnavailable, match=r"GET /silent: no answer within 0\.05 s"):
        await control.fetch("GET", "/silent", answer_s=0.05)


async def test_only_silence_is_limited(control):
    assert await control.fetch("GET", "/slow", answer_s=0.5) == b"x" * 12


async def test_a_path_is_percent_encoded_once(control):
    assert await control.get("/path/a b%2Fc?x=1&y=[z]") == {
        "path": "/path/a%20b%2Fc",
        "query": "x=1&y=%5Bz%5D",
    }


PAGE = b"""\
# HELP busy:requests Requests now.
# TYPE busy:requests gauge
busy:requests{engine="0",model="a b"} 3.0
busy:requests{engine="1",model="a b"} 4
busy:requests_total{engine="0"} 99.0
# TYPE config_info gauge
config_info{engine="0",note="a \\"quoted\\", thing",size="32"} 1.0
started_seconds 1.795250395377022e+09
broken_lines_of_others{ nan nan
"""


def test_the_samples_that_were_asked_for():
    samples = read_samples(PAGE, ("busy:requests", "config_info", "started_seconds", "absent"))
    assert samples.sum("busy:requests") == 7
    assert samples.sum("busy:requests", engine="1") == 4
    assert samples.sum("busy:requests", engine="2") is None
    assert samples.sum("started_seconds") == 1795250395.377022
    assert samples.labels("config_info") == {"engine": "0", "note": 'a "quoted", thing', "size": "32"}
    assert samples.labels("config_info", engine="1") == {}
    assert (samples.all("absent"), samples.all("busy:requests_total")) == ([], [])


@pytest.mark.parametrize("page", [b"\xff\xfe", b'started{engine="0" 1\n', b"started one\n"])
def test_a_page_of_another_kind(page):
    if page.startswith(b"\xff"):
        page = b"started " + page
    with pytest.raises(EngineUnavailable, match="/metrics cannot be read"):
        read_samples(page, ("started",))


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_sample_with_its_time_and_one_at_the_end(end):
    samples = read_samples(f'a{{note="}} 1"}} 2 1395066363000\nb 3{end}'.encode(), ("a", "b"))
    assert [each[:3] for each in samples.all("a")] == [("a", {"note": "} 1"}, 2.0)]
    assert samples.sum("b") == 3


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e999"])
def test_values_that_are_no_numbers_tell_nothing(value):
    samples = read_samples(f'a{{x="1"}} {value}\na{{x="2"}} 3\nb {value}\n'.encode(), ("a", "b"))
    assert (samples.sum("a"), samples.sum("b")) == (3, None)


def test_the_same_series_with_other_values():
    first, second = (read_samples(b'a{x="1"} %d\na{x="2"} 5\n' % value, ("a",)) for value in (1, 2))
    assert (first.sum("a"), second.sum("a"), second.sum("a", x="1")) == (6, 7, 2)
