"""Engines that several workers share: real processes that listen."""

import asyncio
import json
import sys
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from engine_adapter import EngineSpecError
from proxy.fleet.managed_engine import ProcessState
from proxy.runtime import Supervisor
from proxy.server.workers.supervisor import SharedEngines, starting_file
from proxy.settings import ManagedSettings, Settings

SERVER = f"{sys.executable} -m http.server --bind 127.0.0.1 {{port}}"


def engine(name, **more):
    return ManagedSettings(kind="openai_compatible", id=name, command=SERVER, **more)


def settings(*engines):
    return Settings(managed=engines, graceful_shutdown_s=0)


@pytest.fixture
async def shared(tmp_path, monkeypatch):
    (tmp_path / "health").touch()  # what the engines serve
    monkeypatch.chdir(tmp_path)
    tasks = Supervisor()
    shared = SharedEngines(tmp_path, tasks, lambda: None, workers=1)
    yield shared
    await shared.aclose()
    await tasks.stop()


def told(tmp_path):
    return {each["id"]: each for each in json.loads((tmp_path / "engines.json").read_text())["engines"]}


async def listens(url):
    port = int(url.rpartition(":")[2])
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def test_engines_follow_the_settings(shared, tmp_path):
    shared.follow(settings(engine("a"), engine("b")))
    first = told(tmp_path)
    assert sorted(first) == ["a", "b"]
    async with asyncio.timeout(30):
        while not (await listens(first["a"]["url"]) and await listens(first["b"]["url"])):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    shared.follow(settings(engine("a", model="other"), engine("c")))
    assert sorted(told(tmp_path)) == ["a", "c"]
    async with asyncio.timeout(30):
        while (second := told(tmp_path))["a"].get("model") != "other":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        while not await listens(second["a"]["url"]) or await listens(first["b"]["url"]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert not await listens(first["a"]["url"])


async def test_an_engine_that_cannot_be_used_changes_nothing(shared, tmp_path):
    shared.follow(settings(engine("a")))
    before = told(tmp_path)
    bad = ManagedSettings(
        kind="llama_server", id="x", command=("-m", "x", "--slot-save-path", "/one"), host_cache_dir="/two"
    )
    with pytest.raises(EngineSpecError, match="differ"):
        shared.follow(settings(bad))
    assert told(tmp_path) == before


async def test_changed_engines_are_replaced_one_after_the_other(shared, tmp_path):
    shared.follow(settings(engine("a"), engine("b")))
    first = told(tmp_path)
    async with asyncio.timeout(30):
        while not (await listens(first["a"]["url"]) and await listens(first["b"]["url"])):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    shared.follow(settings(engine("a", model="new"), engine("b", model="new")))
    async with asyncio.timeout(30):
        while (now := told(tmp_path))["b"] == first["b"]:
            assert await listens(first["b"]["url"])
            await asyncio.sleep(0.02)
        assert now["a"]["model"] == now["b"]["model"] == "new"
        assert await listens(now["a"]["url"])
        while not await listens(now["b"]["url"]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("state", "seconds"), [(ProcessState.READY, 0.2), (ProcessState.STARTING, 0.4)])
async def test_an_engine_that_leaves_waits_for_those_that_join(shared, state, seconds):
    old = SimpleNamespace(stop=AsyncMock(), spec=SimpleNamespace(url="http://old"))
    began = time.monotonic()
    await shared._end(old, 0.2, [SimpleNamespace(state=state)])
    assert seconds <= time.monotonic() - began + 0.01
    old.stop.assert_awaited_once()


async def test_an_engine_that_leaves_ends_once_no_worker_uses_it(shared):
    """Before, after `graceful_shutdown_s`, however idle it was."""
    old = SimpleNamespace(stop=AsyncMock(), spec=SimpleNamespace(url="http://old"))
    shared._is_used = AsyncMock(side_effect=[True, False])
    async with asyncio.timeout(5):
        await shared._end(old, 60.0)
    shared._is_used.assert_awaited_with("http://old")
    old.stop.assert_awaited_once()


@pytest.mark.parametrize("command", [SERVER, "false {port}"])
async def test_a_file_is_there_until_the_first_start_of_an_engine_has_ended(shared, tmp_path, command):
    shared.follow(settings(engine("a").model_copy(update={"command": tuple(command.split())})))
    file = starting_file(tmp_path, told(tmp_path)["a"]["url"])
    assert file.exists()
    async with asyncio.timeout(30):
        while file.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert await listens(told(tmp_path)["a"]["url"]) == (command == SERVER)


async def test_the_file_of_a_first_start_goes_also_where_the_engine_is_replaced_meanwhile(shared, tmp_path):
    """Fails: the new engine's task has the name of the old one's, and ends it. An engine that gets the same
    port later would seem to start for ever."""
    slow = engine("a").model_copy(update={"command": ("sh", "-c", "sleep 60; echo {port}")})
    shared.follow(settings(slow))
    file = starting_file(tmp_path, told(tmp_path)["a"]["url"])
    await asyncio.sleep(0.2)
    assert file.exists()
    shared._is_used = AsyncMock(return_value=False)
    shared.follow(settings(slow.model_copy(update={"command": ("sh", "-c", "sleep 61; echo {port}")})))
    async with asyncio.timeout(10):
        while starting_file(tmp_path, told(tmp_path)["a"]["url"]) == file:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await asyncio.sleep(2.0)  # the old one has ended
    assert not file.exists()
