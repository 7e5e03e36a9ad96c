"""`kvpin advise`, as people see it."""

import msgspec
import pytest
from typer.testing import CliRunner

from proxy.cli.main import app
from proxy.replay.trace import Recording, RecordingLine
from tests.proxy.replay.test_advise import LONG, chat, line


def run(path, *lines, options=()):
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in lines))
    return CliRunner().invoke(app, ["advise", str(path), *options])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "traffic.jsonl"


def test_rules_and_changes_are_told_with_their_shares(path):
    told = run(path, *(line(**chat(f"Now 2026-11-25T23:0{at}:44Z. {LONG}", "Hi")) for at in range(2)))
    assert told.exit_code == 0
    assert (
        "2 requests with 2,000 prompt tokens. A cache that keeps everything has 0.0% of them." in told.output
    )
    rows = [row.split() for row in told.output.splitlines()]
    assert ["date_to_day", "1,000", "50.0%", "1", "50.0%"] in rows
    assert "`kvpin serve --normalise RULE` chooses one." in told.output
    assert any(row[:5] == ["system", "1,000", "50.0%", "1", "50.0%"] for row in rows)


def test_the_rules_of_each_client_are_named(path):
    told = run(path, *(line(None, "pi", **chat(f"In /home/me/{at}. {LONG}", "Hi")) for at in range(2)))
    assert "pi: paths saves 1,000 tokens, all saves 1,000 tokens." in told.output


def test_requests_without_a_session_are_not_called_unchanged(path):
    told = run(path, line(**chat(LONG)), line(None, **chat(LONG)))
    assert "No session changes what it sent before. 1 requests name no session, and were" in told.output


def test_several_recordings_are_one(path, tmp_path):
    about = msgspec.json.encode(RecordingLine(Recording(1.0, "k"))) + b"\n"
    files = [path, tmp_path / "traffic-1.jsonl"]
    for file in files:
        file.write_bytes(about + msgspec.json.encode(line(**chat(LONG))) + b"\n")
    told = CliRunner().invoke(app, ["advise", *map(str, files)])
    assert "2 requests with 2,000 prompt tokens. A cache that keeps everything has 50.0%" in told.output
    files[1].write_bytes(b"")
    told = CliRunner().invoke(app, ["advise", *map(str, files)])
    assert (told.exit_code, "does not say when it began" in told.output) == (2, True)
