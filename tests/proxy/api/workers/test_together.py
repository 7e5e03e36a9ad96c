"""Two workers answer as one."""

import asyncio
import contextlib

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse

from engine_adapter import HttpTransport
from proxy.api import together as together_module
from proxy.api.admin import admin_mount
from proxy.api.admin.endpoint import Endpoint, Query, read_bytes
from proxy.api.auth import AdminGuard
from proxy.api.siblings import Siblings
from proxy.api.together import ORDERS_PATH, Together, peer_routes
from proxy.errors import NotFound
from tests.fakes import serving
from tests.proxy.api.workers.test_siblings import at_socket

LIMIT = (Query("limit", "integer", ""),)


class Worker:
    """One worker, what it did, and whether somebody watches it."""

    def __init__(self, directory, number):
        self.number, self.done, self.viewers = number, [], 0
        self.siblings, self.transport = Siblings(directory, number, 2), HttpTransport()
        together = Together(self.transport, self.siblings, lambda: self.siblings.sockets, lambda: b"orders")
        endpoints = (
            Endpoint("GET", "/who", self.who, "", None),
            Endpoint("POST", "/do", self.do, "", None, others="do"),
            Endpoint("POST", "/known", self.known, "", None, others="know"),
            Endpoint("GET", "/list", self.who, "", None, query=LIMIT, others="do", join=self.join),
            Endpoint("GET", "/events", self.events, "", None),
            Endpoint("POST", "/order", self.do, "", None, others="follow"),
            Endpoint("DELETE", "/it", self.who, "", None),
        )
        admin = admin_mount(endpoints, AdminGuard(None), together.serve)
        self.app = Starlette(routes=[admin, *peer_routes({ORDERS_PATH: self.follow})])

    async def follow(self, told):
        self.done.append(told)
        return b""

    async def who(self, _request):
        return JSONResponse({"of": self.number}, headers={"x-of": str(self.number)})

    async def do(self, request):
        self.done.append(await read_bytes(request))
        return JSONResponse({"of": self.number}, 202)

    async def known(self, request):
        if await read_bytes(request) != b"%d" % self.number:
            raise NotFound("nobody knows it")
        return JSONResponse({"of": self.number}, 201)

    @staticmethod
    def join(request, answers):
        return {"of": [each["of"] for each in answers], "query": str(request.query_params)}

    async def events(self, _request):
        async def body():
            self.viewers += 1
            try:
                while True:
                    yield b"event: of %d\n\n" % self.number
                    await asyncio.sleep(0.01)
            finally:
                self.viewers -= 1

        return StreamingResponse(body(), media_type="text/event-stream")

    @contextlib.asynccontextmanager
    async def client(self):
        transport = httpx.ASGITransport(self.app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/admin/v1") as client:
            yield client


@pytest.fixture
async def two(tmp_path):
    """Two workers, of which the first one speaks, and a client of the second."""
    one, other = Worker(tmp_path, 1), Worker(tmp_path, 2)
    assert one.siblings.speaks()
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(contextlib.AsyncExitStack())
        await first.enter_async_context(at_socket(one.app, one.siblings.own))
        await stack.enter_async_context(at_socket(other.app, other.siblings.own))
        client = await stack.enter_async_context(other.client())
        for each in (one, other):
            stack.push_async_callback(each.transport.aclose)
        yield one, other, client, first.aclose


async def test_one_answers_for_both_until_it_is_gone(two):
    one, _, client, end = two
    answer = await client.get("/who")
    assert (answer.json(), answer.headers["x-of"]) == ({"of": 1}, "1")
    await end()
    waiting = asyncio.create_task(client.get("/who"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    one.siblings.retire()
    assert (await waiting).json() == {"of": 2}


async def test_while_none_speaks_it_is_a_503(two, monkeypatch):
    monkeypatch.setattr(together_module, "_TAKE_OVER_S", 0.1)
    *_, client, end = two
    await end()
    assert (await client.get("/who")).status_code == 503


async def test_both_do_what_all_must_do_and_each_does_it_once(two):
    one, other, client, _ = two
    answer = await client.post("/do", content=b"it")
    assert (answer.status_code, answer.json()) == (202, {"of": 1})
    assert (one.done, other.done) == ([b"it"], [b"it"])
    assert (await client.get("/list?limit=2")).json() == {"of": [1, 2], "query": "limit=2"}


async def test_what_is_ordered_about_engines_both_know_before_it_is_answered(two):
    one, other, client, _ = two
    assert (await client.post("/order", content=b"drain")).json() == {"of": 1}
    assert (one.done, other.done) == ([b"drain"], [b"orders"])


@pytest.mark.parametrize("knows", [1, 2])
async def test_the_one_answers_that_knows_what_is_named(two, knows):
    *_, client, _ = two
    answer = await client.post("/known", content=b"%d" % knows)
    assert (answer.status_code, answer.json()) == (201, {"of": knows})
    assert (await client.post("/known", content=b"3")).status_code == 404


async def test_events_pass_as_they_come_and_end_when_their_client_leaves(two):
    one, other, _, end = two
    async with serving(other.app) as url, httpx.AsyncClient(trust_env=False) as client:
        async with client.stream("GET", f"{url}/admin/v1/events") as answer:
            assert await anext(answer.aiter_raw()) == b"event: of 1\n\n"
            assert one.viewers == 1
        async with asyncio.timeout(5):
            while one.viewers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await end()


@pytest.fixture
async def lone(tmp_path):
    """What speaks for all, and does not answer yet, and the other worker."""
    one, other = Siblings(tmp_path, 1, 2), Worker(tmp_path, 2)
    assert one.speaks()
    yield one, other
    await other.transport.aclose()


async def test_events_end_with_the_one_that_sends_them(lone):
    one, other = lone

    async def dies(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n5\r\nevent\r\n")
        await writer.drain()
        writer.close()

    async with (
        asyncio.timeout(20),
        await asyncio.start_unix_server(dies, one.own),
        serving(other.app) as url,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        with pytest.raises(httpx.RemoteProtocolError):  # cut short: clients come again
            await client.get(f"{url}/admin/v1/events")


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/do", 503), ("DELETE", "/it", 200)])
async def test_what_perhaps_was_done_is_done_again_only_if_that_does_no_harm(lone, method, path, status):
    """The one that speaks is lost while it carries something out."""
    one, other = lone

    async def dies(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        one.retire()

    async with await asyncio.start_unix_server(dies, one.own), other.client() as client:
        lost = await client.request(method, path, content=b"it")
        assert (lost.status_code, other.done) == (status, [])
        assert ("look whether it is done" in lost.text) is (status == 503)
        assert (await client.get("/who")).json() == {"of": 2}


@contextlib.asynccontextmanager
async def hanging(path):
    """A worker that takes requests and never answers."""

    async def hangs(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"no end")
        writer.close()

    async with await asyncio.start_unix_server(hangs, path):
        yield


@pytest.mark.parametrize(("method", "path"), [("GET", "/who"), ("POST", "/order")])
async def test_one_that_speaks_and_hangs_is_not_waited_for(lone, monkeypatch, method, path):
    """Before, 20 and 70 s; Prometheus gives up after 10 s."""
    assert together_module._SHOW_S <= 8
    monkeypatch.setattr(together_module, "_SHOW_S", 0.3)
    one, other = lone
    async with hanging(one.own), other.client() as client, asyncio.timeout(3):
        answer = await client.request(method, path)
    assert answer.status_code == 503
    assert "the worker that answers for all has been silent" in answer.text


async def test_an_order_says_that_a_worker_hangs(tmp_path, monkeypatch):
    """Before, nothing for 23 s: until the supervisor had killed it."""
    monkeypatch.setattr(together_module, "_FOLLOW_S", 0.2)
    one = Worker(tmp_path, 1)
    assert one.siblings.speaks()
    async with hanging(one.siblings.sockets[0]), one.client() as client, asyncio.timeout(3):
        answer = await client.post("/order", content=b"drain")
    assert answer.json()["of"] == 1
    assert answer.json()["warning"].startswith("a worker has not answered for ")
    assert answer.headers["content-length"] == str(len(answer.content))
    await one.transport.aclose()
