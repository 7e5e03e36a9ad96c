import asyncio
import gzip
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from proxy.control import replays as module
from proxy.control.replays import Replays
from proxy.errors import BadRequest
from tests.live.answers import until
from tests.processes import is_alive

TRACES = Path(__file__).parents[2] / "data" / "traces"
PLAYS = """
import asyncio, sys
from proxy.control.replays import Replays
engines = ",".join(map(str, range(1, 100)))
asyncio.run(Replays().play(sys.stdin.buffer.read(), {"engines": engines}))
"""


@pytest.fixture(scope="module")
def trace():
    with gzip.open(TRACES / "agents.jsonl.gz") as file:
        return b"".join(file.readlines()[:40])


def children():
    """The ids of this process's own processes."""
    found = set()
    for each in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # the thread has ended since
            found.update((each / "children").read_text().split())
    return found


async def test_one_at_a_time_and_its_process_ends_with_the_call(trace):
    replays, before = Replays(), children()
    call = asyncio.ensure_future(replays.play(trace, {"policies": "all"}))
    while children() == before:  # noqa: ASYNC110 - a process tells nobody that it began
        await asyncio.sleep(0.01)
    next_one = asyncio.ensure_future(replays.play(trace, {"policies": "oracle"}))
    await asyncio.sleep(0)
    assert len(children() - before) == 1
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [run["policy"] for run in (await next_one).runs] == ["oracle"]
    assert children() == before


async def test_a_replay_that_takes_too_long_ends(trace, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_S", 0.01)
    before = children()
    with pytest.raises(BadRequest, match=r"takes longer than 0\.01 s"):
        await Replays().play(trace, {})
    assert children() == before


@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
def test_its_process_ends_with_a_kvpin_that_is_killed():
    lines = gzip.decompress((TRACES / "agents.jsonl.gz").read_bytes())
    kvpin = subprocess.Popen([sys.executable, "-c", PLAYS], stdin=subprocess.PIPE)
    try:
        kvpin.stdin.write(lines)
        kvpin.stdin.close()
        (child,) = until(lambda: Path(f"/proc/{kvpin.pid}/task/{kvpin.pid}/children").read_text().split())
        until(lambda: b"\0replay\0" in Path(f"/proc/{child}/cmdline").read_bytes())
    finally:
        kvpin.kill()
        kvpin.wait()
    until(lambda: not is_alive(child))


async def test_a_process_that_dies_is_told(trace, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(BadRequest, match="ended with status 1"):
        await Replays().play(trace, {})
