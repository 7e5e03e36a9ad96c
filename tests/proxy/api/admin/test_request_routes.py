import asyncio
import gzip
import json
import time
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from threading import get_ident

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from proxy.api.admin import admin_mount, use_routes
from proxy.api.auth import AdminGuard
from proxy.cli.main import app
from proxy.core.index.match import Match
from proxy.core.placement.decision import Candidate
from proxy.core.placement.rates import EngineRates, PoolRates
from proxy.core.placement.scores import place
from proxy.core.quotas import DAY_S, UseBook
from proxy.server.app import build_app
from tests.fakes import ASK, CHAT, FakeEngine, serving
from tests.kv_world import KvFake, kv_world, tokens, until


def placed(world, request, ids, **fields):
    """A request that engine a served, which held nothing of its prompt."""
    record = world.record(request, ids, **fields)
    candidate = Candidate("a", 16, EngineRates(PoolRates()), Match(gpu=0))
    record.placement = place([candidate], world.pool.chain(record.prompt))
    return record


async def test_where_a_request_would_go(world, client, pair):
    world.served(pair[1], tokens(64))
    answer = (await client.post("/route", json={"prompt": tokens(64), "max_tokens": 4})).json()
    assert (answer["engine"], answer["predicted_tokens"]) == ("b", 48)
    assert [c["engine"] for c in answer["candidates"]] == ["a", "b"]
    assert all(c["total_s"] >= c["prefill_s"] for c in answer["candidates"])
    named = (await client.post("/route", json={"prompt": "x", "path": "/v1/embeddings"})).json()
    assert (named["path"], named["n_tokens"]) == ("/v1/embeddings", None)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": [1, -1]}, 400, "prompt[1]"),
        ({"prompt": "x", "path": 3}, 400, "path"),
        ({"prompt": "x", "model": "n"}, 404, "model"),
        ({"prompt": "x", "model": 3}, 400, "model"),
        ({"prompt": "x", "tenant": "carol"}, 404, "tenant"),
        ({"prompt": "x", "cache_salt": ""}, 400, "cache_salt"),
    ],
)
async def test_a_request_that_would_be_refused(client, pair, body, status, param):
    answer = await client.post("/route", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_the_last_requests_newest_first(world, client, pair):
    for number in range(60):
        world.record(f"r{number}", tokens(20))
    listed = (await client.get("/requests")).json()["requests"]
    assert (len(listed), listed[0]["request_id"]) == (50, "r59")
    two = (await client.get("/requests?limit=2")).json()["requests"]
    assert [each["request_id"] for each in two] == ["r59", "r58"]
    assert len((await client.get("/requests?limit=10000")).json()["requests"]) == 60


async def test_one_request_explained(world, client, pair):
    placed(world, "first", tokens(40) + [5] * 24)
    record = placed(world, "r", tokens(64), reported_tokens=0)
    answer = (await client.get("/requests/r")).json()
    assert "evicted or flushed" in answer["explanation"]
    assert (answer["miss"], answer["differs_at"]) == ("evicted", None)
    assert answer["divergence"]["common_tokens"] == 40
    assert answer["divergence"]["text"]
    assert [cost["engine"] for cost in answer["decision"]["costs"]] == ["a"]
    assert answer["decision"]["why"].startswith("a is the only engine")
    record.client_request_id, record.tenant = "mine", "red"
    for query in ("", "?tenant=red"):
        found = (await client.get(f"/requests/mine{query}")).json()
        assert (found["request_id"], found["client_request_id"]) == ("r", "mine")
    assert (await client.get("/requests/mine?tenant=blue")).status_code == 404
    missing = await client.get("/requests/nope")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "request_id")
    world.record("req-1", tokens(8))
    world.record("req-2", tokens(8))
    several = (await client.get("/requests/req-")).json()["error"]["message"]
    assert several == "2 ids of recent requests begin with 'req-': write more of one"


async def test_it_says_where_the_records_of_requests_are_that_were_passed_on(world, client, pair):
    unknown = (await client.get("/requests/r")).json()["error"]["message"]
    assert unknown == "no recent request has the id 'r', and none has one that begins so"
    world.flow.fleet.passed_on["vm:7"] += 1
    assert (await client.get("/requests")).json() == {"requests": [], "passed_on": {"vm:7": 1}}
    assert (await client.get("/requests/r")).json()["error"]["message"].endswith("has their records: vm:7")


replay_routes = import_module("proxy.api.admin.request_routes")  # the package has a function of that name
TRACES = Path(__file__).parents[3] / "data" / "traces"


@pytest.fixture(scope="module")
def trace():
    with gzip.open(TRACES / "agents.jsonl.gz") as file:
        return b"".join(file.readlines()[:40])


async def test_it_is_what_the_command_says(client, trace, tmp_path):
    options = {"engines": "1,2", "policies": "kvpin,oracle", "gpu_tokens": "300k"}
    answer = (await client.post("/replays", params=options, content=trace)).json()
    path = tmp_path / "recording.jsonl"
    path.write_bytes(trace)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    document = json.loads(CliRunner().invoke(app, ["replay", str(path), *words, "--json", "-"]).stdout)
    assert answer["runs"] == document["runs"]
    assert answer["notes"] == [*document["doubts"], *document["notes"]]
    assert answer["title"] == document["title"].replace("recording.jsonl", "recording")
    assert [each["x"] for each in answer["curves"]] == [[1, 2]] * 3


@pytest.mark.parametrize(
    ("body", "options", "message", "param"),
    [
        (b"{}\n", {}, "the recording, line 1: Object missing", None),
        (None, {"gpu_tokens": "much"}, "--gpu-tokens: 'much' is not an amount", "gpu_tokens"),
        (None, {"policies": "--html=/tmp/x"}, "--policies: there is no policy '--html=/tmp/x'", "policies"),
        (None, {"html": "x"}, "there is no query parameter 'html'", "html"),
    ],
)
async def test_what_cannot_be_replayed_names_its_field(client, trace, body, options, message, param):
    answer = await client.post("/replays", params=options, content=trace if body is None else body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]


async def test_a_long_body_is_refused(client, monkeypatch):
    monkeypatch.setattr(replay_routes, "MAX_TRACE_BYTES", 10)
    assert (await client.post("/replays", content=b"x" * 11)).status_code == 413


TODAY = int(time.time() // DAY_S)


@pytest.fixture
async def use():
    """A book of three days, and a client that asks about it."""
    book = UseBook()
    for ago in (0, 29, 30):
        book[TODAY - ago, "acme", "m"].requests += 1
    transport = httpx.ASGITransport(admin_mount(use_routes(book), AdminGuard(None)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/admin/v1") as client:
        yield book, client


async def test_days_are_counted_from_today(use):
    _, client = use
    rows = (await client.get("/usage")).json()["usage"]
    assert [row["day"] for row in rows] == sorted((row["day"] for row in rows), reverse=True)
    assert len(rows) == 2
    assert (rows[0]["tenant"], rows[0]["model"], rows[0]["requests"]) == ("acme", "m", 1)
    assert len((await client.get("/usage?days=400")).json()["usage"]) == 3
    assert len((await client.get("/usage?days=1")).json()["usage"]) == 1


async def test_very_many_rows_are_sorted_and_written_off_the_loop(use, monkeypatch):
    book, client = use
    for tenant in range(10_000):
        book[TODAY, f"t{tenant * 7919 % 10_000:05}", "m"].requests += 1
    seen, since = [], UseBook.since
    monkeypatch.setattr(UseBook, "since", lambda *args: seen.append(get_ident()) or since(*args))
    rows = (await client.get("/usage?days=400")).json()["usage"]
    assert seen != [get_ident()]
    assert len(rows) == 10_003
    tenants = [row["tenant"] for row in rows if row["day"] == rows[0]["day"]]
    assert tenants == sorted(tenants)


@pytest.mark.parametrize("days", ["0", "401", "x"])
async def test_a_number_of_days_that_is_none(use, days):
    _, client = use
    assert (await client.get("/usage", params={"days": days})).status_code == 400


# --- events, over real sockets, with a real proxy and a scripted engine


WORDS = "a prompt that nobody else may read"


@asynccontextmanager
async def watched(tokenizer_dir, **settings):
    """A world that is served, and a client of it."""
    async with kv_world(tokenizer_dir, **settings) as world, FakeEngine("a") as engine:
        world.add(KvFake("a", url=engine.url))
        async with (
            serving(build_app(world.proxy)) as url,
            httpx.AsyncClient(base_url=url, timeout=30) as client,
        ):
            yield world, client


async def events(answer):
    """The events as they come: name and data."""
    name = None
    async for line in answer.aiter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, msgspec.json.decode(value)


async def next_of(stream, name):
    """The next event of that name, and all of the stream's text on the way."""
    async with asyncio.timeout(30):
        async for each, data in stream:
            if each == name:
                return data
    return None


async def test_a_request_is_seen_as_it_passes(tokenizer_dir, monkeypatch):
    monkeypatch.setattr("proxy.control.live.TICK_S", 0.1)
    async with watched(tokenizer_dir) as (world, client), client.stream("GET", "/admin/v1/events") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache, no-transform"
        stream = events(answer)
        snapshot = await next_of(stream, "snapshot")
        assert [engine["id"] for engine in snapshot["engines"]] == ["a"]
        body = {**ASK, "messages": [{"role": "user", "content": WORDS}]}
        served = await client.post(CHAT, json=body)
        placed, finished = await next_of(stream, "placed"), await next_of(stream, "finished")
        assert placed["request_id"] == finished["request_id"] == served.headers["x-request-id"]
        assert placed["n_tokens"] > 0
        assert (finished["status"], finished["reported_tokens"]) == (200, 32)
        assert "nobody" not in str((placed, finished))
        assert (await next_of(stream, "snapshot"))["requests"] == 1
        assert len(world.proxy.live.viewers) == 1
        await answer.aclose()
        await until(lambda: not world.proxy.live.viewers)


async def test_it_needs_the_admin_key_and_a_new_one_after_a_reload(tokenizer_dir):
    async with watched(tokenizer_dir, admin_key="old") as (world, client):
        assert (await client.get("/admin/v1/events")).status_code == 401
        headers = {"authorization": "Bearer old"}
        async with client.stream("GET", "/admin/v1/events", headers=headers) as answer:
            stream = events(answer)
            await next_of(stream, "snapshot")
            world.proxy.reload(world.proxy.settings)
            assert await next_of(stream, "nothing") is None  # it has ended


async def test_head_gets_the_headers_alone(tokenizer_dir):
    async with watched(tokenizer_dir) as (world, client):
        answer = await client.head("/admin/v1/events")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
        assert not world.proxy.live.viewers
