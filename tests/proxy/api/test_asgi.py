"""ASGI applications on the server's own protocol."""

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from proxy.api.dispatch import Dispatcher
from tests.fakes import client_of, serving


async def echo(request: Request):
    body = await request.body()
    fields = dict(request.query_params), request.client.host, request.headers["x-one"]
    return JSONResponse([len(body), request.url.path, *fields])


async def parts(_request):
    async def pieces():
        for _ in range(3):
            yield b"x" * 100_000

    return StreamingResponse(pieces())


async def crash(_request):
    raise RuntimeError("a secret")


async def odd(_scope, _receive, _send):
    raise RuntimeError("a secret")


class Page:
    """What `client_of` needs to know of a proxy."""

    def __init__(self, url):
        self.url = url


@pytest.fixture
async def client():
    routes = [Route("/echo a", echo, methods=["POST"]), Route("/parts", parts), Route("/crash", crash)]
    async with serving(Dispatcher(None, Starlette(routes=routes))) as url, client_of(Page(url)) as client:
        yield client


@pytest.mark.parametrize("size", [0, 10, 300_000])
async def test_a_request_arrives_whole(client, size):
    answer = await client.post("/echo%20a?q=1", content=b"x" * size, headers={"x-one": "two"})
    assert answer.json() == [size, "/echo a", {"q": "1"}, "127.0.0.1", "two"]


async def test_a_streamed_answer_arrives_whole(client):
    assert (await client.get("/parts")).content == b"x" * 300_000


async def test_a_crash_is_a_500_that_tells_nothing(client):
    answer = await client.get("/crash")
    assert (answer.status_code, "secret" in answer.text) == (500, False)
    assert (await client.get("/parts")).status_code == 200


async def test_so_is_one_of_the_application_itself():
    async with serving(Dispatcher(None, odd)) as url, client_of(Page(url)) as client:
        answer = await client.get("/x")
    assert (answer.status_code, "secret" in answer.text) == (500, False)
