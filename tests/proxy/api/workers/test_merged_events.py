"""A viewer at one of two workers sees the requests of both, and snapshots of both together."""

import asyncio

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from proxy.api.workers.merged_events import MergedEvents
from proxy.api.workers.siblings import Siblings
from tests.fakes import serving
from tests.proxy.api.workers.test_siblings import at_socket


def snapshot(requests):
    content = {"requests": requests, "unshown": 0, "reuse": {}, "waiting": {}, "unserved": [], "engines": []}
    return b"event: snapshot\ndata: " + msgspec.json.encode(content) + b"\n\n"


def streaming(name, requests):
    """What a worker streams: a snapshot and a request, again and again."""

    async def events(_request):
        async def body():
            while True:
                yield snapshot(requests) + b"event: placed\nda"
                yield b'ta: "%b"\n\n' % name
                await asyncio.sleep(0.01)

        return StreamingResponse(body())

    return Starlette(routes=[Route("/events", events)])


async def test_both_are_woven_into_one_stream(tmp_path):
    siblings = Siblings([tmp_path / "2.http", tmp_path / "3.http"])  # the third does not run
    own = streaming(b"one", 2)

    async def app(scope, receive, send):
        await MergedEvents(own, siblings, shared=True).serve(scope, receive, send)

    seen = b""
    async with (
        at_socket(streaming(b"two", 3), tmp_path / "2.http"),
        serving(app) as url,
        httpx.AsyncClient(timeout=30) as client,
        client.stream("GET", f"{url}/events") as answer,
    ):
        async for data in answer.aiter_raw():
            seen += data
            if b'"two"' in seen and b'"requests":5' in seen:
                break
    await siblings.aclose()
    assert b'"one"' in seen
    assert seen.startswith(b"event: snapshot\n")
    assert seen.index(b'"requests":5') < seen.index(b"\n\n")  # the first snapshot counts both


async def test_a_refusal_comes_whole(tmp_path):
    siblings = Siblings([tmp_path / "2.http"])

    async def app(scope, receive, send):
        refusal = JSONResponse({"error": "a key is needed"}, 401)
        await MergedEvents(refusal, siblings, shared=True).serve(scope, receive, send)

    async with serving(app) as url, httpx.AsyncClient(timeout=30) as client:
        answer = await client.get(f"{url}/events")
        assert (answer.status_code, answer.json()) == (401, {"error": "a key is needed"})
    await siblings.aclose()
