"""One worker answers for two."""

import asyncio
import contextlib

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from proxy.api.workers.merging_app import ORDERS_PATH, MergedAnswers, MergedEvents
from proxy.api.workers.siblings import Siblings
from proxy.control.prefixes import PROMPTS_PATH
from tests.fakes import serving
from tests.proxy.api.workers.test_siblings import at_socket

ADMIN = "/admin/v1"


class Worker:
    """What one worker would answer for itself, and what it was asked."""

    def __init__(self, number, *, refuses=False):
        self.number, self.refuses, self.asked = number, refuses, []
        self.app = Starlette(routes=[Route("/{path:path}", self.serve, methods=["GET", "POST", "DELETE"])])

    async def serve(self, request):
        path = request.url.path.removeprefix(ADMIN)
        body = await request.body()
        self.asked.append((request.method, path, body))
        if self.refuses:
            return JSONResponse({"error": "no"}, 401)
        part = {"engine": "a", "state": "done", "done": self.number}
        is_second = self.number == 2
        found = {
            "/metrics": PlainTextResponse(f"# TYPE kvpin_x_total counter\nkvpin_x_total {self.number}.0\n"),
            "/requests": JSONResponse({"requests": [{"id": self.number, "started": self.number}]}),
            "/requests/two": JSONResponse({"of": self.number}, 200 if is_second else 404),
            "/flush": JSONResponse(
                {"id": f"op-{self.number}", "state": "done", "engines": [part]}, 202 if is_second else 200
            ),
            "/engines": JSONResponse({"id": f"vllm-{self.number}"}, 201),
            "/pin": JSONResponse({"of": self.number}, 200 if is_second else 404),
            "/offload": JSONResponse({"of": self.number}, 502 if is_second else 404),
            "/engines/x": Response(status_code=204 if is_second else 404),
        }
        refused = JSONResponse({"error": "no"}, 401)
        return refused if self.refuses else found.get(path, JSONResponse({"of": self.number}))


@contextlib.asynccontextmanager
async def two(tmp_path, **options):
    """A client of worker 1, and both workers."""
    own, other = Worker(1, **options), Worker(2)
    siblings = Siblings([tmp_path / "2.http"])
    app = MergedAnswers(own.app, siblings, {}, shared=True)
    async with at_socket(other.app, tmp_path / "2.http"):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            yield client, own, other
        await siblings.aclose()


async def test_reads_show_both_as_one(tmp_path):
    async with two(tmp_path) as (client, _, other):
        assert (await client.get("/metrics")).text.splitlines()[1] == "kvpin_x_total 3.0"
        listed = (await client.get(f"{ADMIN}/requests?limit=1")).json()
        assert [each["id"] for each in listed["requests"]] == [2]
        repeated = (await client.get(f"{ADMIN}/requests?limit=x&limit=1")).json()  # the last one counts
        assert repeated == listed
        assert (await client.get(f"{ADMIN}/requests/two")).json() == {"of": 2}
        for path in ("/health/ready", f"{ADMIN}/requests/one"):
            assert (await client.get(path)).json() == {"of": 1}
        assert not [path for _, path, _ in other.asked if path in ("/health/ready", "/requests/one")]


async def test_changes_are_carried_out_by_both(tmp_path):
    async with two(tmp_path) as (client, _, other):
        flushed = await client.post(f"{ADMIN}/flush", json={"engine": "a"})
        assert (flushed.status_code, flushed.json()["engines"][0]["done"]) == (202, 2)
        assert other.asked[-1] == ("POST", "/flush", b'{"engine":"a"}')
        added = await client.post(f"{ADMIN}/engines", json={"kind": "vllm"})
        assert (added.status_code, added.json()) == (201, {"id": "vllm-1"})
        assert other.asked[-1][2] == b'{"kind":"vllm","id":"vllm-1"}'
        assert (await client.delete(f"{ADMIN}/engines/x")).status_code == 204


@pytest.mark.parametrize(("method", "path"), [("POST", "/flush"), ("GET", "/stats")])
async def test_what_one_refuses_the_other_is_not_asked(tmp_path, method, path):
    async with two(tmp_path, refuses=True) as (client, _, other):
        assert (await client.request(method, f"{ADMIN}{path}")).status_code == 401
        assert other.asked == []


async def test_what_a_worker_was_asked_by_another_goes_no_further(tmp_path):
    async with two(tmp_path) as (_, own, other):

        async def from_peer(scope, receive, send):
            await MergedAnswers(own.app, Siblings([tmp_path / "2.http"]), {}, shared=True)(
                {**scope, "kvpin.from_peer": True}, receive, send
            )

        async with httpx.AsyncClient(transport=httpx.ASGITransport(from_peer), base_url="http://x") as peer:
            assert (await peer.get("/metrics")).text.splitlines()[1] == "kvpin_x_total 1.0"
        assert other.asked == []


async def test_one_does_what_names_a_request_that_only_it_knows(tmp_path):
    async with two(tmp_path) as (client, own, other):
        assert (await client.post(f"{ADMIN}/pin", json={"request_id": "r"})).json() == {"of": 2}
        assert (await client.post(f"{ADMIN}/offload", json={"request_id": "r"})).status_code == 502
        assert [path for _, path, _ in other.asked] == ["/pin", "/offload"]
        assert (await client.post(f"{ADMIN}/warm", json={"prompt": "x"})).json() == {"of": 1}
        assert len(other.asked) == 2
        assert len(own.asked) == 3


async def test_it_tells_another_worker_and_nobody_else_of_orders_and_prompts():
    async def orders():
        return b"orders"

    async def prompts():
        return b"prompts"

    own, is_peer = Worker(2), True
    told = {ORDERS_PATH: orders, PROMPTS_PATH: prompts}
    app = MergedAnswers(own.app, Siblings([]), told, shared=True)

    async def asked(scope, receive, send):
        await app({**scope, "kvpin.from_peer": is_peer}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(asked), base_url="http://x") as client:
        assert (await client.get(ORDERS_PATH)).content == b"orders"
        assert (await client.get(PROMPTS_PATH)).content == b"prompts"
        is_peer = False
        for path in (ORDERS_PATH, PROMPTS_PATH):
            assert (await client.get(path)).json() == {"of": 2}


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
