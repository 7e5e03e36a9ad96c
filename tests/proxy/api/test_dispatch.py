"""Which requests are the data plane's."""

import contextlib

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from proxy.api.dispatch import Dispatcher
from tests.fakes import CHAT, connect_to, is_openai_error, post, serving


@pytest.mark.parametrize("path", [CHAT, "/%761/chat/completions", "/v1%2Fchat/completions", "/v1/x?a=/y"])
async def test_what_is_under_v1_however_it_is_spelt(engine, proxy, path):
    reader, writer = await connect_to(proxy)
    writer.write(post(path, b'{"model": "m"}'))
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert [exchange.target for exchange in engine.seen] == [path]


async def test_the_rest_is_not(engine, proxy, client):
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/v1x/models")).status_code == 404
    assert is_openai_error(await client.get("/v1"), 404, "not_found")
    assert not engine.seen


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


@contextlib.asynccontextmanager
async def beside(app):
    """A client of a site that has no data plane."""
    async with serving(Dispatcher(None, app)) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


@pytest.fixture
async def others():
    routes = [Route("/echo a", echo, methods=["POST"]), Route("/parts", parts), Route("/crash", crash)]
    async with beside(Starlette(routes=routes)) as client:
        yield client


@pytest.mark.parametrize("size", [0, 10, 300_000])
async def test_a_request_arrives_whole(others, size):
    answer = await others.post("/echo%20a?q=1", content=b"x" * size, headers={"x-one": "two"})
    assert answer.json() == [size, "/echo a", {"q": "1"}, "127.0.0.1", "two"]


async def test_a_crash_is_a_500_that_tells_nothing(others):
    answer = await others.get("/crash")
    assert (answer.status_code, "secret" in answer.text) == (500, False)
    assert (await others.get("/parts")).status_code == 200


async def test_so_is_one_of_the_application_itself():
    async with beside(odd) as client:
        answer = await client.get("/x")
    assert (answer.status_code, "secret" in answer.text) == (500, False)
