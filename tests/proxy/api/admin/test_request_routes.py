import gzip
import json
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxy.cli.main import app
from proxy.core.index.match import Match
from proxy.core.placement.decision import Candidate
from proxy.core.placement.rates import EngineRates, PoolRates
from proxy.core.placement.scores import place
from tests.kv_world import tokens


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
