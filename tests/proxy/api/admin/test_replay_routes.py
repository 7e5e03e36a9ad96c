import gzip
import json
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxy.cli.main import app

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
        (b"", {}, "the recording: ", None),
        (None, {"gpu_tokens": "much"}, "--gpu-tokens: 'much' is not an amount", "gpu_tokens"),
        (None, {"policies": "--html=/tmp/x"}, "--policies: there is no policy '--html=/tmp/x'", "policies"),
        (None, {"load": "fast"}, "Invalid value for '--load'", "load"),
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
