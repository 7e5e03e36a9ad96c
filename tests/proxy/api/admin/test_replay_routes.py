import gzip
from importlib import import_module
from pathlib import Path

import pytest

replay_routes = import_module("proxy.api.admin.request_routes")  # the package has a function of that name
TRACES = Path(__file__).parents[3] / "data" / "traces"


@pytest.fixture(scope="module")
def trace():
    with gzip.open(TRACES / "agents.jsonl.gz") as file:
        return b"".join(file.readlines()[:20])


async def test_the_body_is_replayed(client, trace):
    answer = await client.post("/replays?engines=1,2&policies=kvpin", content=trace)
    assert answer.status_code == 200
    content = answer.json()
    assert content["title"].startswith("recording: 20 requests")
    assert [(run["policy"], run["engines"]) for run in content["runs"]] == [("kvpin", 1), ("kvpin", 2)]
    assert len(content["curves"]) == 3


async def test_what_cannot_be_replayed_names_its_field(client, trace):
    wrong = await client.post("/replays?engines=0", content=trace)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "engines")
    unknown = await client.post("/replays?html=x", content=trace)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "html")


async def test_a_long_body_is_refused(client, monkeypatch):
    monkeypatch.setattr(replay_routes, "MAX_TRACE_BYTES", 10)
    assert (await client.post("/replays", content=b"x" * 11)).status_code == 413
